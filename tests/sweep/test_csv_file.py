"""Exports and imports of results."""

import csv
import json

import pytest
from fake_runs import (
  Fake,
  config,
  finish,
  make_driver,
  make_sweep,
  rows_of,
  without,
  write_run,
)
from running import ROOT, read_csv

from diloco.config import resolve
from diloco.sweep import table
from diloco.sweep.csv_file import export, load
from diloco.sweep.table import as_json


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
  """A folder: `a` holds the results of a sweep, out.csv exports them."""
  folder = tmp_path_factory.mktemp("swept")
  finish(make_driver(make_sweep(), folder / "a", Fake()))
  assert export(rows_of(folder / "a"), folder / "out.csv") == 8
  return folder


@pytest.fixture
def exported(swept):
  return read_csv(swept / "out.csv")


def test_a_sweep_goes_on_from_an_exported_file(swept, tmp_path):
  b = tmp_path / "b"
  never = Fake(lambda run, saved: None)
  make_driver(make_sweep(), b, never).step()  # Starts both; imported ones replace them.
  assert len(rows_of(b)) == 2
  assert load(swept / "out.csv", b) == load(swept / "out.csv", b) == 8
  again = Fake()
  finish(make_driver(make_sweep(), b, again))
  assert again.started == []
  before = table.read_rows(swept / "a")
  for row in rows_of(b):
    assert row["status"] == "done"
    assert row["loss"] == pytest.approx(before[row["name"]]["loss"], rel=1e-5)
    assert row["revision"] == before[row["name"]]["revision"]
    assert row["group"] == before[row["name"]]["group"] != ""


def write_some(path, rows):
  with path.open("w") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)


def test_an_imported_file_is_exported_as_it_was(tmp_path):
  # Importing all of them takes a while.
  before = read_csv(ROOT / "docs" / "ladder.csv")[::24]
  write_some(tmp_path / "some.csv", before)
  assert load(tmp_path / "some.csv", tmp_path) == len(before) > 10
  export(rows_of(tmp_path), tmp_path / "out.csv")
  after = read_csv(tmp_path / "out.csv")
  assert [{**row, "name": ""} for row in after] == [{**x, "name": ""} for x in before]
  assert list(before[0]) == list(after[0])
  assert all(row["test_loss_first"] for row in after)


@pytest.mark.parametrize("name", ["gap", "reproduced"])
def test_the_published_runs_can_be_imported(tmp_path, name):
  rows = [r for r in read_csv(ROOT / f"docs/{name}.csv") if r["status"] == "done"]
  some = {tuple(json.loads(row["config"])): row for row in rows}  # All sets of fields.
  write_some(tmp_path / "some.csv", [*some.values()])
  assert load(tmp_path / "some.csv", tmp_path) == len(some) > 10


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"loss": ""}, "loss is '', but the run is done"),
    ({"loss": "nan"}, "loss is 'nan', but the run is done"),
    ({"params": "1.5"}, "'1.5'"),
    ({"replicas": "3"}, "train.batch_size is 4"),
    ({"status": "well"}, "status is 'well', neither done nor failed"),
    ({"config": "[]"}, "'list' object has no attribute"),
    ({"config": '{"model.warp": 1}'}, "warp"),
    ({None: ["more"]}, "as many cells"),
  ],
)
def test_an_import_names_the_line_that_is_wrong(exported, tmp_path, change, message):
  rows = [{**row} for row in exported]
  rows[4] |= change
  with (tmp_path / "out.csv").open("w") as file:
    writer = csv.writer(file)
    writer.writerow(rows[0])
    for row in rows:
      writer.writerow([*(v for k, v in row.items() if k), *row.get(None, ())])
  with pytest.raises(ValueError, match=r"^line 6 of .* cannot be imported") as error:
    load(tmp_path / "out.csv", tmp_path / "b")
  assert message in str(error.value)
  assert not (tmp_path / "b").exists()  # All or none.


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "status,loss\ndone,3\n", "", "\0"])
def test_a_file_that_is_no_export_is_refused(tmp_path, text):
  (tmp_path / "t.csv").write_text(text)
  with pytest.raises(ValueError, match=r"line 1 of .* is no column .*algorithm"):
    load(tmp_path / "t.csv", tmp_path)


def test_an_export_has_runs_of_code_with_other_fields(tmp_path):
  written = as_json(resolve(config({"replicas": 1, "lr": 1})))
  older = without(written, "outer.learning_rate") | {"gone": 1}
  write_run(tmp_path, "a", older, ended={"failed": True, "error": "lost"})
  # A point without a valid config.
  write_run(tmp_path, "b", None, ended={"failed": True, "error": "refused"})
  assert export(rows_of(tmp_path), tmp_path / "out.csv") == 2
  first, second = read_csv(tmp_path / "out.csv")
  assert second["outer_learning_rate"] == second["matrix_params"] == ""
  assert (first["outer_learning_rate"], first["replicas"]) == ("0.4", "1")
  assert json.loads(first["config"])["gone"] == 1
