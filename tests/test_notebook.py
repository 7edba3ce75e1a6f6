"""The notebook is whole: it parses, compiles, and sets fields that exist."""

import ast
import json
import pathlib

import pytest

from diloco.config import Config
from diloco.config.resolve import leaves

ROOT = pathlib.Path(__file__).parents[1]
BOOK = json.loads((ROOT / "notebooks/sample.ipynb").read_text())
CELLS = ["".join(c["source"]) for c in BOOK["cells"] if c["cell_type"] == "code"]


def test_it_is_a_notebook_with_outputs_of_no_one_machine():
  assert BOOK["nbformat"] == 4
  assert len({c["id"] for c in BOOK["cells"]}) == len(BOOK["cells"])
  code = [c for c in BOOK["cells"] if c["cell_type"] == "code"]
  outputs = [o for c in code for o in c["outputs"]]
  assert not [o for o in outputs if o["output_type"] == "error"]
  assert "/tmp/" not in json.dumps(outputs)
  assert sum("image/png" in o.get("data", {}) for o in outputs) == 3


def test_every_field_it_sets_exists():
  fields = []
  for tree in map(ast.parse, CELLS):
    for node in ast.walk(tree):
      for target in node.targets if isinstance(node, ast.Assign) else ():
        name = ast.unparse(target)
        if name.startswith("config."):
          fields.append(name.removeprefix("config."))
  assert "train.steps" in fields
  assert set(fields) <= set(leaves(Config().to_dict()))


@pytest.mark.parametrize("folder", [".", "notebooks", "docs/figures", ".."])
def test_it_finds_the_root(folder, monkeypatch):
  monkeypatch.chdir(ROOT / folder)
  monkeypatch.syspath_prepend(ROOT)
  names: dict = {}
  exec(CELLS[0].split("root = find_root()")[0], names)
  found = names["find_root"]()
  assert found is not None
  assert (found / "diloco/train.py").is_file()
