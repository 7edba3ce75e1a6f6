"""The notebook runs with today's code, and its stored outputs are complete."""

import json
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BOOK = json.loads((ROOT / "notebooks/sample.ipynb").read_text())
CELLS = ["".join(c["source"]) for c in BOOK["cells"] if c["cell_type"] == "code"]


def test_the_outputs_are_complete_and_name_no_machine():
  assert BOOK["nbformat"] == 4
  assert len({c["id"] for c in BOOK["cells"]}) == len(BOOK["cells"])
  code = [c for c in BOOK["cells"] if c["cell_type"] == "code"]
  outputs = [o for c in code for o in c["outputs"]]
  assert not [o for o in outputs if o["output_type"] == "error"]
  assert "/tmp/" not in json.dumps(outputs)
  assert sum("image/png" in o.get("data", {}) for o in outputs) == 3


@pytest.mark.parametrize("folder", [".", "notebooks", "docs/figures", ".."])
def test_the_notebook_finds_the_root(folder, monkeypatch):
  monkeypatch.chdir(ROOT / folder)
  monkeypatch.syspath_prepend(ROOT)
  names: dict = {}
  exec(CELLS[0].split("root = find_root()")[0], names)
  found = names["find_root"]()
  assert found is not None
  assert (found / "diloco/train.py").is_file()


def run(cells: list[str]) -> dict:
  """Runs cells on a small model; returns their variables."""
  names: dict = {}
  for cell in cells:
    # Without IPython, which the tests do not need.
    exec(re.sub(r".*IPython.*|display\..*", "", cell), names)
    if "config =" in cell:
      small = {"model.dim": 16, "model.seq_len": 32, "train.batch_size": 4}
      few = {"train.steps": 22, "eval.every": 11, "eval.tokens": 512}
      names["config"].update_from_flattened_dict(small | few)
  return names


@pytest.fixture
def notebook_folder(monkeypatch, tmp_path):
  monkeypatch.setenv("MPLBACKEND", "agg")  # Draws the plots and shows none.
  monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
  monkeypatch.setattr(sys, "path", [*sys.path])
  monkeypatch.chdir(ROOT / "notebooks")


def test_the_cells_before_training_run(notebook_folder, capsys):
  assert run(CELLS[:3])["schedule"].num_fragments == 5
  assert "fragments.size: 3 -> 1" in capsys.readouterr().out


@pytest.mark.slow  # About 20 s on one core, most of it compiling.
def test_all_cells_run(notebook_folder, capsys):
  names = run(CELLS)
  assert names["summary"]["steps"] == 22
  assert names["ratio"] > 10
  assert "My fellow citizens" in capsys.readouterr().out
