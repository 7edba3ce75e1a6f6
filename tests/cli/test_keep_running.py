"""A run is started again until it ends well, is stopped, or cannot go on."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from diloco.cli import keep_running

ROOT = pathlib.Path(__file__).parents[2]

# Dies with each status of the file `statuses` in turn, and saves before some deaths.
TRAINER = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
statuses = (folder / "statuses").read_text().split()
count = len(list(folder.glob("start-*")))
(folder / f"start-{count}").touch()
status = statuses[min(count, len(statuses) - 1)]
if status.endswith("saved"):
  (folder / "checkpoints" / str(count)).mkdir(parents=True)
if status == "sleep":
  time.sleep(60)
status = int(status.removesuffix("saved"))
if status < 0:
  os.kill(os.getpid(), -status)
  time.sleep(60)
sys.exit(status)
"""


@pytest.mark.parametrize(
  ("statuses", "ended", "starts"),
  [
    ("0", 0, 1),
    ("2", 2, 1),
    ("130", 130, 1),
    ("1 -9 0", 0, 3),
    ("1", 1, 5),
    ("-9", 137, 5),
    ("1saved 1 1saved 1 1 1 0", 0, 7),
    ("1 1saved 1", 1, 6),
  ],
)
def test_deaths_are_followed_by_starts(statuses, ended, starts, tmp_path, monkeypatch):
  monkeypatch.setattr(keep_running, "PAUSE_S", 0.0)
  (tmp_path / "statuses").write_text(statuses)
  handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
  command = [sys.executable, "-c", TRAINER, str(tmp_path)]
  try:
    assert keep_running.keep_running(command, tmp_path) == ended
  finally:
    for signum, handler in handlers.items():
      signal.signal(signum, handler)
  assert len(list(tmp_path.glob("start-*"))) == starts


def start(*flags: str) -> subprocess.Popen:
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-m", "diloco", "keep_running", *flags]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
  return subprocess.Popen(command, env=env, text=True, **pipes)


def test_a_mistake_is_told_once(tmp_path):
  out, error = start("--config=none", f"--workdir={tmp_path}/run").communicate()
  assert not out
  assert [line[:26] for line in error.splitlines()] == [
    "error: there is no file non"[:26]
  ]
  process = start("--config=sample")
  assert process.communicate()[1].startswith("error: --workdir must be given")
  assert process.returncode == 2


@pytest.mark.slow("two trainers start and compile")
def test_a_killed_run_goes_on_and_a_stopped_one_ends(tmp_path):
  flags = ["--config=sample", f"--workdir={tmp_path}", "--config.checkpoint.every=2"]
  small = ["--config.model.dim=16", "--config.train.batch_size=4"]
  process = start(*flags, *small, "--config.log.tensorboard=false")

  def trainer() -> int:
    path = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return int(path.read_text().split()[0])

  def wait_for_checkpoint(after: int) -> int:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
      steps = keep_running.steps_of(tmp_path)
      if steps and max(steps) > after:
        return max(steps)
      time.sleep(0.2)
    raise AssertionError("no checkpoint")

  first = wait_for_checkpoint(0)
  os.kill(trainer(), signal.SIGKILL)
  wait_for_checkpoint(first + 4)
  process.send_signal(signal.SIGTERM)
  error = process.communicate(timeout=120)[1]
  assert process.returncode == 0
  assert error.count("died of signal 9; it starts again") == 1
  assert not (tmp_path / "summary.json").exists()
