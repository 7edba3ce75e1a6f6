"""docs/design.md against the code: every folder is in a layer, imports go down."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "diloco"
PAGE = (ROOT / "docs/design.md").read_text()


def layers() -> dict[str, int]:
  """{folder: its layer, the lowest is 0}."""
  block = re.search(r"## Layers.*?```\n(.*?)```", PAGE, re.S)[1]
  lines = reversed(block.splitlines())
  return {folder: i for i, line in enumerate(lines) for folder in line.split()}


def plans() -> set[str]:
  """Modules that every layer may import."""
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


def test_every_folder_is_in_a_layer():
  folders = {p.name for p in PACKAGE.iterdir() if not p.name.startswith("__")}
  assert set(layers()) == folders
  assert len(folders) <= 18


def test_imports_go_down():
  layer, open_to_all = layers(), plans()
  for path in PACKAGE.rglob("*.py"):
    folder = path.relative_to(PACKAGE).parts[0]
    if path.name == "__main__.py" or folder.startswith("__"):
      continue
    for module in imports(path) - open_to_all:
      other = module.split(".")[1]
      other = other if other in layer else other + ".py"
      below = layer[other] < layer[folder] or other == folder
      assert below, f"{path.relative_to(ROOT)} imports {module}, which is not below it"
