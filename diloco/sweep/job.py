"""Trains one run, or several runs together, in a separate process.

python -m diloco job RUN
python -m diloco job RUN RUN ...

RUN is a run directory with a config.json. `diloco.main` trains one run, `worker.py`
several. The trainer holds a lock on RUN/lock until it ends, even if its parent process
ends earlier. So no two processes ever train the same run.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from diloco.config.resolve import saved_fields
from diloco.log.workdir import FAILED
from diloco.sweep import saved, table
from diloco.util import files
from diloco.util.command import Parser, guarded

LOCKED = 75  # Exit status EX_TEMPFAIL: temporary failure.
# Signals that ask a run to save and end. Before a time limit or a preemption, Slurm
# sends SIGUSR2 to jobs of submitit, or SIGUSR1 if SUBMITIT_PREEMPT_SIGNAL says so.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# Signals that end a faulty program. Other signals come from outside the program.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def run(*directories: str, environment: Mapping[str, str] | None = None) -> int:
  """Trains the config of config.json and writes ended.json: {failed, error, finished}.

  Several runs end together. Their process writes to the log.txt of the first run.

  A trainer that was asked to stop has not failed: the driver resumes it. A trainer that
  was killed (out of memory) leaves no ended.json: the driver resumes it a few times.

  Args:
    environment: additional environment variables of the trainer.

  Returns:
    The trainer's exit status, negative if a signal ended it. Status 0 without a
    summary.json means that the trainer was asked to stop and has saved. LOCKED if
    another process trains one of the runs.
  """
  runs = [pathlib.Path(directory) for directory in directories]
  with contextlib.ExitStack() as stack:
    locks = [stack.enter_context((run / "lock").open("w")) for run in runs]
    logs = [stack.enter_context((run / "log.txt").open("ab")) for run in runs]
    if not all(map(files.try_lock, locks)):
      return LOCKED
    for run in runs:
      (run / "ended.json").unlink(missing_ok=True)
    command = ["worker", *directories]
    if len(runs) == 1:
      config = f"--config={saved.__file__}:{runs[0] / 'config.json'}"
      command = ["main", config, f"--workdir={runs[0]}"]
    starts = [log.tell() for log in logs]
    trainer: subprocess.Popen | None = None
    asked_to_stop = False

    def stop(*_: object) -> None:
      nonlocal asked_to_stop
      asked_to_stop = True
      if trainer is not None:
        trainer.send_signal(signal.SIGTERM)

    with handled(STOPS, stop):
      # The trainer saves at SIGTERM. The other signals would kill it, and terminals and
      # Slurm send them to every process of a job. So it inherits them blocked.
      others = set(STOPS) - {signal.SIGTERM}
      before = signal.pthread_sigmask(signal.SIG_BLOCK, others)
      try:
        trainer = subprocess.Popen(
          [sys.executable, "-m", "diloco", *command, plugins_flag(runs)],
          stdout=logs[0],
          stderr=logs[0],
          env={**os.environ, **(environment or {})},
          pass_fds=[lock.fileno() for lock in locks],
        )
      finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
      if asked_to_stop:
        trainer.send_signal(signal.SIGTERM)
      code = trainer.wait()
      written = [_since(log.name, start) for log, start in zip(logs, starts)]
      for run, lines in zip(runs, written):
        own = _after(FAILED, lines)
        if own or code > 0 or -code in CRASHES:
          error = own[-1] if own else _error(logs[0].name, written[0], code)
          table.note_end(run, failed=True, error=error)
        elif -code in (0, *STOPS):
          table.note_end(run, failed=False)
  return code


def plugins_flag(runs: Iterable[pathlib.Path]) -> str:
  """Returns the flag by which a process imports the plug-ins of runs."""
  configs = (files.read_json(run / "config.json") or {} for run in runs)
  names = dict.fromkeys(name for c in configs for name in c.get("plugins", ()))
  return f"--plugins={','.join(names)}"


@contextlib.contextmanager
def handled(signals: Iterable[int], handler: Callable[..., None]) -> Iterator[None]:
  """Handles signals with `handler` inside the block; then restores the old handlers."""
  before = {number: signal.signal(number, handler) for number in signals}
  try:
    yield
  finally:
    for number, earlier in before.items():
      signal.signal(number, earlier)


def alive(directory: pathlib.Path) -> bool:
  """Tells whether a process trains the run of a directory."""
  try:
    with (directory / "lock").open("r+") as lock:
      return not files.try_lock(lock)
  except FileNotFoundError:
    return False


def _since(log: str, start: int) -> list[str]:
  """Reads the lines of a log after the first `start` bytes."""
  return pathlib.Path(log).read_bytes()[start:].decode(errors="replace").splitlines()


def _after(word: str, lines: Iterable[str]) -> list[str]:
  """Returns what follows a word at the beginning of lines."""
  return [line.removeprefix(word) for line in lines if line.startswith(word)]


def _error(log: str, lines: Sequence[str], code: int) -> str:
  """Returns the last error that the trainer printed, or its last line."""
  if errors := _after("error: ", lines):
    return errors[-1]
  if code < 0:
    return f"crashed with {signal.Signals(-code).name}; see {log}."
  last = next((line for line in reversed(lines) if line.strip()), "no output")
  return f"exit status {code}: {last.strip()}"


def run_by_hand(args: argparse.Namespace) -> int:
  """Trains runs, and says why if a run fails; returns the exit status.

  Raises:
    ValueError: there is no such run, or another process trains a run; or see
      `plugins.check_trusted`.
  """
  names = " ".join(map(str, args.run))
  for directory in args.run:
    if not (directory / "config.json").is_file():
      raise ValueError(
        f"RUN is {str(directory)!r}, which has no config.json; give a folder of a"
        " sweep, --results/runs/NAME."
      )
    saved_fields(files.read_json(directory / "config.json") or {})
  code = run(*map(str, args.run))
  if code == LOCKED:
    raise ValueError(f"RUN is {names!r}, which another process trains already.")
  ends = [files.read_json(directory / "ended.json") or {} for directory in args.run]
  failed = [ended["error"] for ended in ends if ended.get("failed")]
  for error in failed:
    print(f"The run failed: {error}")
  return int(code != 0 or bool(failed))


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco job", description=__doc__)
  help_ = "a folder --results/runs/NAME of a sweep, with a config.json"
  parser.add_argument("run", metavar="RUN", type=pathlib.Path, nargs="+", help=help_)
  return guarded(run_by_hand, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
