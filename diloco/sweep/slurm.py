"""Runs on a cluster: each one a Slurm job, submitted through submitit.

Needs the extra `slurm` and a results directory that all nodes see. Jobs do not depend
on the driver: it may end at any moment, and a later one finds them by their names.
"""

import hashlib
import math
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping

from diloco.sweep import job
from diloco.sweep.local import job_environment

# Seconds for which an answer of squeue is good, and for which none is no reason to end.
FRESH, PATIENCE = 5.0, 3600.0
# Seconds to wait before sbatch is asked again.
PAUSES = (5.0, 30.0)


class Slurm:
  """Submits runs, at most `parallel` at a time.

  Args:
    parallel: most jobs queued or running at a time.
    results: the results directory; logs of submitit go to slurm/ in it.
    environment: further variables of the runs' processes.
    options: of submitit, e.g. {'timeout_min': 60, 'slurm_partition': 'gpu'}.
    cluster: slurm, or local for submitit's processes on this machine.

  Raises:
    ValueError: submitit or Slurm is missing, or an option is unknown.
  """

  def __init__(
    self,
    parallel: int,
    results: pathlib.Path,
    environment: Mapping[str, str],
    options: Mapping[str, object],
    cluster: str = "slurm",
  ):
    try:
      import submitit
    except ImportError as error:
      raise ValueError(
        "this --backend needs submitit, which is not installed: pip install submitit,"
        " or '.[slurm]' from a clone."
      ) from error
    self._folder = results.absolute() / "slurm"
    try:
      self._executor = submitit.AutoExecutor(self._folder, cluster=cluster)
      self._executor.update_parameters(**{"timeout_min": 24 * 60, **options})
    except (RuntimeError, NameError, TypeError, ValueError) as error:
      raise ValueError(
        f"--backend={cluster} cannot submit: {' '.join(str(error).split())}; check"
        " that sbatch is on the PATH and --slurm_options are submitit's."
      ) from error
    self._parallel = parallel
    self._environment = job_environment(results.absolute(), environment)
    self._jobs: dict[pathlib.Path, submitit.Job] = {}
    self._cluster = cluster
    self._prefix = str(options.get("name", "diloco"))
    # The same run may be queued for other results.
    self._place = hashlib.sha256(str(results.resolve()).encode()).hexdigest()[:8]
    self._states: dict[str, str] | None = None  # By job name; None: never answered.
    self._asked, self._answered = -math.inf, time.monotonic()

  def start(self, run: pathlib.Path) -> None:
    self._executor.update_parameters(name=self._name(run))
    self._jobs[run] = self._submit(run)
    if self._states is not None:
      self._states[self._name(run)] = "PD"

  def running(self, run: pathlib.Path) -> bool:
    ended = (run / "ended.json").exists()
    if self._cluster == "local":
      return run in self._jobs and not ended and not self._jobs[run].done()
    states = self._queue()
    if states is None:
      return True  # Nothing is known: better wait than submit a run twice.
    # The end that the run itself noted is seen before the scheduler tells it; but a
    # job that Slurm preempted and queued again itself will go on.
    return self._name(run) in states and (not ended or states[self._name(run)] == "PD")

  def slots(self) -> int:
    if self._cluster == "local":
      return self._parallel - sum(self.running(run) for run in self._jobs)
    states = self._queue()
    if states is None:
      return 0
    return self._parallel - sum(name.endswith(self._place) for name in states)

  def stop(self) -> None:
    """Leaves the jobs alone; the next driver books their results."""

  def _name(self, run: pathlib.Path) -> str:
    """Name of the run's job. It tells a later driver that the run was submitted, even
    if this one is killed before it could note a number."""
    return f"{self._prefix}-{run.name}-{self._place}"

  def _submit(self, run: pathlib.Path):
    """submitit's job, after a few refusals by sbatch at most.

    Raises:
      ValueError: sbatch goes on refusing.
    """
    from submitit.core.utils import FailedJobError

    pauses = list(PAUSES)
    while True:
      try:
        return self._executor.submit(
          job.run, str(run.absolute()), (), self._environment
        )
      except (FailedJobError, OSError) as error:
        why = " ".join(str(error).split())
        if not pauses:
          raise ValueError(
            f"sbatch submits nothing ({why}); the jobs go on: start the same sweep"
            " again when it does, with a lower --parallel if there are too many."
          ) from error
        _say(f"sbatch submits nothing ({why}); asking again.")
        time.sleep(pauses.pop(0))

  def _queue(self) -> dict[str, str] | None:
    """Name and state of this user's jobs; the last answer while there is no other.

    From squeue: submitit asks sacct, which says nothing where Slurm does no
    accounting, and then a lost job would never end.

    Raises:
      ValueError: squeue has not answered for PATIENCE seconds.
    """
    now = time.monotonic()
    if now < self._asked + FRESH:
      return self._states
    self._asked = now
    command = ["squeue", "--noheader", "--me", "--format=%j %t"]
    try:
      answer = subprocess.run(
        command, capture_output=True, check=True, text=True, timeout=60
      )
    except (OSError, subprocess.SubprocessError) as error:
      why = f"squeue does not answer ({' '.join(str(error).split())})"
      if now > self._answered + PATIENCE:
        raise ValueError(
          f"{why}; the jobs go on: start the same sweep again when Slurm is back."
        ) from error
      _say(f"{why}; asking again.")
      return self._states
    lines = [line.rsplit(maxsplit=1) for line in answer.stdout.splitlines()]
    self._states = {line[0].strip(): line[1] for line in lines if len(line) == 2}
    self._answered = now
    return self._states


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
