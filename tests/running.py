"""Runs commands: in this process, or in one of its own that finds package and tests."""

import contextlib
import csv
import io
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).parents[1]
# Slurm's srun: starts two tasks, and ends with the worst of their exit statuses.
SRUN = """
export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=2
status=0
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=0 "${@:2}" &
  echo $! >> "$(dirname "$0")/tasks"
done
for task in $(jobs -p); do wait $task || status=$?; done
exit $status
"""


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
  """The rows of a file."""
  with path.open(newline="") as file:
    return list(csv.DictReader(file))


def environment(**more: str) -> dict[str, str]:
  """Variables of a process."""
  paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
  return {**os.environ, "PYTHONPATH": paths, **more}


def called(
  main: Callable[[Sequence[str]], int | None], *args: str | pathlib.Path
) -> subprocess.CompletedProcess[str]:
  """Calls a command's `main` in this process; returns what a process would return."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      status = main([*map(str, args)]) or 0
    except SystemExit as end:
      status = int(end.code or 0)
  return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())


def shown(main: Callable, *args: str | pathlib.Path) -> str:
  """What a command prints that succeeds."""
  done = called(main, *args)
  assert done.returncode == 0, done.stderr
  return done.stdout


def refused(main: Callable, *args: str | pathlib.Path) -> str:
  """The sentence of a command that refuses its arguments."""
  done = called(main, *args)
  assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
  assert done.stderr.startswith("error: ")
  return done.stderr


def start(*args: str | pathlib.Path, before=(), **more) -> subprocess.Popen:
  """Starts Python in the clone.

  Args:
    args: arguments of Python.
    before: words before those of Python.
    more: arguments of Popen.
  """
  options = {"cwd": ROOT, "env": environment(), "text": True} | more
  return subprocess.Popen([*before, sys.executable, *args], **options)


def python(*args: str | pathlib.Path, **more) -> subprocess.CompletedProcess[str]:
  """Runs Python in the clone to its end; returns what it printed.

  Args:
    args: arguments of Python.
    more: arguments of `subprocess.run`.
  """
  options = {"cwd": ROOT, "env": environment(), "text": True} | more
  return subprocess.run([sys.executable, *args], capture_output=True, **options)


def wait(condition: Callable, *processes: subprocess.Popen, seconds: float = 900):
  """Waits until a condition holds while processes run; returns what it returned."""
  deadline = time.monotonic() + seconds
  while not (found := condition()):
    assert time.monotonic() < deadline, "it never happens"
    assert all(process.poll() is None for process in processes), "a process has ended"
    time.sleep(0.01)
  return found
