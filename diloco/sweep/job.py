"""Trains one run, or several runs together, in a separate process.

python -m diloco job RUN
python -m diloco job RUN RUN ...
python -m diloco job RUN --launch='ssh HOST "python -m diloco.main {flags}"'

RUN is a run directory with a config.json. `diloco.main` trains one run, and `worker.py`
trains several. The command of --launch may train one run on another machine. The
trainer holds a lock on RUN/lock until it ends, even if its parent process ends earlier.
So no two processes ever train the same run.
"""

import argparse
import contextlib
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from diloco.config import default_config
from diloco.config.resolve import leaves, saved_fields
from diloco.log.workdir import FAILED
from diloco.spec import plugins
from diloco.sweep import saved, table
from diloco.util import files
from diloco.util.command import Parser, as_place, guarded, shell_words
from diloco.util.storage import open_storage

LOCKED = 75  # Exit status EX_TEMPFAIL: temporary failure.
# Exit statuses of a --launch whose cause a person must correct: 2 is a mistake, as for
# all commands (`diloco.errors`). Shells return 126 or 127 if a command cannot start.
MISTAKES = (2, 126, 127)
# Signals that ask a run to save and end; batch systems send the last two.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# Signals that end a faulty program. Other signals come from outside the program.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


# Files that a sweep copies from a run's bucket. The last, summary.json, shows that the
# run has ended.
RESULTS = ("contents.json", "metrics.jsonl", "summary.json")


def run(*directories: str, launch: str = "", workdir: str = "") -> int:
  """Trains the config of config.json and writes ended.json: {failed, error, finished}.

  Several runs share one process, which writes to the log.txt of the first run.

  A trainer that was asked to stop has not failed: the driver resumes its run. If a
  trainer was killed, perhaps because memory ran out, there is no ended.json: the driver
  resumes the run a few times. A `launch` with exit status 1 leaves no ended.json
  either, because a machine or a connection may have been lost; the next attempt waits
  for a trainer that goes on elsewhere. Nor does a `launch` that ends unasked with
  status 0 and without a summary.json: perhaps it trains nothing.

  Args:
    launch: a command that trains one run and ends when the run ends. Its {flags} become
      the flags of diloco.main. "": diloco.main trains on this machine.
    workdir: the address of a bucket's folder in which `launch` trains the run. "": the
      run's directory.

  Returns:
    The trainer's exit status, negative if a signal ended it. Status 0 without a
    summary.json means that the trainer was asked to stop and has saved. LOCKED if
    another process trains one of the runs.

  Raises:
    ConfigError: `workdir` is not the address of a bucket.
    OSError: the bucket does not answer.
  """
  runs = [pathlib.Path(directory) for directory in directories]
  with contextlib.ExitStack() as stack:
    locks = [stack.enter_context((run / "lock").open("w")) for run in runs]
    logs = [stack.enter_context((run / "log.txt").open("ab")) for run in runs]
    if not all(map(files.try_lock, locks)):
      return LOCKED
    for run in runs:
      (run / "ended.json").unlink(missing_ok=True)
    if workdir and fetch(runs[0], workdir):
      table.note_end(runs[0], failed=False)
      return 0
    if len(runs) > 1:  # Several runs train in one process, on this machine.
      launch, words = "", ["worker", *directories]
    else:
      config = f"--config={saved.__file__}:{runs[0] / 'config.json'}"
      words = ["main", config, f"--workdir={runs[0]}"]
    command = [sys.executable, "-m", "diloco", *words, *plugins_flag(runs)]
    if launch:
      command = launched(launch, runs[0], workdir)
    starts = [log.tell() for log in logs]
    trainer: subprocess.Popen | None = None
    asked_to_stop = False

    def stop(*_: object) -> None:
      nonlocal asked_to_stop
      asked_to_stop = True
      if trainer is not None:
        trainer.send_signal(signal.SIGTERM)

    with handled(STOPS, stop):
      # If only the connection to a machine broke, its trainer goes on there.
      while launch and alive(runs[0], ".lock"):
        if asked_to_stop:
          table.note_end(runs[0], failed=False)
          return 0
        time.sleep(1)
      # The trainer saves at SIGTERM, but the other signals would kill it. Terminals and
      # Slurm send them to whole jobs, so the trainer starts with these signals blocked.
      others = set(STOPS) - {signal.SIGTERM}
      before = signal.pthread_sigmask(signal.SIG_BLOCK, others)
      try:
        trainer = subprocess.Popen(
          command,
          stdin=subprocess.DEVNULL,
          stdout=logs[0],
          stderr=logs[0],
          pass_fds=[lock.fileno() for lock in locks],
        )
      finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
      if asked_to_stop:
        trainer.send_signal(signal.SIGTERM)
      code = trainer.wait()
      if workdir:
        fetch(runs[0], workdir)
      done = (runs[0] / RESULTS[-1]).exists()
      stopped = not launch or asked_to_stop or done
      mistake = code in MISTAKES if launch else code > 0 or -code in CRASHES
      written = [_since(log.name, start) for log, start in zip(logs, starts)]
      for run, lines in zip(runs, written):
        # The lines of a single run may have this mark from its --launch.
        errors = _after(FAILED, lines) if len(runs) > 1 else []
        if errors or mistake:
          error = errors[-1] if errors else _error(logs[0].name, written[0], code)
          table.note_end(run, failed=True, error=error)
        elif -code in STOPS or (code == 0 and stopped):
          table.note_end(run, failed=False)
  return code


def launched(launch: str, run: pathlib.Path, workdir: str = "") -> list[str]:
  """Returns the words of a command that trains a run, perhaps on another machine.

  If {flags} is a whole word, it becomes one word per flag. If it is part of a longer
  word, the flags are quoted for the shell that reads this word, such as ssh's.

  Raises:
    ConfigError: the config names a plug-in that cannot be imported, or no shell can
      read `launch`.
  """
  config = saved.get_config(str(run / "config.json"))
  plain = leaves(default_config(*config.plugins).to_dict()) | {"plugins": ()}
  given = {k: v for k, v in leaves(config.to_dict()).items() if plain[k] != v}
  fields = [f"--config.{field}={value}" for field, value in given.items()]
  place = workdir or run.absolute()
  flags = ["--config=diloco/sweep/saved.py", *fields, f"--workdir={place}"]
  command = list[str]()
  for word in shell_words(launch, "--launch"):
    inside = word.replace("{flags}", shlex.join(flags))
    command += flags if word == "{flags}" else [inside]
  return command


def fetch(run: pathlib.Path, workdir: str) -> bool:
  """Copies the results of a run from its bucket, if the run has ended.

  Returns:
    Whether the run has ended.

  Raises:
    ConfigError, OSError: see `storage.open_storage`.
  """
  bucket = open_storage(workdir, "--workdir", writes=False)
  if bucket.get(RESULTS[-1]) is None:
    return False
  for name in RESULTS:
    if (data := bucket.get(name)) is not None:
      files.write(run / name, data)
  return True


def plugins_flag(runs: Iterable[pathlib.Path]) -> list[str]:
  """Returns the flag with which a process imports the plug-ins of runs, if any."""
  names = dict[str, str]()
  for run in runs:
    config = files.read_json(run / "config.json") or {}
    names |= {x: plugins.kept(x, run) for x in config.get("plugins", ())}
  return [f"--plugins={','.join(names.values())}"] if names else []


@contextlib.contextmanager
def handled(signals: Iterable[int], handler: Callable[..., None]) -> Iterator[None]:
  """Handles signals with `handler` inside the block; then restores the old handlers."""
  before = {number: signal.signal(number, handler) for number in signals}
  try:
    yield
  finally:
    for number, earlier in before.items():
      signal.signal(number, earlier)


def alive(directory: pathlib.Path, lock_file: str = "lock") -> bool:
  """Tells whether a process trains the run of a directory.

  Args:
    lock_file: lock, which a job and its trainer hold on this machine; or .lock, which
      a trainer on any machine holds.
  """
  try:
    with (directory / lock_file).open("r+") as lock:
      return not files.try_lock(lock)
  except FileNotFoundError:
    return False


def _since(log: str, start: int) -> list[str]:
  """Reads the lines of a log after the first `start` bytes."""
  return pathlib.Path(log).read_bytes()[start:].decode(errors="replace").splitlines()


def _after(word: str, lines: Iterable[str]) -> list[str]:
  """Returns the lines that begin with `word`, without this word."""
  return [line.removeprefix(word) for line in lines if line.startswith(word)]


def _error(log: str, lines: Sequence[str], code: int) -> str:
  """Returns the last error that a trainer printed, else its signal or last line."""
  # `launch_local` writes the number of a process before its lines.
  plain = [re.sub(r"^\[\w+\] (?=error: )", "", line) for line in lines]
  if errors := _after("error: ", plain):
    return errors[-1]
  if code < 0:
    return f"crashed with {signal.Signals(-code).name}; see {log}."
  last = next((line for line in reversed(lines) if line.strip()), "no output")
  return f"exit status {code}: {last.strip()}"


def run_by_hand(args: argparse.Namespace) -> int:
  """Trains runs, and says why if a run fails; returns the exit status.

  Raises:
    ValueError: a folder has no config.json, or another process trains a run; see also
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
  code = run(*map(str, args.run), launch=args.launch, workdir=str(args.workdir or ""))
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
  help_ = "a command that trains RUN, with {flags} for the flags of diloco.main"
  parser.add_argument("--launch", default="", help=help_)
  help_ = "where --launch trains RUN, if in a bucket: s3://BUCKET/RUN"
  parser.add_argument("--workdir", type=as_place, help=help_)
  return guarded(run_by_hand, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
