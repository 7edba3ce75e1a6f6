"""Executes runs on a cluster: each run is a Slurm job, submitted through submitit.

Needs the extra `slurm` and a results directory that all nodes see. Jobs do not depend
on the driver, which may end at any moment: a later driver finds them by their names.
"""

import math
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping

from diloco.sweep import job
from diloco.sweep.table import digest
from diloco.util import files
from diloco.util.command import one_line

# An answer of squeue is used for FRESH seconds. If squeue does not answer for PATIENCE
# seconds, that is an error.
FRESH, PATIENCE = 5.0, 3600.0
# Seconds to wait after each refusal by sbatch. A refusal after the last is an error.
PAUSES = (5.0, 30.0)


class Slurm:
  """Submits runs.

  Args:
    results: the results directory; its folder slurm/ takes submitit's logs.
    environment: additional environment variables of the runs.
    options: for submitit, e.g. {'timeout_min': 60, 'slurm_partition': 'gpu'}.

  Raises:
    ValueError: submitit or Slurm is missing, or an option is unknown.
  """

  detached = True

  def __init__(
    self,
    results: pathlib.Path,
    environment: Mapping[str, str],
    options: Mapping[str, object],
  ):
    try:
      import submitit

      self._executor = submitit.AutoExecutor(results.absolute() / "slurm", "slurm")
      self._executor.update_parameters(**{"timeout_min": 24 * 60, **options})
    except (ImportError, RuntimeError, NameError, TypeError, ValueError) as error:
      raise ValueError(
        f"this --backend cannot submit: {one_line(error)}; check that submitit is"
        " installed (pip install submitit, or '.[slurm]' from a clone), sbatch is on"
        " the PATH and --slurm_options are submitit's."
      ) from error
    self._environment = environment
    self._prefix = str(options.get("name", "diloco"))
    # A run of another results directory may have the same name in the queue.
    self._place = digest({"results": str(results.resolve())})
    self._states: dict[str, str] | None = None  # By job name; None: no answer yet.
    self._asked, self._answered = -math.inf, time.monotonic()

  def start(self, *runs: pathlib.Path) -> None:
    """Submits a job; if sbatch refuses, tries again after each of PAUSES.

    Raises:
      ValueError: sbatch still refuses.
    """
    from submitit.core.utils import FailedJobError

    name = self._name(runs[0])
    self._executor.update_parameters(name=name)
    for pause in (*PAUSES, None):
      try:
        paths = [str(run.absolute()) for run in runs]
        self._executor.submit(job.run, *paths, environment=self._environment)
        break
      except (FailedJobError, OSError) as error:
        why = f"sbatch submits nothing ({one_line(error)})"
        if pause is None:
          raise ValueError(
            f"{why}; submitted jobs go on: start the same sweep again later, with a"
            " lower --parallel if there are too many jobs."
          ) from error
        print(f"{why}; asking again.", file=sys.stderr, flush=True)
        time.sleep(pause)
    if self._states is not None:
      self._states[name] = "PD"  # Pending.

  def running(self, run: pathlib.Path) -> bool:
    states = self._queue()
    if states is None:
      return True  # It is better to wait than to submit a run twice.
    # A run notes its end before Slurm does. But a job that Slurm has preempted and put
    # back into the queue is pending, and will run again.
    state = states.get(self._name(run))
    return state == "PD" or (state is not None and not (run / "ended.json").exists())

  def stop(self) -> None:
    """Leaves the jobs alone; the next driver finds them."""

  def kill(self) -> None:
    """Leaves the jobs alone."""

  def _name(self, run: pathlib.Path) -> str:
    """Names a run's job. A later driver finds the job by this name, even if this
    driver was killed before it knew the job's number. A job of several runs has the
    name of the first."""
    first = (files.read_json(run / "run.json") or {}).get("group") or run.name
    return f"{self._prefix}-{first}-{self._place}"

  def _queue(self) -> dict[str, str] | None:
    """Returns the states of this user's jobs by name, from the last answer of squeue.

    Submitit would ask sacct. Without accounting in Slurm, sacct gives no answer, and a
    lost job would never end.

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
      why = f"squeue does not answer ({one_line(error)})"
      if now > self._answered + PATIENCE:
        raise ValueError(
          f"{why}; submitted jobs go on: start the same sweep again later."
        ) from error
      print(f"{why}; asking again.", file=sys.stderr, flush=True)
      return self._states
    lines = [line.rstrip().rpartition(" ") for line in answer.stdout.splitlines()]
    self._states = {name: state for name, _, state in lines}
    self._answered = now
    return self._states
