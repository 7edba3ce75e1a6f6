"""The table of cells and runs."""

import json

from fake_runs import Fake, finish, make_driver, make_sweep

from diloco.sweep import progress


def test_progress_names_every_cell_with_its_best_point(tmp_path):
  driver = make_driver(make_sweep(), tmp_path, Fake())
  cells = finish(driver)
  first, last = progress.lines(cells, driver.rows.values())[1::2]
  assert first.split()[:5] == ["g", "replicas=1", "interior", "4/4", "3.0000"]
  assert "lr=0.003906" in first
  assert last == "2 of 2 cells, 8 runs done, 0 running, 0 failed"


def test_progress_tells_the_step_and_the_time_left_of_running_runs(tmp_path):
  record = lambda step, **more: json.dumps({"kind": "step", "step": step, **more})
  newest = record(40, tokens=4_000, tokens_per_s=20.0)
  eval_ = json.dumps({"kind": "eval", "step": 41, "loss": 3.0})
  before = [record(step, tokens=1, tokens_per_s=1.0) for step in range(40)]
  config = {"train": {"steps": 100, "tokens": 10_000}}
  row = {"name": "a", "status": "running", "config": config, "point": {"lr": 0.1}}
  row["folder"] = tmp_path / "a"
  shown = lambda: progress.lines([], [row])[0].split(maxsplit=2)
  (tmp_path / "a").mkdir()
  assert shown() == ["running", "a", "starting  lr=0.1"]
  metrics = tmp_path / "a" / "metrics.jsonl"
  # A writer was killed within the last line, or is in the middle of the line.
  metrics.write_text("\n".join([*before, newest, eval_, '{"kind": "st']))
  assert shown()[2].split("  ")[0] == "step 40 of 100, 0:05:00 left"
  metrics.write_text("\n".join(["x" * 200_000, newest, "y" * 200_000]))
  assert shown()[2].split("  ")[0] == "step 40 of 100, 0:05:00 left"
  metrics.write_text(record(7, tokens=700, tokens_per_s=None))
  assert shown()[2].split("  ")[0] == "step 7 of 100"


def test_progress_says_why_runs_failed_once(capsys):
  rows = [{"status": "failed", "error": e} for e in ("a", "b", "b", "c", "d")]
  rows.append({"status": "done", "error": None})
  more, *shown = progress.lines([], rows)[:-1]
  assert more == "1 more reasons: see --export"
  assert shown == ["failed: b", "failed: c", "failed: d"]
  live = progress.Live()
  for some in (rows[:1], rows[:2], rows[:2], rows[:3]):
    live([], some)
  said = [line for line in capsys.readouterr().err.splitlines() if "cells" not in line]
  assert said == ["failed: a", "failed: b"]
