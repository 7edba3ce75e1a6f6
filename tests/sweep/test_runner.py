"""The driver: resuming, failures, kills, exports. Most runs are faked."""

import csv
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from diloco.config import complete, default_config, files, resolve
from diloco.model.shapes import num_params
from diloco.sweep import job, progress, table
from diloco.sweep.csv_file import export, load
from diloco.sweep.grid import Axis, Grid, Sweep, powers
from diloco.sweep.local import Local
from diloco.sweep.runner import ATTEMPTS, Driver, drive
from diloco.sweep.table import alone, as_json, digest

ROOT = pathlib.Path(__file__).parents[2]
BEST = 2.0**-8


def config(point):
  c = default_config()
  c.algorithm, c.replicas, c.sync_every = "diloco", point["replicas"], 5
  c.inner.learning_rate = point["lr"]
  c.train.steps, c.train.batch_size = 10, 4
  return c


def make_sweep(**axis):
  lr = Axis("lr", powers(2, -7, -7), ratio=2, **axis)
  return Sweep(config, [Grid("g", [{"replicas": m} for m in (1, 2)], (lr,))])


def summary_of(saved: dict) -> dict:
  loss = 3 + abs(math.log2(saved["inner"]["learning_rate"] / BEST))
  return {
    "params": 100,
    "tokens": saved["train"]["tokens"],
    "steps": saved["train"]["steps"],
    "eval_loss": {"outer": loss, "mean": loss, "first": loss},
    "bits_per_byte": 1.0,
    "bytes_sent_per_replica": 8,
    "peak_bytes_per_sync": 4,
    "syncs": 2,
    "tokens_per_s": 5.0,
    "wall_s": 1.0,
    "device": "fake",
  }


class Fake:
  """A backend whose runs end at once: `end(run, config)` writes their files."""

  detached = False

  def __init__(self, end=None):
    self.started, self.ends, self._end = [], [], end or self.good

  @staticmethod
  def good(run, saved):
    (run / "summary.json").write_text(json.dumps(summary_of(saved)))

  def start(self, run):
    self.started.append(run.name)
    self._end(run, json.loads((run / "config.json").read_text()))

  def running(self, run):
    return False

  def stop(self):
    self.ends.append("stop")

  def kill(self):
    self.ends.append("kill")


def make_driver(sweep, results, backend, parallel=100):
  return Driver(sweep, results, backend, parallel)


def rows_of(results):
  return list(table.read_rows(results).values())


def write_run(results, name, config, summary=None, ended=None, **notes):
  """Writes a run directory as a driver, a job and a trainer leave it."""
  if summary is not None:
    ended = {"failed": False, "error": ""}
  contents = {"config": config, "summary": summary, "ended": ended}
  for file, content in contents.items():
    if content is not None:
      files.write_json(results / "runs" / name / f"{file}.json", content)
  table.note(results / "runs" / name, **{"attempts": 1, **notes})


def finish(driver):
  for _ in range(50):
    cells = driver.step()
    if all(c.state in ("interior", "edge", "failed") for c in cells):
      return cells
  raise AssertionError("the sweep does not end")


def test_a_sweep_ends_with_interior_points_and_never_repeats_a_run(tmp_path):
  backend = Fake()
  cells = finish(make_driver(make_sweep(), tmp_path, backend))
  assert [c.best["lr"] for c in cells] == [BEST, BEST]
  assert len(backend.started) == len(set(backend.started)) == 8
  again = Fake()
  finish(make_driver(make_sweep(), tmp_path, again))
  assert again.started == []


def test_runs_that_end_while_no_driver_is_there_are_not_repeated(tmp_path):
  first = Fake(lambda run, saved: None)
  make_driver(make_sweep(), tmp_path, first).step()
  assert {row["status"] for row in rows_of(tmp_path)} == {"running"}
  for run in (tmp_path / "runs").iterdir():
    Fake.good(run, json.loads((run / "config.json").read_text()))
  second = Fake()
  finish(make_driver(make_sweep(), tmp_path, second))
  assert not set(first.started) & set(second.started)
  rows = rows_of(tmp_path)
  assert {row["status"] for row in rows} == {"done"}
  assert all(row["revision"] and row["loss"] >= 3 for row in rows)


def test_a_failed_run_keeps_its_error_and_the_sweep_goes_on(tmp_path):
  def end(run, saved):
    if saved["inner"]["learning_rate"] > BEST:
      (run / "ended.json").write_text('{"failed": true, "error": "diverged at 3."}')
    else:
      Fake.good(run, saved)

  sweep = Sweep(
    config, [Grid("g", [{"replicas": 1}], (Axis("lr", powers(2, -9, -7), ratio=2),))]
  )
  cells = finish(make_driver(sweep, tmp_path, Fake(end)))
  assert cells[0].best["lr"] == BEST
  failed = [row for row in rows_of(tmp_path) if row["status"] == "failed"]
  assert [row["error"] for row in failed] == ["diverged at 3."]
  table.retry_failed(tmp_path)
  retried = Fake()
  finish(make_driver(sweep, tmp_path, retried))
  assert retried.started == [failed[0]["name"]]


def test_an_invalid_config_is_a_failed_run(tmp_path):
  sweep = Sweep(config, [Grid("g", [{"replicas": 3}], (Axis("lr", (1,)),))])
  cells = finish(make_driver(sweep, tmp_path, Fake()))
  assert cells[0].state == "failed"
  assert "train.batch_size is 4" in rows_of(tmp_path)[0]["error"]


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    (lambda p: 1 / (p["lr"] - 1), "raises ZeroDivisionError: division by zero"),
    (lambda p: p.warp, "raises AttributeError: 'dict' object has no attribute 'warp'"),
    (lambda p: p["warp"], "raises KeyError: 'warp' at the point replicas=1 lr=1"),
    (lambda p: config(p).update({"replicas": [1]}), "raises TypeError: "),
    (lambda p: None, "raises AttributeError: 'NoneType'"),
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
  mended = Sweep(config, grids)
  finish(make_driver(mended, tmp_path, Fake()))
  assert [row["status"] for row in rows_of(tmp_path)] == ["done", "done"]


def test_a_vanished_run_is_resumed_a_few_times(tmp_path):
  backend = Fake(lambda run, saved: None)
  sweep = Sweep(config, [Grid("g", [{"replicas": 1}], (Axis("lr", (1,)),))])
  finish(make_driver(sweep, tmp_path, backend))
  assert len(backend.started) == ATTEMPTS
  assert "vanished 5 times" in rows_of(tmp_path)[0]["error"]


def test_a_run_that_stops_and_saves_has_not_vanished(tmp_path):
  """It stops more often than a run may vanish, and vanishes in between."""
  ends = iter("svvsvssvsvg")  # s: stops and saves, v: vanishes, g: good.

  def end(run, saved):
    match next(ends):
      case "s":
        (run / "ended.json").write_text('{"failed": false, "error": ""}')
      case "g":
        Fake.good(run, saved)

  sweep = Sweep(config, [Grid("g", [{"replicas": 1}], (Axis("lr", (1,)),))])
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

  sweep = Sweep(config, [Grid("g", [{"replicas": 1}], (Axis("lr", (1,)),))])
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
  sweep = Sweep(config, [Grid("g", [{"replicas": 1}], (Axis("lr", (1,)),))])
  stopped = Fake(lambda run, saved: table.note_end(run, failed=False))
  make_driver(sweep, tmp_path, stopped).step()
  (run,) = (tmp_path / "runs").iterdir()
  (run / file).write_text(text)
  (tmp_path / "runs" / "stray.txt").touch()
  again = Fake()
  finish(make_driver(sweep, tmp_path, again))
  assert again.started == [run.name]
  assert [row["status"] for row in rows_of(tmp_path)] == ["done"]


def test_the_files_of_an_ended_run_are_read_once(tmp_path, monkeypatch):
  driver = make_driver(make_sweep(), tmp_path, Fake())
  finish(driver)
  read = []
  read_row = table.read_row
  monkeypatch.setattr(table, "read_row", lambda run: read.append(run) or read_row(run))
  driver.step()
  assert read == []
  assert len(driver.rows) == 8


def test_a_run_that_ends_during_a_step_is_not_started_again(tmp_path):
  """The run ends after its files are read: before the backend is asked, or later."""

  class Late(Fake):
    def running(self, run):
      if asked.append(run) or len(asked) < ends_after:
        return True
      self.good(run, json.loads((run / "config.json").read_text()))
      return False

  sweep = Sweep(config, [Grid("g", [{"replicas": 1}], (Axis("lr", (1,)),))])
  for ends_after in (1, 2, 3):
    results, asked = tmp_path / str(ends_after), []
    never = Fake(lambda run, saved: None)
    make_driver(sweep, results, never).step()
    late = Late()
    finish(make_driver(sweep, results, late))
    assert late.started == []
    assert [row["vanished"] for row in rows_of(results)] == [0]


def without(config: dict, field: str) -> dict:
  """The config as older code wrote it, which did not have the field yet."""
  group, name = field.split(".")
  return {**config, group: {k: v for k, v in config[group].items() if k != name}}


def test_runs_are_found_again_when_the_code_gains_a_field(tmp_path):
  """Ended runs are done; an interrupted run goes on in its own directory."""
  sweep = Sweep(config, [Grid("g", [{"replicas": m} for m in (1, 2)], ())])
  sweep = Sweep(lambda p: config({**p, "lr": 1}), sweep.grids)
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


def test_progress_names_every_cell_with_its_best_point(tmp_path):
  driver = make_driver(make_sweep(), tmp_path, Fake())
  cells = finish(driver)
  first, last = progress.lines(cells, driver.rows.values(), driver.runs)[1::2]
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
  shown = lambda: progress.lines([], [row], tmp_path)[1].split(maxsplit=2)
  (tmp_path / "a").mkdir()
  assert shown() == ["running", "a", "starting  lr=0.1"]
  metrics = tmp_path / "a" / "metrics.jsonl"
  # A writer was killed within the last line, or is in the middle of the line.
  metrics.write_text("\n".join([*before, newest, eval_, '{"kind": "st']))
  assert shown()[2].split("  ")[0] == "step 40 of 100, 0:05:00 left"
  assert metrics.stat().st_size < progress.TAIL
  metrics.write_text("\n".join(["x" * 2 * progress.TAIL, newest]))
  assert shown()[2].split("  ")[0] == "step 40 of 100, 0:05:00 left"
  metrics.write_text(record(7, tokens=700, tokens_per_s=None))
  assert shown()[2].split("  ")[0] == "step 7 of 100"


def test_progress_lists_cells_at_work_if_not_all_have_room(tmp_path):
  grid = Grid("g", [{"replicas": m} for m in (1, 2, 3, 4)], (Axis("lr", (1,)),))
  backend = Fake(lambda run, saved: None)
  sweep = Sweep(lambda p: config({**p, "replicas": 1}), [grid])
  later = Grid("h", [{"replicas": 2}], like=lambda cell: {"replicas": 1})
  driver = make_driver(Sweep(sweep.config, [grid, later]), tmp_path, backend)
  cells, rows = driver.cells(), driver.rows.values()
  assert len(progress.lines(cells, rows, driver.runs)) == 7
  few = progress.lines(cells, rows, driver.runs, room=4)
  assert [line.split()[:2] for line in few[1:-1]] == [
    ["g", "replicas=1"],
    ["g", "replicas=2"],
  ]


def test_progress_says_why_runs_failed_once(capsys, tmp_path):
  rows = [{"status": "failed", "error": e} for e in ("a", "b", "b", "c", "d")]
  rows.append({"status": "done", "error": None})
  more, *shown = progress.lines([], rows, tmp_path)[1:-1]
  assert more == "1 more reasons: see --export"
  assert shown == ["failed: b", "failed: c", "failed: d"]
  live = progress.Live(tmp_path)
  for some in (rows[:1], rows[:2], rows[:2], rows[:3]):
    live([], some)
  said = [line for line in capsys.readouterr().err.splitlines() if "cells" not in line]
  assert said == ["failed: a", "failed: b"]


def test_an_export_has_results_and_configs(tmp_path):
  finish(make_driver(make_sweep(), tmp_path, Fake()))
  assert export(rows_of(tmp_path), tmp_path / "out.csv") == 8
  with (tmp_path / "out.csv").open() as file:
    rows = list(csv.DictReader(file))
  assert {row["replicas"] for row in rows} == {"1", "2"}
  assert {row["algorithm"] for row in rows} == {"diloco"}
  best = min(rows, key=lambda row: float(row["loss"]))
  assert float(best["learning_rate"]) == BEST
  m = default_config().model
  papers_n = 12 * m.num_layers * m.dim**2 + m.vocab_size * m.dim
  assert {row["matrix_params"] for row in rows} == {str(papers_n)}
  assert json.loads(best["config"])["train.steps"] == 10


def test_a_sweep_goes_on_from_an_exported_file(tmp_path):
  finish(make_driver(make_sweep(), tmp_path / "a", Fake()))
  export(rows_of(tmp_path / "a"), tmp_path / "out.csv")
  b = tmp_path / "b"
  assert load(tmp_path / "out.csv", b) == load(tmp_path / "out.csv", b) == 8
  again = Fake()
  finish(make_driver(make_sweep(), b, again))
  assert again.started == []
  before = table.read_rows(tmp_path / "a")
  for row in rows_of(b):
    assert row["loss"] == pytest.approx(before[row["name"]]["loss"], rel=1e-5)
    assert row["revision"] == before[row["name"]]["revision"]


def test_an_imported_file_is_exported_as_it_was(tmp_path):
  ladder = ROOT / "docs" / "ladder.csv"
  assert load(ladder, tmp_path) == 233
  export(rows_of(tmp_path), tmp_path / "out.csv")
  before, after = (
    [{**row, "name": ""} for row in csv.DictReader(path.open())]
    for path in (ladder, tmp_path / "out.csv")
  )
  assert before == after
  assert list(before[0]) == list(after[0])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"loss": ""}, "loss is '', but the run is done"),
    ({"loss": "abc"}, "'abc'"),
    ({"loss": "nan"}, "loss is 'nan', but the run is done"),
    ({"params": "1.5"}, "'1.5'"),
    ({"replicas": "two"}, "'two'"),
    ({"replicas": "3"}, "train.batch_size is 4"),
    ({"status": "well"}, "status is 'well', neither done nor failed"),
    ({"config": "[]"}, "'list' object has no attribute"),
    ({"config": '{"model.warp": 1}'}, "warp"),
    ({None: ["more"]}, "as many cells"),
  ],
)
def test_an_import_names_the_line_that_is_wrong(tmp_path, change, message):
  finish(make_driver(make_sweep(), tmp_path / "a", Fake()))
  export(rows_of(tmp_path / "a"), tmp_path / "out.csv")
  with (tmp_path / "out.csv").open() as file:
    rows = list(csv.DictReader(file))
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


def test_a_file_of_older_code_without_the_papers_n_is_imported(tmp_path):
  finish(make_driver(make_sweep(), tmp_path / "a", Fake()))
  export(rows_of(tmp_path / "a"), tmp_path / "out.csv")
  with (tmp_path / "out.csv").open() as file:
    rows = [
      {k: v for k, v in r.items() if k != "matrix_params"} for r in csv.DictReader(file)
    ]
  with (tmp_path / "out.csv").open("w") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
  assert load(tmp_path / "out.csv", tmp_path / "b") == 8


def test_an_imported_run_replaces_an_unfinished_one(tmp_path):
  finish(make_driver(make_sweep(), tmp_path / "a", Fake()))
  export(rows_of(tmp_path / "a"), tmp_path / "out.csv")
  never = Fake(lambda run, saved: None)
  make_driver(make_sweep(), tmp_path / "b", never).step()  # Starts both.
  assert len(rows_of(tmp_path / "b")) == 2
  load(tmp_path / "out.csv", tmp_path / "b")
  assert [row["status"] for row in rows_of(tmp_path / "b")] == ["done"] * 8
  again = Fake()
  finish(make_driver(make_sweep(), tmp_path / "b", again))
  assert again.started == []


def test_an_export_has_runs_of_code_with_other_fields(tmp_path):
  written = as_json(resolve(config({"replicas": 1, "lr": 1})))
  older = without(written, "outer.learning_rate") | {"gone": 1}
  write_run(tmp_path, "a", older, ended={"failed": True, "error": "lost"})
  # A point without a valid config.
  write_run(tmp_path, "b", None, ended={"failed": True, "error": "refused"})
  assert export(rows_of(tmp_path), tmp_path / "out.csv") == 2
  with (tmp_path / "out.csv").open() as file:
    first, _ = csv.DictReader(file)
  assert (first["outer_learning_rate"], first["replicas"]) == ("0.4", "1")
  assert json.loads(first["config"])["gone"] == 1


def test_the_sweep_imports_no_jax():
  code = (
    "import sys, diloco.sweep.__main__, diloco.sweep.slurm, diloco.sweep.figures;"
    "sys.exit('jax' in sys.modules)"
  )
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_job_notes_the_error_that_the_trainer_printed(tmp_path):
  c = default_config()
  (tmp_path / "config.json").write_text(json.dumps(c.to_dict()))
  assert job.run(str(tmp_path)) == 2
  ended = json.loads((tmp_path / "ended.json").read_text())
  assert ended["error"].startswith("train.steps is 0")
  assert not job.alive(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_that_is_stopped_has_not_failed(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(default_config().to_dict()))
  command = [sys.executable, "-m", "diloco.sweep.job", str(tmp_path)]
  started = subprocess.Popen(command)
  while not _handles_sigterm(started.pid):
    time.sleep(0.05)
  started.send_signal(signal.SIGTERM)  # While the trainer is still importing.
  started.wait()
  ended = json.loads((tmp_path / "ended.json").read_text())
  assert (ended["failed"], ended["error"]) == (False, "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_trainer_that_is_killed_leaves_no_end(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(default_config().to_dict()))
  command = [sys.executable, "-m", "diloco.sweep.job", str(tmp_path)]
  started = subprocess.Popen(command)
  children = pathlib.Path(f"/proc/{started.pid}/task/{started.pid}/children")
  while not (trainer := children.read_text().split()):
    time.sleep(0.05)
  os.kill(int(trainer[0]), signal.SIGKILL)
  started.wait()
  assert not (tmp_path / "ended.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_all_processes_of_a_job_lets_the_trainer_save(tmp_path, number):
  """Terminals send SIGINT at Ctrl-C, Slurm sends SIGUSR2 or 1 before a time limit."""
  (tmp_path / "config.json").write_text(json.dumps(default_config().to_dict()))
  command = [sys.executable, "-m", "diloco.sweep.job", str(tmp_path)]
  started = subprocess.Popen(command, start_new_session=True)
  while not _handles_sigterm(started.pid):
    time.sleep(0.05)
  os.killpg(started.pid, number)
  started.wait()
  ended = json.loads((tmp_path / "ended.json").read_text())
  assert (ended["failed"], ended["error"]) == (False, "")


def test_a_job_is_asked_for_with_its_folder(tmp_path, capsys):
  with pytest.raises(SystemExit) as ended:
    job.main([])
  assert ended.value.code == 2
  assert "usage: python -m diloco.sweep.job [-h] RUN" in capsys.readouterr().err
  assert job.main([str(tmp_path / "none")]) == 2
  assert "has no config.json; give a folder of a sweep" in capsys.readouterr().err
  (tmp_path / "config.json").write_text("{}")
  with (tmp_path / "lock").open("w") as lock:
    assert files.try_lock(lock)
    assert job.main([str(tmp_path)]) == 2
  assert "which another process trains already" in capsys.readouterr().err
  assert job.main([str(tmp_path)]) == 1
  assert "is no config.json of this version's runs" in capsys.readouterr().out


def test_kill_ends_a_job_and_its_trainer(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(default_config().to_dict()))
  backend = Local(0, {})
  backend.start(tmp_path)
  while not job.alive(tmp_path):
    time.sleep(0.02)
  backend.kill()
  assert not backend.running(tmp_path)  # Nobody holds the lock.
  assert not (tmp_path / "ended.json").exists()


@pytest.mark.slow
def test_ctrl_c_lets_runs_save(tmp_path):
  tests = pathlib.Path(__file__).parents[1]
  text = SWEEP_FILE.format(tests=str(tests))
  text = text.replace("  return c", "  c.train.steps = 1_000_000\n  return c")
  (tmp_path / "sweep.py").write_text(text)
  command = [
    *(sys.executable, "-m", "diloco.sweep", f"--sweep={tmp_path / 'sweep.py'}"),
    f"--results={tmp_path}",
  ]
  environment = {**os.environ, "PYTHONPATH": str(tests.parent)}
  driver = subprocess.Popen(
    command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
  )
  while not list(tmp_path.glob("runs/*/metrics.jsonl")):
    assert driver.poll() is None
    time.sleep(0.2)
  os.killpg(driver.pid, signal.SIGINT)  # A terminal signals the whole group.
  *_, asked, told = driver.communicate()[1].splitlines()
  assert driver.returncode == 130
  assert asked == "1 runs save and end; a second Ctrl-C kills them."
  assert told == (
    "Ctrl-C: 0 runs done, 1 stopped with a checkpoint, 2 waiting; the same command goes"
    " on."
  )
  (row,) = rows_of(tmp_path)
  assert (row["status"], row["vanished"]) == ("interrupted", 0)
  log = (tmp_path / "runs" / row["name"] / "log.txt").read_text()
  assert "SIGTERM: saved step" in log


def _handles_sigterm(pid: int) -> bool:
  """Whether a process has a handler for SIGTERM, from Linux's bit mask."""
  status = pathlib.Path(f"/proc/{pid}/status").read_text()
  caught = int(status.split("SigCgt:")[1].split()[0], 16)
  return bool(caught >> (signal.SIGTERM - 1) & 1)


SWEEP_FILE = """
import sys
sys.path.insert(0, {tests!r})
import conftest
from diloco.sweep.grid import Axis, Grid, Sweep, powers

def config(point):
  c = conftest.tiny_config()
  c.inner.learning_rate = point["lr"]
  return c

def get_sweep():
  return Sweep(config, [Grid("g", [{{}}], (Axis("lr", (0.001, 0.002, 0.004)),))])
"""


@pytest.mark.slow
def test_kill_minus_nine_loses_no_finished_result(tmp_path):
  """Kills the driver when one run is done; a second driver runs only the others."""
  tests = pathlib.Path(__file__).parents[1]
  (tmp_path / "sweep.py").write_text(SWEEP_FILE.format(tests=str(tests)))
  command = [
    *(sys.executable, "-m", "diloco.sweep", f"--sweep={tmp_path / 'sweep.py'}"),
    f"--results={tmp_path / 'results'}",
  ]
  environment = {**os.environ, "PYTHONPATH": str(tests.parent)}
  driver = subprocess.Popen(command, env=environment)
  while not (done := _done(tmp_path / "results")):
    assert driver.poll() is None
    time.sleep(0.5)
  driver.send_signal(signal.SIGKILL)
  driver.wait()
  assert subprocess.run(command, env=environment, check=False).returncode == 0
  after = table.read_rows(tmp_path / "results")
  assert {row["status"] for row in after.values()} == {"done"}
  assert len(after) == 3
  for name, row in done.items():
    assert after[name] == row


def _done(results: pathlib.Path) -> dict:
  rows = table.read_rows(results)
  return {name: row for name, row in rows.items() if row["status"] == "done"}


def test_two_drivers_do_not_share_results(tmp_path):
  finish(make_driver(make_sweep(), tmp_path / "from", Fake()))
  export(rows_of(tmp_path / "from"), tmp_path / "out.csv")
  write_run(tmp_path, "a", {}, ended={"failed": True, "error": "It failed."})
  sweep = ROOT / "configs" / "ladder.py"
  for command in (
    (f"--sweep={sweep}", "--retry_failed"),
    (f"--import={tmp_path / 'out.csv'}",),
  ):
    with alone(tmp_path):
      done = sweep_command(*command, f"--results={tmp_path}")
    assert done.returncode == 2
    assert "has a driver already" in done.stderr
  assert [row["error"] for row in rows_of(tmp_path)] == ["It failed."]


def test_the_example_of_the_docs_trains_small_models(tmp_path):
  """Seven runs of 76,800 tokens take a minute; docs/sweep.md says how long."""
  text = (ROOT / "docs" / "sweep.md").read_text()
  names = {}
  exec(text.split("```python\n")[1].split("```")[0], names)
  sweep = names["get_sweep"]()
  driver = make_driver(sweep, tmp_path, Fake())
  finish(driver)
  configs = [row["config"] for row in driver.rows.values()]
  assert len(configs) >= 6
  assert {row["status"] for row in driver.rows.values()} == {"done"}
  assert {c["train"]["tokens"] for c in configs} == {76_800}
  assert {num_params(complete(c).model) for c in configs} == {103_744}


def test_a_sweep_whose_cell_has_failed_ends_with_status_1(tmp_path):
  (tmp_path / "sweep.py").write_text(
    "from diloco.sweep.grid import Grid, Sweep\n"
    "def get_sweep():\n  return Sweep(dict, [Grid('g', [{}])])"
  )
  done = sweep_command(f"--sweep={tmp_path / 'sweep.py'}", f"--results={tmp_path}/r")
  assert done.returncode == 1
  assert "1 of 1 cells, 0 runs done, 0 running, 1 failed" in done.stderr


def test_drive_runs_a_sweep_to_its_end(tmp_path):
  with alone(tmp_path):
    driver = make_driver(make_sweep(), tmp_path, Fake())
    assert drive(driver, lambda cells, rows: None, pause=0.01) == 0


def test_show_lists_the_first_runs_and_changes_nothing(tmp_path):
  missing = tmp_path / "typo"
  sweep = f"--sweep={ROOT / 'configs' / 'ladder.py'}"
  done = sweep_command(f"--export={tmp_path / 'out.csv'}", f"--results={missing}")
  assert done.returncode == 2
  assert "holds no runs" in done.stderr
  done = sweep_command(sweep, "--show", f"--results={missing}")
  waiting = [x.split() for x in done.stdout.splitlines() if x.startswith("waiting")]
  assert [x[2:5] for x in waiting] == [
    ["size=105k", f"algorithm={algorithm}", f"replicas={m}"]
    for algorithm, m in [("data_parallel", 1), *(("diloco", m) for m in (1, 2, 4))]
  ]
  assert not missing.exists()
  refusing = Sweep(config, [Grid("g", [{"replicas": 3}], (Axis("lr", (1,)),))])
  driver = make_driver(refusing, tmp_path, Fake())
  assert driver.cells()[0].state == "failed"
  assert [plan.point["replicas"] for plan in driver.refused()] == [3]
  assert rows_of(tmp_path) == []
  with alone(tmp_path):  # A driver at work is no obstacle.
    assert sweep_command(sweep, "--show", f"--results={tmp_path}").returncode == 0


def test_show_lists_a_few_of_many_waiting_runs(tmp_path):
  points = {str(i): {"lr": i} for i in range(progress.MOST_WAITING + 5)}
  text = progress.lines([], [], tmp_path, points)[1:-1]
  assert len(text) == progress.MOST_WAITING + 1
  assert text[0].split() == ["waiting", "0", "lr=0"]
  assert text[-1] == "5 more runs wait"


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--results="], "--results is empty; give a folder"),
    (["--results=r"], "--sweep must be given, for example"),
    (
      ["--results=r", "--export=a", "--show"],
      "--export and --show are given; give one",
    ),
    (["--results=r", "--import=a"], "--import is 'a', but there is no such file"),
    (
      ["--results=r", f"--sweep={ROOT}/configs/ladder.py", "--slurm_options=b=c"],
      "but --backend is local",
    ),
  ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path, monkeypatch, flags, message):
  monkeypatch.chdir(tmp_path)
  done = sweep_command(*flags)
  assert (done.returncode, done.stdout) == (2, "")
  assert message in done.stderr
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("def get_sweep(:", "SyntaxError: "),
    ("def get_sweep():\n  return 1 / 0", "ZeroDivisionError: division by zero ("),
    ("def get_sweep():\n  return None", "get_sweep() returns None; return a Sweep"),
    (
      "from diloco.sweep.grid import Grid, Sweep\n"
      "def get_sweep():\n  return Sweep(dict, [Grid('g', [{}], like=lambda c: 1 / 0)])",
      "ZeroDivisionError: division by zero (",
    ),
  ],
)
def test_an_error_of_a_sweep_file_is_one_sentence(tmp_path, text, message):
  (tmp_path / "sweep.py").write_text(text)
  done = sweep_command(f"--sweep={tmp_path / 'sweep.py'}", f"--results={tmp_path}/r")
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1
  assert message in done.stderr
  assert not (tmp_path / "r").exists()


def sweep_command(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "diloco.sweep", *arguments],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )


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

  sweep = Sweep(config, [Grid("g", [{"replicas": 1}], (Axis("lr", (1, 2, 3, 4)),))])
  driver = make_driver(sweep, tmp_path, Fake(end), parallel=3)
  show = lambda cells, rows: os.kill(os.getpid(), number)
  assert drive(driver, show, pause=100) == number
  assert driver.backend.ends == ["stop"]
  name = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}[number]
  assert capsys.readouterr().err == (
    f"{name}: 1 runs done, 1 stopped with a checkpoint, 1 stopped before their first"
    " checkpoint, 1 waiting; the same command goes on.\n"
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
  assert drive(driver, show, pause=100) == signal.SIGINT
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
  assert drive(driver, lambda cells, rows: None) == signal.SIGINT
  assert "1 going on without this driver, 1 waiting" in capsys.readouterr().err
  assert [row["status"] for row in rows_of(tmp_path)] == ["running"]
