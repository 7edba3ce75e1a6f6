"""The driver: resuming, failures, signals. Runs are faked."""

import json
import math
import os
import signal
import time

import pytest
from fake_runs import (
  BEST,
  Fake,
  config,
  finish,
  make_driver,
  make_sweep,
  one_cell,
  rows_of,
  summary_of,
  without,
  write_run,
)

from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.sweep import table
from diloco.sweep.csv_file import export, load
from diloco.sweep.grid import Axis, Grid, Sweep
from diloco.sweep.runner import ATTEMPTS, drive
from diloco.sweep.table import alone, as_json, digest


def test_a_driven_sweep_ends_at_interior_points_and_repeats_no_run_and_no_reading(
  tmp_path, monkeypatch
):
  driver = make_driver(make_sweep(), tmp_path, Fake())
  with alone(tmp_path):
    assert drive(driver, lambda cells, rows: None, pause=0.01) == 0
  assert driver.backend.ends == []  # Nothing is stopped.
  started, read, read_row = driver.backend.started, [], table.read_row
  assert len(started) == len(set(started)) == len(driver.rows) == 8
  monkeypatch.setattr(table, "read_row", lambda run: read.append(run) or read_row(run))
  assert [c.best["lr"] for c in driver.step()] == [BEST, BEST]
  assert read == []
  again = Fake()
  finish(make_driver(make_sweep(), tmp_path, again))
  assert again.started == []


def test_tokens_that_are_missing_end_the_sweep_before_a_run_starts(tmp_path):
  def missing(point):
    c = config(point)
    c.data.source, c.model.vocab_size = f"arrays:{tmp_path}/none", 2048
    return c

  backend = Fake()
  driver = make_driver(Sweep(missing, make_sweep().grids), tmp_path / "r", backend)
  with pytest.raises(ConfigError, match=r"none/train/manifest.json does not exist;"):
    finish(driver)
  assert backend.started == []


def test_a_text_that_changes_ends_the_sweep(tmp_path):
  """Also where the earlier runs come from a file."""
  finish(make_driver(make_sweep(high=2**-8), tmp_path / "old", Fake()))
  old = rows_of(tmp_path / "old")
  export(old, tmp_path / "old.csv")
  load(tmp_path / "old.csv", tmp_path / "new")
  backend = Fake(lambda run, saved: Fake.good(run, saved, text="two"))
  driver = make_driver(make_sweep(), tmp_path / "new", backend, parallel=1)
  said = "{} has another text than {}: the content of data.source is two, not one, so"
  with pytest.raises(ConfigError) as error:
    finish(driver)
  folders = [
    tmp_path / "new/runs" / name for name in (*backend.started, old[0]["name"])
  ]
  assert str(error.value).startswith(said.format(*folders))
  assert "remove {}, or give another --results".format(*folders) in str(error.value)


def test_losses_with_different_tokenizers_are_not_tuned(tmp_path):
  def with_tokenizer(point):
    c = config({"replicas": 1, "lr": 1})
    c.data.tokenizer, c.model.vocab_size = point["tokenizer"], 2048
    return c

  grid = Grid("g", [{}], (Axis("tokenizer", ("sotu_2048", "other.model")),))
  backend = Fake()
  with pytest.raises(ConfigError, match="points that differ in data"):
    finish(make_driver(Sweep(with_tokenizer, [grid]), tmp_path, backend))
  assert backend.started == []


def test_a_failed_run_keeps_its_error_and_the_sweep_goes_on(tmp_path):
  def end(run, saved):
    if saved["inner"]["learning_rate"] > BEST:
      (run / "ended.json").write_text('{"failed": true, "error": "diverged at 3."}')
    else:
      Fake.good(run, saved)

  sweep = one_cell(2**-9, BEST, 2**-7)
  cells = finish(make_driver(sweep, tmp_path, Fake(end)))
  assert cells[0].best["lr"] == BEST
  failed = [row for row in rows_of(tmp_path) if row["status"] == "failed"]
  assert [row["error"] for row in failed] == ["diverged at 3."]
  table.retry_failed(tmp_path)
  retried = Fake()
  finish(make_driver(sweep, tmp_path, retried))
  assert retried.started == [failed[0]["name"]]


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    (lambda p: p["warp"], "at the point replicas=1 lr=1 raises KeyError: warp"),
    (lambda p: None, "raises AttributeError: 'NoneType'"),
    (lambda p: config({**p, "replicas": 3}), "train.batch_size is 4"),
  ],
)
def test_an_exception_of_a_sweep_file_is_a_failed_run(tmp_path, fault, message):
  grids = [Grid("g", [{"replicas": 1}], (Axis("lr", (1, 2)),))]
  some = lambda p: fault(p) if p["lr"] == 1 else config(p)
  (cell,) = finish(make_driver(Sweep(some, grids), tmp_path, Fake()))
  assert cell.best["lr"] == 2
  refused, done = sorted(rows_of(tmp_path), key=lambda r: r["attempts"])
  assert (refused["status"], done["status"]) == ("failed", "done")
  assert message in refused["error"]
  assert "\n" not in refused["error"]
  finish(make_driver(Sweep(some, grids), tmp_path, Fake()))
  assert refused in rows_of(tmp_path)
  finish(make_driver(one_cell(1, 2), tmp_path, Fake()))
  assert [row["status"] for row in rows_of(tmp_path)] == ["done", "done"]


def test_a_vanished_run_is_resumed_a_few_times(tmp_path):
  backend = Fake(lambda run, saved: None)
  sweep = one_cell(1)
  finish(make_driver(sweep, tmp_path, backend))
  assert len(backend.started) == ATTEMPTS
  assert "vanished 5 times" in rows_of(tmp_path)[0]["error"]


def test_a_run_that_is_killed_often_but_goes_on_does_not_fail(tmp_path):
  def end(run, saved):
    (run / "checkpoints" / str(len(backend.started))).mkdir(parents=True)
    if len(backend.started) > 2 * ATTEMPTS:
      Fake.good(run, saved)

  backend = Fake(end)
  finish(make_driver(one_cell(1), tmp_path, backend))
  assert rows_of(tmp_path)[0]["status"] == "done"


def test_a_run_that_stops_and_saves_has_not_vanished(tmp_path):
  """It stops more often than a run may vanish, and vanishes in between."""
  ends = iter("svvsvssvsvg")  # s: stops and saves, v: vanishes, g: good.

  def end(run, saved):
    match next(ends):
      case "s":
        (run / "ended.json").write_text('{"failed": false, "error": ""}')
      case "g":
        Fake.good(run, saved)

  sweep = one_cell(1)
  for _ in range(11):  # Every time with a new driver.
    make_driver(sweep, tmp_path, Fake(end)).step()
  finish(make_driver(sweep, tmp_path, Fake(end)))
  (row,) = rows_of(tmp_path)
  assert (row["status"], row["attempts"]) == ("done", 11)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_whose_loss_is_not_finite_has_failed(tmp_path, loss):
  def end(run, saved):
    summary = summary_of(saved)
    summary["eval_loss"]["outer"] = loss
    (run / "summary.json").write_text(json.dumps(summary))

  sweep = one_cell(1)
  backend = Fake(end)
  (cell,) = finish(make_driver(sweep, tmp_path, backend))
  assert (cell.state, len(backend.started)) == ("failed", 1)
  (row,) = rows_of(tmp_path)
  assert row["status"] == "failed"
  assert f"final evaluation is {loss}" in row["error"]
  table.retry_failed(tmp_path)
  vanishing = Fake(lambda run, saved: None)  # The old summary does not count.
  make_driver(sweep, tmp_path, vanishing).step()
  make_driver(sweep, tmp_path, vanishing).step()
  assert len(vanishing.started) == 2


@pytest.mark.parametrize("text", ["{", "5", "[]"])
@pytest.mark.parametrize("file", ["run.json", "ended.json", "summary.json"])
def test_a_file_that_cannot_be_read_counts_as_absent(tmp_path, file, text):
  """The run starts again, whichever file is broken."""
  sweep = one_cell(1)
  stopped = Fake(lambda run, saved: table.note_end(run, failed=False))
  make_driver(sweep, tmp_path, stopped).step()
  (run,) = (tmp_path / "runs").iterdir()
  (run / file).write_text(text)
  (tmp_path / "runs" / "stray.txt").touch()
  again = Fake()
  finish(make_driver(sweep, tmp_path, again))
  assert again.started == [run.name]
  assert [row["status"] for row in rows_of(tmp_path)] == ["done"]


def test_a_run_that_ends_during_a_step_is_not_started_again(tmp_path):
  """The run ends after its files are read: before the backend is asked, or later."""

  class Late(Fake):
    def running(self, run):
      if asked.append(run) or len(asked) < ends_after:
        return True
      self.good(run, json.loads((run / "config.json").read_text()))
      return False

  sweep = one_cell(1)
  for ends_after in (1, 2, 3):
    results, asked = tmp_path / str(ends_after), []
    never = Fake(lambda run, saved: None)
    make_driver(sweep, results, never).step()
    late = Late()
    finish(make_driver(sweep, results, late))
    assert late.started == []
    assert [row["vanished"] for row in rows_of(results)] == [0]


def test_runs_are_found_again_when_the_code_gains_a_field(tmp_path):
  """Ended runs are done; an interrupted run goes on in its own directory."""
  sweep = one_cell(1, 2)
  finish(make_driver(sweep, tmp_path / "new", Fake()))
  done, waiting = rows_of(tmp_path / "new")
  older = tmp_path / "old"
  names = []
  for row in (done, waiting):
    written = without(row["config"], "outer.offload")
    names.append(digest(written))
    end = {"failed": False, "error": ""} if row is waiting else None
    summary = summary_of(written) if row is done else None
    write_run(older, names[-1], written, summary, end, point=row["point"])
  backend = Fake()
  finish(make_driver(sweep, older, backend))
  assert backend.started == [names[1]] != [waiting["name"]]
  assert [row["name"] for row in rows_of(older)] == names
  assert rows_of(older)[1]["config"] == waiting["config"]


def test_another_value_of_a_new_field_is_another_run(tmp_path):
  def offloaded(point):
    c = config(point)
    c.outer.offload = True
    return c

  point = {"replicas": 1, "lr": 1}
  written = without(as_json(resolve(config(point))), "outer.offload")
  write_run(tmp_path, digest(written), written, summary_of(written), point=point)
  gone = {**written, "gone": 1}  # From code with a field that is gone.
  write_run(tmp_path, digest(gone), gone, summary_of(gone), point=point)
  backend = Fake()
  finish(make_driver(Sweep(offloaded, [Grid("g", [point])]), tmp_path, backend))
  assert len(backend.started) == 1


def test_at_most_parallel_runs_are_started(tmp_path):
  """Runs that an earlier driver started count."""

  class Alive(Fake):
    def running(self, run):
      return run.name in self.started

  backend = Alive(lambda run, saved: None)
  for parallel, started in ((0, 0), (1, 1), (1, 1), (2, 2)):
    make_driver(make_sweep(), tmp_path, backend, parallel).step()
    assert len(backend.started) == started


def test_a_cell_must_start_from_an_earlier_cell(tmp_path):
  grid = Grid("g", [{"replicas": 1}], (), like=lambda cell: {"replicas": 7})
  with pytest.raises(ValueError, match="from replicas=7, which is no earlier cell"):
    make_driver(Sweep(config, [grid]), tmp_path, Fake()).step()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_sweep_and_the_driver_says_what_is_left(
  tmp_path, capsys, number
):
  """One run is done, one has a checkpoint, one has none, and one was not started."""

  def end(run, saved):
    rate = saved["inner"]["learning_rate"]
    if rate == 1:
      Fake.good(run, saved)
    else:
      (run / "checkpoints" / ("7" if rate == 2 else "7.tmp")).mkdir(parents=True)

  sweep = one_cell(1, 2, 3, 4)
  driver = make_driver(sweep, tmp_path, Fake(end), parallel=3)
  show = lambda cells, rows: os.kill(os.getpid(), number)
  assert drive(driver, show, pause=100) == 128 + number
  assert driver.backend.ends == ["stop"]
  name = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}[number]
  assert capsys.readouterr().err == (
    f"{name}: 0 of 1 cells, 1 runs done, 0 running, 0 failed, 2 stopped (1 with a"
    " checkpoint), 1 waiting; the same command goes on.\n"
  )
  assert [row["vanished"] for row in rows_of(tmp_path)] == [0, 0, 0]
  again = Fake()
  finish(make_driver(sweep, tmp_path, again))
  assert len(again.started) == 3


def test_a_second_signal_kills_the_runs(tmp_path):
  class Slow(Fake):
    def stop(self):
      self.ends.append("stop")
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(100)

  driver = make_driver(make_sweep(), tmp_path, Slow(lambda run, saved: None))
  show = lambda cells, rows: os.kill(os.getpid(), signal.SIGINT)
  assert drive(driver, show, pause=100) == 128 + signal.SIGINT
  assert driver.backend.ends == ["stop", "kill"]


def test_a_signal_interrupts_a_backend_that_waits(tmp_path, capsys):
  """The submitted job goes on; the next driver finds the job."""

  class Queue(Fake):
    detached = True

    def start(self, run):
      self.started.append(run.name)
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(100)

  driver = make_driver(make_sweep(), tmp_path, Queue())
  assert drive(driver, lambda cells, rows: None) == 128 + signal.SIGINT
  assert (
    "1 running, 0 failed, 0 stopped (0 with a checkpoint), 1 waiting"
    in capsys.readouterr().err
  )
  assert [row["status"] for row in rows_of(tmp_path)] == ["running"]
