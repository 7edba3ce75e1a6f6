"""Jobs: real processes, signals, errors."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import running

from diloco.config import default_config
from diloco.sweep import job
from diloco.sweep.local import Local
from diloco.util import files


@pytest.fixture
def run(tmp_path):
  """The folder of a run whose config cannot be trained."""
  (tmp_path / "config.json").write_text(json.dumps(default_config().to_dict()))
  return tmp_path


HOLD = """
import pathlib, sys, time
from diloco.util import files
run = pathlib.Path(sys.argv[1])
with (run / ".lock").open("w") as lock:
  print(files.try_lock(lock), flush=True)
  time.sleep(1.5)
  (run / "ended").touch()
"""


def test_a_launch_waits_for_a_trainer_that_outlived_its_connection(run):
  there = running.start("-c", HOLD, run, stdout=subprocess.PIPE)
  assert there.stdout.readline() == "True\n"
  assert job.run(str(run), launch=f"test -e {run}/ended") == 0
  there.wait()


@pytest.mark.parametrize(("count", "launch"), [(1, ""), (2, "slurm.sh {flags}")])
def test_a_job_notes_the_error_that_the_trainer_printed(tmp_path, count, launch):
  """Runs that train together are trained by the job, not by --launch."""
  runs = [tmp_path / str(k) for k in range(count)]
  for run in runs:
    run.mkdir()
    (run / "config.json").write_text(json.dumps(default_config().to_dict()))
  assert job.run(*map(str, runs), launch=launch) == 2
  for run in runs:
    ended = json.loads((run / "ended.json").read_text())
    assert ended["error"].startswith("train.steps is 0")
    assert not job.alive(run)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_trainer_that_is_killed_leaves_no_end(run):
  started = running.start("-m", "diloco.sweep.job", run)
  children = pathlib.Path(f"/proc/{started.pid}/task/{started.pid}/children")
  trainer, *_ = running.wait(lambda: children.read_text().split(), started)
  os.kill(int(trainer), signal.SIGKILL)
  started.wait()
  assert not (run / "ended.json").exists()


@pytest.mark.parametrize(
  "ends", ["true", "false", "sh -c 'echo failed: lost; exit 255'"]
)
def test_a_launch_that_trains_nothing_has_vanished(run, ends):
  """Otherwise a sweep would start it again for ever."""
  job.run(str(run), launch=ends)
  assert not (run / "ended.json").exists()
  (run / "summary.json").touch()
  job.run(str(run), launch=ends)
  assert (run / "ended.json").exists() == (ends == "true")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
  ("send", "number"),
  [(os.kill, signal.SIGTERM), *((os.killpg, n) for n in job.STOPS[1:])],
)
def test_a_signal_to_a_job_or_to_all_processes_lets_the_trainer_save(run, send, number):
  """Terminals send SIGINT at Ctrl-C, Slurm sends SIGUSR2 or 1 before a time limit.

  Here they come while the trainer is still importing. A job that is stopped has not
  failed.
  """
  started = running.start("-m", "diloco.sweep.job", run, start_new_session=True)
  running.wait(lambda: _handles_stops(started.pid), started)
  send(started.pid, number)
  started.wait()
  ended = json.loads((run / "ended.json").read_text())
  assert (ended["failed"], ended["error"]) == (False, "")


def test_a_job_is_asked_for_with_its_folder(tmp_path, capsys):
  said = running.refused(job.main, tmp_path / "none")
  assert "has no config.json; give a folder of a sweep" in said
  (tmp_path / "config.json").write_text('{"warp": 1}')
  with (tmp_path / "lock").open("w") as lock:
    assert files.try_lock(lock)
    said = running.refused(job.main, tmp_path)
  assert "which another process trains already" in said
  assert job.main([str(tmp_path)]) == 1
  assert "warp is 1, but there is no such field" in capsys.readouterr().out


def test_kill_ends_a_job_and_its_trainer(run):
  backend = Local(0, {})
  backend.start(run)
  running.wait(lambda: job.alive(run), backend._processes[run])
  backend.kill()
  assert not backend.running(run)  # Nobody holds the lock.
  assert not (run / "ended.json").exists()


def _handles_stops(pid: int) -> bool:
  """Whether a process handles the last of STOPS, from Linux's bit mask."""
  status = pathlib.Path(f"/proc/{pid}/status").read_text()
  caught = int(status.split("SigCgt:")[1].split()[0], 16)
  return bool(caught >> (job.STOPS[-1] - 1) & 1)


def test_a_run_is_bound_to_cores_that_the_others_leave_free(tmp_path, monkeypatch):
  popen, cores = subprocess.Popen, sorted(os.sched_getaffinity(0))
  monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: popen(["sleep", "60"]))
  backend, runs = Local(1, {}), [tmp_path / name for name in "abc"]
  bound = lambda run: os.sched_getaffinity(backend._processes[run].pid)
  try:
    for run in runs[:2]:
      backend.start(run)
    assert [bound(run) for run in runs[:2]] == [{cores[0]}, {cores[1 % len(cores)]}]
    backend._processes[runs[0]].kill()
    backend._processes[runs[0]].wait()
    backend.start(runs[2])
    assert bound(runs[2]) == {cores[0]}
  finally:
    for process in backend._processes.values():
      process.kill()
      process.wait()
