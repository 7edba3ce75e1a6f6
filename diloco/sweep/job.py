"""Trains one run: starts `diloco.main` as a separate process.

python -m diloco.sweep.job RUN

RUN is a run directory with a config.json. The trainer holds a lock on RUN/lock until it
ends, even if its parent process ends earlier. So no two processes ever train the same
run.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from diloco.config import files
from diloco.config.command_line import guarded
from diloco.sweep import saved, table

LOCKED = 75  # Exit status EX_TEMPFAIL: temporary failure.
# Signals that ask a run to save and end. Before a time limit or a preemption, Slurm
# sends SIGUSR2 to jobs of submitit, or SIGUSR1 if SUBMITIT_PREEMPT_SIGNAL says so.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# Signals that end a faulty program. Other signals come from outside the program.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def run(directory: str, environment: Mapping[str, str] | None = None) -> int:
  """Trains the config of config.json and writes ended.json: {failed, error, finished}.

  A trainer that was asked to stop has not failed: the driver resumes it. A trainer that
  was killed (out of memory) leaves no ended.json: the driver resumes such a run a few
  times.

  Args:
    environment: additional environment variables of the trainer.

  Returns:
    The trainer's exit status, negative if a signal ended it. Status 0 without a
    summary.json means that the trainer was asked to stop and has saved. LOCKED if
    another process trains this run.
  """
  here = pathlib.Path(directory)
  with (here / "lock").open("w") as lock, (here / "log.txt").open("ab") as log:
    if not files.try_lock(lock):
      return LOCKED
    (here / "ended.json").unlink(missing_ok=True)
    config = f"--config={saved.__file__}:{here / 'config.json'}"
    start = log.tell()
    trainer: subprocess.Popen | None = None
    asked_to_stop = False

    def stop(*_):
      nonlocal asked_to_stop
      asked_to_stop = True
      if trainer is not None:
        trainer.send_signal(signal.SIGTERM)

    with handled(STOPS, stop):
      # The trainer saves at SIGTERM. The other signals would kill it, and terminals and
      # Slurm send them to every process of a job. So it inherits them blocked.
      with blocked(set(STOPS) - {signal.SIGTERM}):
        trainer = subprocess.Popen(
          [sys.executable, "-m", "diloco.main", config, f"--workdir={here}"],
          stdout=log,
          stderr=log,
          env={**os.environ, **(environment or {})},
          pass_fds=(lock.fileno(),),
        )
      if asked_to_stop:
        trainer.send_signal(signal.SIGTERM)
      code = trainer.wait()
      if code > 0 or -code in CRASHES:
        table.note_end(here, failed=True, error=_error(here / "log.txt", start, code))
      elif -code in (0, *STOPS):
        table.note_end(here, failed=False)
  return code


@contextlib.contextmanager
def handled(signals: Iterable[int], handler: Callable[..., None]) -> Iterator[None]:
  """Handles signals with `handler` inside the block; then restores the old handlers."""
  before = {number: signal.signal(number, handler) for number in signals}
  try:
    yield
  finally:
    for number, earlier in before.items():
      signal.signal(number, earlier)


@contextlib.contextmanager
def blocked(signals: Iterable[int]) -> Iterator[None]:
  """Blocks signals inside the block; processes that start there inherit this."""
  before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def alive(directory: pathlib.Path) -> bool:
  """Tells whether a process trains the run of a directory."""
  try:
    with (directory / "lock").open("r+") as lock:
      return not files.try_lock(lock)
  except FileNotFoundError:
    return False


def _error(log: pathlib.Path, start: int, code: int) -> str:
  """Returns the last error that the trainer printed after `start`, or its last line."""
  lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
  errors = [line for line in lines if line.startswith("error: ")]
  if errors:
    return errors[-1].removeprefix("error: ")
  if code < 0:
    return f"crashed with {signal.Signals(-code).name}; see {log}."
  last = next((line for line in reversed(lines) if line.strip()), "no output")
  return f"exit status {code}: {last.strip()}"


def run_by_hand(args: argparse.Namespace) -> int:
  """Trains a run, and says why if the run fails; returns the exit status.

  Raises:
    ValueError: there is no such run, or another process trains the run.
  """
  if not (args.run / "config.json").is_file():
    raise ValueError(
      f"RUN is {str(args.run)!r}, which has no config.json; give a folder of a sweep,"
      " --results/runs/NAME."
    )
  code = run(str(args.run))
  if code == LOCKED:
    raise ValueError(f"RUN is {str(args.run)!r}, which another process trains already.")
  ended = table.read(args.run / "ended.json") or {}
  if ended.get("failed"):
    print(f"The run failed: {ended['error']}")
  return int(code != 0)


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog="python -m diloco.sweep.job", description="Trains one run of a sweep."
  )
  help_ = "a folder --results/runs/NAME of a sweep, with a config.json"
  parser.add_argument("run", metavar="RUN", type=pathlib.Path, help=help_)
  return guarded(run_by_hand, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
