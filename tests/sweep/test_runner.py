"""The driver: resume, failures, kills, exports; most runs are faked."""

import csv
import json
import math
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from diloco.config import default_config, resolve
from diloco.sweep import job, progress
from diloco.sweep.csv_file import export, load
from diloco.sweep.grid import Axis, Grid, Sweep, powers
from diloco.sweep.runner import ATTEMPTS, Driver, drive
from diloco.sweep.table import Table, alone, digest

ROOT = pathlib.Path(__file__).parents[2]
BEST = 2.0**-8


def config(point):
  c = default_config()
  c.algorithm, c.replicas = "diloco", point["replicas"]
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
  """A backend whose runs end at once, as `end(run, config)` says."""

  def __init__(self, end=None, slots=100):
    self.started, self._end, self._slots = [], end or self.good, slots

  @staticmethod
  def good(run, saved):
    (run / "summary.json").write_text(json.dumps(summary_of(saved)))

  def start(self, run):
    self.started.append(run.name)
    self._end(run, json.loads((run / "config.json").read_text()))

  def running(self, run):
    return False

  def slots(self):
    return self._slots

  def stop(self):
    pass


def finish(driver):
  for _ in range(50):
    cells = driver.step()
    if all(c.search.state in ("interior", "edge", "failed") for c in cells):
      return cells
  raise AssertionError("the sweep does not end")


def test_a_sweep_ends_with_interior_points_and_never_repeats_a_run(tmp_path):
  backend = Fake()
  cells = finish(Driver(make_sweep(), tmp_path, backend))
  assert [c.search.best["lr"] for c in cells] == [BEST, BEST]
  assert len(backend.started) == len(set(backend.started)) == 8
  again = Fake()
  finish(Driver(make_sweep(), tmp_path, again))
  assert again.started == []


def test_what_ended_while_the_driver_was_gone_is_booked_not_repeated(tmp_path):
  first = Fake()
  Driver(make_sweep(), tmp_path, first).step()  # Killed before it could collect.
  assert {row["status"] for row in Table(tmp_path).rows()} == {"running"}
  second = Fake()
  finish(Driver(make_sweep(), tmp_path, second))
  assert not set(first.started) & set(second.started)
  rows = Table(tmp_path).rows()
  assert {row["status"] for row in rows} == {"done"}
  assert all(row["revision"] and row["loss"] >= 3 for row in rows)


def test_failures_are_booked_with_their_error_and_the_sweep_goes_on(tmp_path):
  def end(run, saved):
    if saved["inner"]["learning_rate"] > BEST:
      (run / "ended.json").write_text('{"failed": true, "error": "diverged at 3."}')
    else:
      Fake.good(run, saved)

  sweep = Sweep(
    config, [Grid("g", [{"replicas": 1}], (Axis("lr", powers(2, -9, -7), ratio=2),))]
  )
  cells = finish(Driver(sweep, tmp_path, Fake(end)))
  assert cells[0].search.best["lr"] == BEST
  failed = [row for row in Table(tmp_path).rows() if row["status"] == "failed"]
  assert [row["error"] for row in failed] == ["diverged at 3."]
  Table(tmp_path).forget_failed()
  retried = Fake()
  finish(Driver(sweep, tmp_path, retried))
  assert retried.started == [failed[0]["name"]]


def test_a_config_that_cannot_work_is_a_failed_run(tmp_path):
  sweep = Sweep(config, [Grid("g", [{"replicas": 3}], (Axis("lr", (1,)),))])
  cells = finish(Driver(sweep, tmp_path, Fake()))
  assert cells[0].search.state == "failed"
  assert "train.batch_size is 4" in Table(tmp_path).rows()[0]["error"]


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    (lambda p: 1 / (p["lr"] - 1), "raises ZeroDivisionError: division by zero"),
    (lambda p: p.warp, "raises AttributeError: 'dict' object has no attribute 'warp'"),
    (lambda p: p["warp"], "needs 'warp', which the point lr=1 replicas=1 has not"),
    (lambda p: config(p).update({"replicas": [1]}), "raises TypeError: "),
    (lambda p: None, "raises AttributeError: 'NoneType'"),
  ],
)
def test_whatever_a_sweep_file_raises_is_a_refusal_booked_once(
  tmp_path, fault, message
):
  grids = [Grid("g", [{"replicas": 1}], (Axis("lr", (1, 2)),))]
  some = lambda p: fault(p) if p["lr"] == 1 else config(p)
  (cell,) = finish(Driver(Sweep(some, grids), tmp_path, Fake()))
  assert cell.search.best["lr"] == 2
  refused, done = sorted(Table(tmp_path).rows(), key=lambda r: r["attempts"])
  assert (refused["status"], done["status"]) == ("failed", "done")
  assert message in refused["error"]
  assert "\n" not in refused["error"]
  finish(Driver(Sweep(some, grids), tmp_path, Fake()))
  assert refused in Table(tmp_path).rows()
  mended = Sweep(config, grids)
  finish(Driver(mended, tmp_path, Fake()))
  assert [row["status"] for row in Table(tmp_path).rows()] == ["done", "done"]


def test_runs_that_vanish_are_resumed_and_at_last_given_up(tmp_path):
  backend = Fake(lambda run, saved: None)
  sweep = Sweep(config, [Grid("g", [{"replicas": 1}], (Axis("lr", (1,)),))])
  finish(Driver(sweep, tmp_path, backend))
  assert len(backend.started) == ATTEMPTS
  assert "vanished 5 times" in Table(tmp_path).rows()[0]["error"]


def test_a_run_that_stops_and_saves_has_not_vanished(tmp_path):
  """Stopped more often than a run may vanish, and vanished in between."""
  ends = iter("svvsvssvsvg")  # s: stops and saves, v: vanishes, g: good.

  def end(run, saved):
    match next(ends):
      case "s":
        (run / "ended.json").write_text('{"failed": false, "error": ""}')
      case "g":
        Fake.good(run, saved)

  sweep = Sweep(config, [Grid("g", [{"replicas": 1}], (Axis("lr", (1,)),))])
  for _ in range(11):  # Each time another driver.
    Driver(sweep, tmp_path, Fake(end)).step()
  finish(Driver(sweep, tmp_path, Fake(end)))
  (row,) = Table(tmp_path).rows()
  assert (row["status"], row["attempts"]) == ("done", 11)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_a_failure_not_an_endless_loop(tmp_path, loss):
  def end(run, saved):
    summary = summary_of(saved)
    summary["eval_loss"]["outer"] = loss
    (run / "summary.json").write_text(json.dumps(summary))

  sweep = Sweep(config, [Grid("g", [{"replicas": 1}], (Axis("lr", (1,)),))])
  backend = Fake(end)
  (cell,) = finish(Driver(sweep, tmp_path, backend))
  assert (cell.search.state, len(backend.started)) == ("failed", 1)
  (row,) = Table(tmp_path).rows()
  assert row["status"] == "failed"
  assert f"final evaluation is {loss}" in row["error"]
  Table(tmp_path).forget_failed()
  vanishing = Fake(lambda run, saved: None)  # The old summary does not count.
  Driver(sweep, tmp_path, vanishing).step()
  Driver(sweep, tmp_path, vanishing).step()
  assert len(vanishing.started) == 2


def test_the_table_works_on_network_file_systems(tmp_path):
  before = sqlite3.connect(tmp_path / "results.sqlite")
  before.execute("PRAGMA journal_mode=WAL")  # As older code left it.
  before.execute("CREATE TABLE other (a)")
  before.close()
  Table(tmp_path).start("a", {}, {}, "")
  header = (tmp_path / "results.sqlite").read_bytes()[18:20]
  assert header == b"\1\1"  # Rollback journal; 2 is WAL (sqlite.org/fileformat2).


def without(config: dict, field: str) -> dict:
  """As code would have written it that did not have the field yet."""
  group, name = field.split(".")
  return {**config, group: {k: v for k, v in config[group].items() if k != name}}


def test_runs_are_found_again_when_the_code_gains_a_field(tmp_path):
  """Whatever had ended is done; what had not goes on in its own directory."""
  sweep = Sweep(config, [Grid("g", [{"replicas": m} for m in (1, 2)], ())])
  sweep = Sweep(lambda p: config({**p, "lr": 1}), sweep.grids)
  finish(Driver(sweep, tmp_path / "new", Fake()))
  older = Table(tmp_path / "old")
  done, waiting = Table(tmp_path / "new").rows()
  names = []
  for row in (done, waiting):
    written = without(json.loads(row["config"]), "outer.offload")
    names.append(digest(written))
    older.start(names[-1], json.loads(row["point"]), written, "older")
  older.finish(names[0], summary_of(json.loads(done["config"])))
  older.interrupt(names[1], vanished=0)
  backend = Fake()
  finish(Driver(sweep, tmp_path / "old", backend))
  assert backend.started == [names[1]] != [waiting["name"]]
  assert [row["name"] for row in older.rows()] == names
  resumed = tmp_path / "old" / "runs" / names[1] / "config.json"
  assert json.loads(resumed.read_text()) == json.loads(waiting["config"])


def test_another_value_of_a_new_field_is_another_run(tmp_path):
  def offloaded(point):
    c = config(point)
    c.outer.offload = True
    return c

  point = {"replicas": 1, "lr": 1}
  written = json.loads(json.dumps(resolve(config(point)).to_dict()))
  written = without(written, "outer.offload")
  older = Table(tmp_path)
  older.start(digest(written), point, written, "older")
  older.finish(digest(written), summary_of(written))
  gone = {**written, "gone": 1}  # Of code that had a field which this one has not.
  older.start(digest(gone), point, gone, "older")
  older.finish(digest(gone), summary_of(gone))
  backend = Fake()
  finish(Driver(Sweep(offloaded, [Grid("g", [point])]), tmp_path, backend))
  assert len(backend.started) == 1


def test_a_table_of_older_code_gets_the_columns_that_it_lacks(tmp_path):
  Table(tmp_path).start("a", {}, {}, "")
  older = sqlite3.connect(tmp_path / "results.sqlite")
  older.execute("ALTER TABLE runs DROP COLUMN vanished")
  older.close()
  (row,) = Table(tmp_path).rows()
  assert (row["name"], row["vanished"]) == ("a", None)


def test_slots_bound_what_is_started(tmp_path):
  backend = Fake(slots=0)
  Driver(make_sweep(), tmp_path, backend).step()
  assert backend.started == []


def test_a_cell_that_starts_from_nothing_is_an_error(tmp_path):
  grid = Grid("g", [{"replicas": 1}], (), like=lambda cell: {"replicas": 7})
  with pytest.raises(ValueError, match="starts from replicas=7, which no grid"):
    Driver(Sweep(config, [grid]), tmp_path, Fake()).step()


def test_progress_names_every_cell_with_its_best_point(tmp_path):
  driver = Driver(make_sweep(), tmp_path, Fake())
  cells = finish(driver)
  first, last = progress.lines(cells, driver.rows())[1::2]
  assert first.split()[:5] == ["g", "replicas=1", "interior", "4/4", "3.0000"]
  assert "lr=0.003906" in first
  assert last == "2 of 2 cells, 8 runs done, 0 running, 0 failed"


def test_progress_says_why_runs_failed_once(capsys):
  rows = [{"status": "failed", "error": e} for e in ("a", "b", "b", "c", "d")]
  rows.append({"status": "done", "error": None})
  more, *shown = progress.lines([], rows)[1:-1]
  assert more == "1 more reasons: see --export"
  assert shown == ["failed: b", "failed: c", "failed: d"]
  live = progress.Live()
  for some in (rows[:1], rows[:2], rows[:2], rows[:3]):
    live([], some)
  said = [line for line in capsys.readouterr().err.splitlines() if "cells" not in line]
  assert said == ["failed: a", "failed: b"]


def test_export_is_a_table_of_results_with_their_configs(tmp_path):
  finish(Driver(make_sweep(), tmp_path, Fake()))
  assert export(Table(tmp_path).rows(), tmp_path / "out.csv") == 8
  with (tmp_path / "out.csv").open() as file:
    rows = list(csv.DictReader(file))
  assert {row["replicas"] for row in rows} == {"1", "2"}
  assert {row["algorithm"] for row in rows} == {"diloco"}
  best = min(rows, key=lambda row: float(row["loss"]))
  assert float(best["learning_rate"]) == BEST
  assert json.loads(best["config"])["train.steps"] == 10


def test_a_sweep_goes_on_from_an_exported_file(tmp_path):
  finish(Driver(make_sweep(), tmp_path / "a", Fake()))
  export(Table(tmp_path / "a").rows(), tmp_path / "out.csv")
  table = Table(tmp_path / "b")
  assert load(tmp_path / "out.csv", table) == load(tmp_path / "out.csv", table) == 8
  again = Fake()
  finish(Driver(make_sweep(), tmp_path / "b", again))
  assert again.started == []
  before = {r["name"]: r for r in Table(tmp_path / "a").rows()}
  for row in table.rows():
    assert row["loss"] == pytest.approx(before[row["name"]]["loss"], rel=1e-5)
    assert row["revision"] == before[row["name"]]["revision"]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"loss": ""}, "loss is '', but the run is done"),
    ({"loss": "abc"}, "loss is 'abc', no real"),
    ({"loss": "nan"}, "loss is 'nan', but the run is done"),
    ({"params": "1.5"}, "params is '1.5', no integer"),
    ({"replicas": "two"}, "'two'"),
    ({"replicas": "3"}, "train.batch_size is 4, which replicas"),
    ({"status": "well"}, "status is 'well', neither done nor failed"),
    ({"config": "[]"}, "'list' object has no attribute"),
    ({"config": '{"model.warp": 1}'}, "warp"),
    ({None: ["more"]}, "as many cells"),
  ],
)
def test_what_cannot_be_taken_over_is_told_with_its_line(tmp_path, change, message):
  finish(Driver(make_sweep(), tmp_path / "a", Fake()))
  export(Table(tmp_path / "a").rows(), tmp_path / "out.csv")
  with (tmp_path / "out.csv").open() as file:
    rows = list(csv.DictReader(file))
  rows[4] |= change
  with (tmp_path / "out.csv").open("w") as file:
    writer = csv.writer(file)
    writer.writerow(rows[0])
    for row in rows:
      writer.writerow([*(v for k, v in row.items() if k), *row.get(None, ())])
  table = Table(tmp_path / "b")
  with pytest.raises(ValueError, match=r"^line 6 of .* cannot be taken over") as error:
    load(tmp_path / "out.csv", table)
  assert message in str(error.value)
  assert table.rows() == []  # All or none.


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "status,loss\ndone,3\n", "", "\0"])
def test_a_file_that_is_no_export_is_refused(tmp_path, text):
  (tmp_path / "t.csv").write_text(text)
  with pytest.raises(ValueError, match=r"line 1 of .* has no column .*algorithm"):
    load(tmp_path / "t.csv", Table(tmp_path))


def test_a_run_that_is_done_elsewhere_need_not_be_done_here(tmp_path):
  finish(Driver(make_sweep(), tmp_path / "a", Fake()))
  export(Table(tmp_path / "a").rows(), tmp_path / "out.csv")
  never = Fake(lambda run, saved: None)
  Driver(make_sweep(), tmp_path / "b", never).step()  # Both runs are booked, not done.
  table = Table(tmp_path / "b")
  assert len(table.rows()) == 2
  load(tmp_path / "out.csv", table)
  assert [row["status"] for row in table.rows()] == ["done"] * 8
  again = Fake()
  finish(Driver(make_sweep(), tmp_path / "b", again))
  assert again.started == []


def test_an_export_holds_runs_of_code_with_other_fields(tmp_path):
  table = Table(tmp_path)
  written = json.loads(json.dumps(resolve(config({"replicas": 1, "lr": 1})).to_dict()))
  table.start("a", {}, without(written, "outer.learning_rate") | {"gone": 1}, "")
  table.start("b", {}, {}, "")  # Its config could not be made.
  table.fail("a", "lost")
  table.fail("b", "refused")
  assert export(table.rows(), tmp_path / "out.csv") == 2
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


def test_a_job_notes_the_trainers_own_sentence(tmp_path):
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
  assert ended == {"failed": False, "error": ""}


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
def test_what_all_processes_of_a_job_are_told_stops_it_in_order(tmp_path, number):
  """Ctrl-C comes from terminals, SIGUSR2 (or 1) from Slurm before a time limit."""
  (tmp_path / "config.json").write_text(json.dumps(default_config().to_dict()))
  command = [sys.executable, "-m", "diloco.sweep.job", str(tmp_path)]
  started = subprocess.Popen(command, start_new_session=True)
  while not _handles_sigterm(started.pid):
    time.sleep(0.05)
  os.killpg(started.pid, number)
  started.wait()
  ended = json.loads((tmp_path / "ended.json").read_text())
  assert ended == {"failed": False, "error": ""}


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
  driver = subprocess.Popen(command, env=environment, start_new_session=True)
  while not list(tmp_path.glob("runs/*/metrics.jsonl")):
    assert driver.poll() is None
    time.sleep(0.2)
  os.killpg(driver.pid, signal.SIGINT)  # A terminal signals the whole group.
  assert driver.wait() == 1
  (row,) = Table(tmp_path).rows()
  assert (row["status"], row["vanished"]) == ("interrupted", 0)
  log = (tmp_path / "runs" / row["name"] / "log.txt").read_text()
  assert "SIGTERM: saved step" in log


def _handles_sigterm(pid: int) -> bool:
  """Whether a process has a handler for SIGTERM, which Linux tells as a bit mask."""
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
  """Kills the driver when one run is done; the second driver does the others only."""
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
  after = {row["name"]: row for row in Table(tmp_path / "results").rows()}
  assert {row["status"] for row in after.values()} == {"done"}
  assert len(after) == 3
  for name, row in done.items():
    assert after[name] == row


def _done(results: pathlib.Path) -> dict:
  if not (results / "results.sqlite").exists():
    return {}
  rows = Table(results).rows()
  return {row["name"]: row for row in rows if row["status"] == "done"}


def test_two_drivers_do_not_share_results(tmp_path):
  finish(Driver(make_sweep(), tmp_path / "from", Fake()))
  export(Table(tmp_path / "from").rows(), tmp_path / "out.csv")
  table = Table(tmp_path)
  table.refuse("a", {}, "It failed.")
  sweep = ROOT / "configs" / "ladder.py"
  for command in (
    (f"--sweep={sweep}", "--retry_failed"),
    (f"--import={tmp_path / 'out.csv'}",),
  ):
    with alone(tmp_path):
      done = sweep_command(*command, f"--results={tmp_path}")
    assert done.returncode == 2
    assert "has a driver already" in done.stderr
  assert [row["error"] for row in table.rows()] == ["It failed."]


def test_a_driver_ends_what_it_began(tmp_path):
  with alone(tmp_path):
    driver = Driver(make_sweep(), tmp_path, Fake())
    assert drive(driver, lambda cells, rows: None, pause=0.01)


def test_show_changes_nothing(tmp_path):
  missing = tmp_path / "typo"
  sweep = f"--sweep={ROOT / 'configs' / 'ladder.py'}"
  for command in ((sweep, "--show"), (f"--export={tmp_path / 'out.csv'}",)):
    done = sweep_command(*command, f"--results={missing}")
    assert done.returncode == 2
    assert "holds no results.sqlite" in done.stderr
    assert not missing.exists()
  refusing = Sweep(config, [Grid("g", [{"replicas": 3}], (Axis("lr", (1,)),))])
  Table(tmp_path)
  driver = Driver(refusing, tmp_path, Fake(), read_only=True)
  assert driver.cells({})[0].search.state == "failed"
  assert driver.rows() == []
  with alone(tmp_path):  # Nor does it wait for a driver.
    assert sweep_command(sweep, "--show", f"--results={tmp_path}").returncode == 0


def sweep_command(*arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "diloco.sweep", *arguments],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )


def test_drive_stops_at_sigterm(tmp_path):
  driver = Driver(make_sweep(), tmp_path, Fake(slots=0))

  def show(cells, rows):
    os.kill(os.getpid(), signal.SIGTERM)

  assert drive(driver, show, pause=0.01) is False
