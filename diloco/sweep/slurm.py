"""Runs on a cluster: each one a Slurm job, submitted through submitit.

Needs the extra `slurm` and a results directory that all nodes see. Jobs do not depend
on the driver: it may end, and a later one finds them by the number in RUN/slurm_job.
"""

import math
import pathlib
import subprocess
import time
from collections.abc import Mapping

from diloco.sweep import job
from diloco.sweep.local import job_environment


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
        "--backend=slurm needs submitit; install it with pip install 'diloco[slurm]'."
      ) from error
    self._folder = results.absolute() / "slurm"
    try:
      self._executor = submitit.AutoExecutor(self._folder, cluster=cluster)
      self._executor.update_parameters(
        **{"name": "diloco-sweep", "timeout_min": 24 * 60, **options}
      )
    except (RuntimeError, NameError, TypeError, ValueError) as error:
      raise ValueError(
        f"--backend={cluster} cannot submit: {' '.join(str(error).split())}; check"
        " that sbatch is on the PATH and --slurm_options are submitit's."
      ) from error
    self._parallel = parallel
    self._environment = job_environment(results.absolute(), environment)
    self._jobs: dict[pathlib.Path, submitit.Job] = {}
    self._cluster = cluster
    self._queued, self._asked = set[str](), -math.inf

  def start(self, run: pathlib.Path) -> None:
    submitted = self._executor.submit(
      job.run, str(run.absolute()), (), self._environment
    )
    (run / "slurm_job").write_text(submitted.job_id)
    self._jobs[run] = submitted
    self._queued.add(submitted.job_id)

  def running(self, run: pathlib.Path) -> bool:
    # The end that the run itself noted is seen before the scheduler tells it.
    if (run / "ended.json").exists():
      return False
    if self._cluster == "local":
      return run in self._jobs and not self._jobs[run].done()
    try:
      return (run / "slurm_job").read_text() in self._queue()
    except FileNotFoundError:
      return False

  def slots(self) -> int:
    return self._parallel - sum(self.running(run) for run in self._jobs)

  def stop(self) -> None:
    """Leaves the jobs alone; the next driver books their results."""

  def _queue(self) -> set[str]:
    """Numbers of this user's jobs, at most some seconds old.

    From squeue: submitit asks sacct, which says nothing where Slurm does no
    accounting, and then a lost job would never end.
    """
    if time.monotonic() > self._asked + 5:
      command = ["squeue", "--noheader", "--me", "--format=%i"]
      try:
        answer = subprocess.run(command, capture_output=True, check=True, text=True)
      except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
          f"squeue does not answer ({' '.join(str(error).split())}); the jobs go on:"
          " start the same sweep again when Slurm is back."
        ) from error
      self._queued, self._asked = set(answer.stdout.split()), time.monotonic()
    return self._queued
