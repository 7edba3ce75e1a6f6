"""One run: `diloco.main` in a process of its own, its end noted in its directory.

python -m diloco.sweep.job RUN [CORE,...]

RUN holds config.json. A lock on RUN/lock is held as long as the trainer lives, even
if who started it is gone, so that no run is ever trained by two processes.
"""

import argparse
import contextlib
import fcntl
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

LOCKED = 75  # What exit statuses call a temporary failure.
# Signals that ask for an end. Slurm announces a time limit or a preemption by SIGUSR2
# where submitit submits, or by SIGUSR1 if SUBMITIT_PREEMPT_SIGNAL says so.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# Signals by which a program ends itself; others come from outside.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def run(
  directory: str,
  cores: Sequence[int] = (),
  environment: Mapping[str, str] | None = None,
) -> int:
  """Trains what config.json says and writes ended.json: {failed, error}.

  A trainer that was asked to stop has not failed: it is to be resumed. One that was
  killed (out of memory) leaves no ended.json, as if this process were lost with it:
  the driver resumes it as well, but not for ever.

  Args:
    directory: of the run.
    cores: to which the trainer is bound; none: all.
    environment: of the trainer; this process's if None.

  Returns:
    The trainer's exit status, negative if a signal ended it; 0 without a
    summary.json means that it was asked to stop and has saved. LOCKED if another
    process trains this run.
  """
  here = pathlib.Path(directory)
  with (here / "lock").open("w") as lock, (here / "log.txt").open("ab") as log:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return LOCKED
    (here / "ended.json").unlink(missing_ok=True)
    if cores and hasattr(os, "sched_setaffinity"):
      os.sched_setaffinity(0, cores)
    saved = pathlib.Path(__file__).with_name("saved.py")
    start = log.tell()
    trainer = functools.partial(
      subprocess.Popen,
      [
        *(sys.executable, "-m", "diloco.main"),
        f"--config={saved}:{here / 'config.json'}",
        f"--workdir={here}",
      ],
      stdout=log,
      stderr=log,
      env=None if environment is None else {**os.environ, **environment},
      pass_fds=(lock.fileno(),),
    )
    with _stoppable(trainer) as process:
      code = process.wait()
      failed = code > 0 or -code in CRASHES
      if failed or -code in (0, *STOPS):
        error = _error(here / "log.txt", start, code) if failed else ""
        _write(here / "ended.json", {"failed": failed, "error": error})
  return code


@contextlib.contextmanager
def _stoppable(start: Callable[[], subprocess.Popen]) -> Iterator[subprocess.Popen]:
  """A trainer to which STOPS of this process are told as SIGTERM: it saves.

  The others are blocked in the trainer itself, since terminals and Slurm signal all
  processes of a job, and a trainer would die of them without having saved.
  """
  trainer, asked = None, False

  def forward(*_):
    nonlocal asked
    asked = True
    if trainer is not None:
      trainer.send_signal(signal.SIGTERM)

  previous = {s: signal.signal(s, forward) for s in STOPS}
  try:
    # What is blocked is so in the process that is started, too.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, set(STOPS) - {signal.SIGTERM})
    try:
      trainer = start()
    finally:
      signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if asked:
      trainer.send_signal(signal.SIGTERM)
    yield trainer
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


def alive(directory: pathlib.Path) -> bool:
  """Whether some process trains this run."""
  try:
    with (directory / "lock").open("r+") as lock:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except FileNotFoundError:
    return False
  except BlockingIOError:
    return True
  return False


def _error(log: pathlib.Path, start: int, code: int) -> str:
  """The trainer's own sentence, or the last line of its log."""
  with log.open("rb") as file:
    file.seek(start)
    lines = file.read().decode(errors="replace").splitlines()
  said = [line for line in lines if line.startswith("error: ")]
  if said:
    return said[-1].removeprefix("error: ")
  if code < 0:
    return f"crashed with {signal.Signals(-code).name}; see {log}."
  last = next((line for line in reversed(lines) if line.strip()), "no output")
  return f"exit status {code}: {last.strip()}"


def _write(path: pathlib.Path, value: dict) -> None:
  """Whole or not at all."""
  part = path.with_suffix(".part")
  part.write_text(json.dumps(value))
  part.replace(path)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(prog="python -m diloco.sweep.job")
  parser.add_argument("run", help="directory with a config.json")
  parser.add_argument(
    "cores", nargs="?", default=[], type=lambda text: [int(c) for c in text.split(",")]
  )
  args = parser.parse_args()
  if not pathlib.Path(args.run, "config.json").is_file():
    parser.error(f"{args.run} holds no config.json; name a run of a sweep")
  sys.exit(run(args.run, args.cores) != 0)
