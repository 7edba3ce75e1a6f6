"""docs/design.md against the code: every folder is in a layer, imports go down."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "diloco"
PAGE = (ROOT / "docs/design.md").read_text()


def layers() -> dict[str, int]:
  """{folder, or file beside the folders: its layer, the lowest is 0}."""
  block = re.search(r"## Layers.*?```\n(.*?)```", PAGE, re.S)[1]
  lines = reversed(block.splitlines())
  return {name: i for i, line in enumerate(lines) for name in line.split()}


def imports(path: pathlib.Path) -> set[str]:
  """What a file imports of diloco, anywhere in it: names such as `wire` or `train`."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diloco"):
      _, *names = node.module.split(".")
      found |= {names[0]} if names else {alias.name for alias in node.names}
    elif isinstance(node, ast.Import):
      found |= {
        a.name.split(".")[1] for a in node.names if a.name.startswith("diloco.")
      }
  return found


def test_every_folder_and_file_is_in_a_layer():
  others = ("__pycache__", "py.typed")
  found = {p.stem for p in PACKAGE.iterdir() if p.name not in others}
  assert set(layers()) == found


def test_imports_go_down_without_exception():
  layer = layers()
  for path in PACKAGE.rglob("*.py"):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for other in imports(path) - {own}:
      message = f"{path.relative_to(ROOT)} imports {other}, which is not below it"
      assert layer[other] < layer[own], message


def test_the_core_cites_no_later_paper_and_names_no_plug_in():
  """Apart from eXmY's format and PaLM's count of FLOPs, and an example of a plug-in."""
  own = {"2501.18512", "2503.09799", "2405.13938", "2204.02311"}
  names = {p.stem for p in (PACKAGE / "contrib").glob("[a-z]*.py")} - {"sparta"}
  for folder in ("algorithm", "wire", "spec", "config"):
    for path in (PACKAGE / folder).glob("*.py"):
      words = set(re.findall(r"[\w.]*\w", path.read_text()))
      assert {w for w in words if re.fullmatch(r"\d{4}\.\d{5}", w)} <= own, path
      assert not words & names, path
