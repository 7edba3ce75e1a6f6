"""Runs on this machine, a bounded number at a time."""

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping

from diloco.sweep import job


class Local:
  """Starts runs as processes of this machine.

  Args:
    parallel: most runs at a time, those of an earlier driver included.
    cores: CPU cores that each run is bound to; 0: any.
    results: the results directory, for JAX's cache of compiled programs.
    environment: further variables of the runs' processes.
  """

  def __init__(
    self,
    parallel: int,
    cores: int,
    results: pathlib.Path,
    environment: Mapping[str, str],
  ):
    self._parallel, self._cores = parallel, cores
    self._environment = job_environment(results, environment)
    self._jobs: dict[pathlib.Path, tuple[int, subprocess.Popen]] = {}
    self._seen: set[pathlib.Path] = set()

  def start(self, run: pathlib.Path) -> None:
    taken = {slot for slot, process in self._jobs.values() if process.poll() is None}
    slot = next(s for s in range(self._parallel) if s not in taken)
    command = [sys.executable, "-m", "diloco.sweep.job", str(run)]
    if self._cores and hasattr(os, "sched_getaffinity"):
      usable = sorted(os.sched_getaffinity(0))
      first = slot * self._cores
      chosen = [usable[(first + i) % len(usable)] for i in range(self._cores)]
      command.append(",".join(map(str, sorted(set(chosen)))))
    process = subprocess.Popen(
      command,
      env={**os.environ, **self._environment},
      stdin=subprocess.DEVNULL,
      start_new_session=True,  # Ctrl-C is for the driver, which asks runs to save.
    )
    self._jobs[run] = slot, process

  def running(self, run: pathlib.Path) -> bool:
    if run in self._jobs:
      return self._jobs[run][1].poll() is None or job.alive(run)
    busy = job.alive(run)
    (self._seen.add if busy else self._seen.discard)(run)
    return busy

  def slots(self) -> int:
    mine = sum(process.poll() is None for _, process in self._jobs.values())
    return self._parallel - mine - len(self._seen)

  def stop(self) -> None:
    processes = [process for _, process in self._jobs.values()]
    for process in processes:
      if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    for process in processes:
      process.wait()


def job_environment(results: pathlib.Path, extra: Mapping[str, str]) -> dict[str, str]:
  """This process's environment for runs: compiled programs are kept and shared."""
  cache = {
    "JAX_COMPILATION_CACHE_DIR": str(results / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  return {**cache, **extra}
