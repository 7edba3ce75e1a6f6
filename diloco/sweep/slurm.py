"""Executes runs on a cluster: each run is a Slurm job of scripts/launchers/slurm.sh.

All nodes must see the results directory. Jobs do not depend on the driver, which may
end at any moment: a later driver finds the jobs by their names.
"""

import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from diloco.sweep import job
from diloco.sweep.table import digest
from diloco.util import files, shipped

# An answer of squeue is used for FRESH seconds. If squeue does not answer for PATIENCE
# seconds, that is an error.
FRESH, PATIENCE = 5.0, 3600.0
# Seconds to wait after each refusal by sbatch. One more refusal is an error.
PAUSES = (5.0, 30.0)


class Slurm:
  """Submits runs.

  Args:
    results: the results directory.
    environment: additional environment variables of the runs.
    options: flags of sbatch, such as --nodes=2 and --ntasks-per-node=8.
  """

  detached = True

  def __init__(
    self,
    results: pathlib.Path,
    environment: Mapping[str, str],
    options: Sequence[str] = (),
  ):
    self.environment, self._options = environment, options
    # Jobs have this digest in their names, because a run of another results directory
    # may have the same name.
    self._place = digest({"results": str(results.resolve())})
    self._states: dict[str, str] | None = None  # {job name: state}; None: no answer.
    self._asked, self._answered = -math.inf, time.monotonic()

  def start(self, *runs: pathlib.Path) -> None:
    """Submits a job; if sbatch refuses, tries again after each of PAUSES.

    Raises:
      ValueError: sbatch refuses the last attempt too.
    """
    for pause in (*PAUSES, None):
      try:
        _ask(self.command(*runs), {**os.environ, **self.environment})
        break
      except OSError as error:
        why = f"sbatch submits nothing ({error})"
        if pause is None:
          raise ValueError(
            f"{why}; submitted jobs go on: start the same sweep again later, with a"
            " lower --parallel if there are too many jobs."
          ) from error
        print(f"{why}; asking again.", file=sys.stderr, flush=True)
        time.sleep(pause)
    if self._states is not None:
      self._states[self._name(runs[0])] = "PD"  # Pending.

  def command(self, *runs: pathlib.Path) -> list[str]:
    """Returns the words of the command that submits a job."""
    script = shipped.folder("scripts") / "launchers" / "slurm.sh"
    paths = [str(run.absolute()) for run in runs]
    return [
      *("sbatch", f"--job-name={self._name(runs[0])}"),
      *(f"--output={paths[0]}/slurm.txt", *self._options, str(script)),
      *("job", *paths, *job.plugins_flag(runs)),
    ]

  def running(self, run: pathlib.Path) -> bool:
    states = self._queue()
    if states is None:
      return True  # It is better to wait than to submit a run twice.
    # A run writes ended.json before its job leaves the queue. But a job that Slurm has
    # preempted and put back into the queue is pending, and will run again.
    state = states.get(self._name(run))
    return state == "PD" or (state is not None and not (run / "ended.json").exists())

  def stop(self) -> None:
    """Leaves the jobs alone; the next driver finds them."""

  def kill(self) -> None:
    """Leaves the jobs alone."""

  def _name(self, run: pathlib.Path) -> str:
    """Names a run's job; a job of several runs has the name of the first run.

    A later driver finds the job by this name, even if this driver was killed before it
    knew the job's number.
    """
    first = (files.read_json(run / "run.json") or {}).get("group") or run.name
    return f"diloco-{first}-{self._place}"

  def _queue(self) -> dict[str, str] | None:
    """Returns the states of this user's jobs by name, from the last answer of squeue.

    sacct is no alternative: if Slurm has no accounting, sacct does not answer, and the
    driver would wait for a lost job for ever.

    Raises:
      ValueError: squeue has not answered for PATIENCE seconds.
    """
    now = time.monotonic()
    if now < self._asked + FRESH:
      return self._states
    self._asked = now
    try:
      answer = _ask(["squeue", "--noheader", "--me", "--format=%j %t"])
    except OSError as error:
      why = f"squeue does not answer ({error})"
      if now > self._answered + PATIENCE:
        raise ValueError(
          f"{why}; submitted jobs go on: start the same sweep again later."
        ) from error
      print(f"{why}; asking again.", file=sys.stderr, flush=True)
      return self._states
    lines = [line.rstrip().rpartition(" ") for line in answer.splitlines()]
    self._states = {name: state for name, _, state in lines}
    self._answered = now
    return self._states


def _ask(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
  """Returns what a command of Slurm prints.

  Raises:
    OSError: the command fails, or does not end in a minute.
  """
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, timeout=60, check=True, env=environment
    )
  except subprocess.CalledProcessError as error:
    said = " ".join(error.stderr.split()) or f"exit status {error.returncode}"
    raise OSError(said) from error
  except subprocess.TimeoutExpired as error:
    raise OSError("no answer in a minute") from error
  return done.stdout
