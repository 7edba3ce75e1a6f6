"""Outputs of notebooks that run are stored; other notebooks stay as they were."""

import pathlib

import pytest

NEEDS = "needs pip install '.[notebooks]'"
run_notebooks = pytest.importorskip("run_notebooks", reason=NEEDS)
nbformat = pytest.importorskip("nbformat", reason=NEEDS)


def write(path: pathlib.Path, *cells: str) -> pathlib.Path:
  book = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
  nbformat.write(book, path)
  return path


def test_outputs_are_stored_without_messages_and_times(tmp_path, capsys):
  noisy = "import sys, pathlib\nprint('told', file=sys.stderr)\nprint(2 + 3)"
  path = write(tmp_path / "a.ipynb", noisy, "pathlib.Path.cwd().name")
  assert run_notebooks.main([str(path)]) == 0
  first, second = nbformat.read(path, as_version=4).cells
  assert [o.text for o in first.outputs] == ["5\n"]
  assert second.outputs[0].data["text/plain"] == repr(tmp_path.name)
  assert "execution" not in first.metadata
  assert str(path) in capsys.readouterr().out
  # The notebook is rewritten only if an output changes.
  before = path.stat().st_mtime_ns
  assert run_notebooks.main([str(path)]) == 0
  assert path.stat().st_mtime_ns == before


def test_a_notebook_with_an_error_is_left_as_it_was(tmp_path, capsys):
  path = write(tmp_path / "a.ipynb", "1 / 0")
  before = path.read_text()
  assert run_notebooks.main([str(path)]) == 1
  assert path.read_text() == before
  assert "is left as it was" in capsys.readouterr().err
