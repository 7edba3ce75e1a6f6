"""docs/design.md against the code: every room is on a floor, imports go down."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "diloco"
PAGE = (ROOT / "docs/design.md").read_text()


def floors() -> dict[str, int]:
  """{room: its floor, counted from the ground}."""
  block = re.search(r"## Floors.*?```\n(.*?)```", PAGE, re.S)[1]
  lines = reversed(block.splitlines())
  return {room: i for i, line in enumerate(lines) for room in line.split()}


def plans() -> set[str]:
  """Modules that every floor may import."""
  paths = re.findall(r"`(\w+/\w+)\.py`", PAGE[PAGE.index("import no JAX") :])
  return {"diloco." + path.replace("/", ".") for path in paths}


def imports(path: pathlib.Path) -> set[str]:
  """The modules of diloco that a file imports, anywhere in it."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diloco"):
      for alias in node.names:
        module = f"{node.module}.{alias.name}"
        whole = PACKAGE.parent / module.replace(".", "/")
        known = whole.is_dir() or whole.with_suffix(".py").is_file()
        found.add(module if known else node.module)
    elif isinstance(node, ast.Import):
      found |= {a.name for a in node.names if a.name.startswith("diloco")}
  return found


def test_every_room_is_on_a_floor():
  rooms = {p.name for p in PACKAGE.iterdir() if not p.name.startswith("__")}
  assert set(floors()) == rooms
  assert len(rooms) <= 18


def test_imports_go_down():
  floor, open_to_all = floors(), plans()
  for path in PACKAGE.rglob("*.py"):
    room = path.relative_to(PACKAGE).parts[0]
    if path.name == "__main__.py" or room.startswith("__"):
      continue
    for module in imports(path) - open_to_all:
      other = module.split(".")[1]
      other = other if other in floor else other + ".py"
      below = floor[other] < floor[room] or other == room
      assert below, f"{path.relative_to(ROOT)} imports {module}, which is not below it"
