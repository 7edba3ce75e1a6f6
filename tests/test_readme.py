"""What the README says of the code: all files are named, imports go down the list."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]


def listed() -> dict[str, int]:
  """{file or package: its row in the README's table of files}."""
  text = (ROOT / "README.md").read_text()
  table = text[text.index("| file | what it says |") :].split("\n\n")[0]
  rows = [line.split("|")[1] for line in table.splitlines()[2:]]
  names = [re.findall(r"`(\w+)(?:\.py|/)`", row) for row in rows]
  return {name: i for i, row in enumerate(names) for name in row}


def imports(path: pathlib.Path) -> set[str]:
  """The files and packages of diloco that a file imports, anywhere in it."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module == "diloco":
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      found |= set(re.findall(r"^diloco\.(\w+)", node.module))
    elif isinstance(node, ast.Import):
      found |= {m for a in node.names for m in re.findall(r"^diloco\.(\w+)", a.name)}
  return found


def test_every_file_is_listed():
  files = {p.stem for p in (ROOT / "diloco").iterdir() if not p.name.startswith("__")}
  assert set(listed()) == files


def test_a_file_imports_only_files_below_it():
  rows = listed()
  for path in (ROOT / "diloco").rglob("*.py"):
    name = path.relative_to(ROOT / "diloco").parts[0].removesuffix(".py")
    for other in imports(path) - {name}:
      assert rows[name] <= rows[other], f"{name} imports {other}, which is above it"


def test_the_code_of_the_algorithm_is_where_the_table_says():
  text = (ROOT / "README.md").read_text()
  places = re.findall(r"\[`(\w+)\.(\w+)`\]\((diloco/\w+\.py)\)", text)
  assert len(places) >= 5
  for module, name, path in places:
    assert path == f"diloco/{module}.py"
    assert re.search(rf"^(?:def|class) {name}\b", (ROOT / path).read_text(), re.M)
