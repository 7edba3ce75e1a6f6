"""configs/accuracies.py: its cells, their configs, and the accuracy of a run."""

import json

import pytest
from fake_runs import Fake, finish, make_driver, make_sweep, rows_of, summary_of

from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.sweep import csv_file
from diloco.sweep.load import load_sweep
from diloco.sweep.table import as_json
from diloco.util import command, files

FILE = command.load_module("accuracies", "get_sweep", "")


@pytest.mark.parametrize("name", FILE.ABLATIONS)
def test_every_config_resolves_and_scores_the_items(name):
  sweep = load_sweep(f"accuracies:{name},seeds=2,items=/items/word.jsonl")
  cells = [cell for grid in sweep.grids for cell in grid.cells]
  seeds = {1, 2} if name not in FILE.EIGHT else {*range(1, 9)}
  found = [resolve(sweep.config({**cell})) for cell in cells]
  assert {c.eval.tasks for c in found} == {"/items/word.jsonl"}
  assert {c.seed for c in found} == seeds
  assert len({json.dumps(as_json(c)) for c in found}) == len(found)


def test_a_seed_of_all_comparisons_has_94_runs():
  assert sum(len(cells) for cells, _ in FILE.ABLATIONS.values()) == 94


def test_without_items_the_runs_are_those_of_the_other_files():
  def config(argument, **point):
    return as_json(resolve(load_sweep(argument).config(point)))

  small = {"size": "small", "algorithm": "streaming", "replicas": 2, "seed": 1}
  own = config("accuracies:alpha", **small, scored=True, alpha=0.5, tau=5)
  assert own == config("ablations:tau", **small, alpha=0.5, tau=5)
  some = {"algorithm": "diloco", "replicas": 2, "lr": 0.01, "batch": 8, "seed": 1}
  own = config("accuracies:sizes", size=185, scored=True, **some)
  assert own == config("ladder:", size=185, **some)
  some["algorithm"] = "streaming"
  streamed = config("accuracies:sizes", size=185, scored=True, **some)
  assert streamed["outer"]["final_sync"]
  assert streamed["fragments"]["size"] == 1


@pytest.mark.parametrize("argument", ["none", "alpha,seeds=0", "alpha,size=35M"])
def test_a_wrong_argument_is_refused(argument):
  with pytest.raises(ConfigError):
    load_sweep(f"accuracies:{argument}")


def test_the_accuracy_of_a_run_is_that_of_its_first_task(tmp_path):
  def end(run, config):
    scores = {"a": {"accuracy": 0.5}, "b": {"accuracy": 0.25}}
    files.write_json(run / "summary.json", summary_of(config) | {"tasks": scores})

  finish(make_driver(make_sweep(), tmp_path / "scored", Fake(end)))
  assert {row["accuracy"] for row in rows_of(tmp_path / "scored")} == {0.5}
  finish(make_driver(make_sweep(), tmp_path / "plain", Fake()))
  rows = rows_of(tmp_path / "plain")
  assert {row["accuracy"] for row in rows} == {None}
  later = {"step": 10, "tasks": {"a": {"accuracy": 0.75}}}
  files.write_json(rows[0]["folder"] / "evaluation_10.json", later)
  # The accuracy of an earlier checkpoint does not belong to the run's loss.
  earlier = {"step": 2, "tasks": {"a": {"accuracy": 0.125}}}
  files.write_json(rows[0]["folder"] / "evaluation_02.json", earlier)
  accuracies = [row["accuracy"] for row in rows_of(tmp_path / "plain")]
  assert accuracies == [0.75] + [None] * (len(rows) - 1)
  csv_file.export(rows_of(tmp_path / "plain"), tmp_path / "a.csv")
  csv_file.load(tmp_path / "a.csv", tmp_path / "again")
  assert [row["accuracy"] for row in rows_of(tmp_path / "again")] == accuracies
