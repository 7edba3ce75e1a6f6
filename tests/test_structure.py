"""docs/design.md against the code: every folder is in a layer, imports go down."""

import ast
import functools
import pathlib
import re
from collections.abc import Sequence

from diloco.spec import plugins

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "diloco"
PAGE = (ROOT / "docs/design.md").read_text()


@functools.cache
def layers() -> dict[str, int]:
  """{a folder such as `wire`, or a file beside the folders: its layer, from below}."""
  block = re.search(r"## Layers.*?```\n(.*?)```", PAGE, re.S)[1]
  lines = reversed(block.splitlines())
  return {name: i for i, line in enumerate(lines) for name in line.split()}


def room(parts: Sequence[str]) -> str:
  """The folder or file of the page in which a module lies, the innermost."""
  names = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
  return next(name for name in names if name in layers())


def imports(path: pathlib.Path) -> set[str]:
  """What a file imports of diloco, anywhere in it: names such as `wire` or `train`."""
  found = set[str]()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom):
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
    elif isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
  modules = [name.split(".")[1:] for name in found if name.startswith("diloco.")]
  return {room(parts) for parts in modules if parts[0] in layers()}


def test_every_folder_and_file_is_in_a_layer():
  others = ("__pycache__", "py.typed")
  found = {p.stem for p in PACKAGE.iterdir() if p.name not in others}
  assert {name for name in layers() if "/" not in name} == found
  assert all((PACKAGE / name).is_dir() for name in layers() if "/" in name)


def test_imports_go_down_without_exception():
  layer = layers()
  for path in PACKAGE.rglob("*.py"):
    own = room(path.relative_to(PACKAGE).with_suffix("").parts)
    for other in imports(path) - {own}:
      message = f"{path.relative_to(ROOT)} imports {other}, which is not below it"
      assert layer[other] < layer[own], message


def test_the_core_cites_no_later_paper_and_names_no_plug_in():
  """Apart from eXmY's format and PaLM's count of FLOPs, and an example of a plug-in."""
  own = {"2501.18512", "2503.09799", "2405.13938", "2204.02311"}
  names = {*plugins.contrib()} - {"sparta"}
  core = ["algorithm", "wire", "spec", "config", "model", "tokenizer", "interop"]
  for folder in core:
    for path in (PACKAGE / folder).glob("*.py"):
      words = set(re.findall(r"[\w.]*\w", path.read_text()))
      assert {w for w in words if re.fullmatch(r"\d{4}\.\d{5}", w)} <= own, path
      assert not words & names, path
