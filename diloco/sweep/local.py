"""Executes runs on this machine."""

import collections
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from diloco.sweep import job

# Seconds that the system may take to end a killed trainer, which holds its run's lock.
RELEASE = 10.0


class Local:
  """Starts runs as processes of this machine.

  Args:
    cores: number of CPU cores to which each run is bound; 0: not bound.
    environment: additional environment variables of the runs.
  """

  detached = False

  def __init__(self, cores: int, environment: Mapping[str, str]):
    self._cores, self._environment = cores, environment
    self._processes: dict[pathlib.Path, subprocess.Popen] = {}

  def start(self, *runs: pathlib.Path) -> None:
    others = {p.pid for p in self._processes.values() if p.poll() is None}
    process = subprocess.Popen(
      [sys.executable, "-m", "diloco", "job", *map(str, runs), job.plugins_flag(runs)],
      env={**os.environ, **self._environment},
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      start_new_session=True,  # Ctrl-C reaches the driver only, which lets runs save.
    )
    self._processes |= dict.fromkeys(runs, process)
    if self._cores:
      busy = collections.Counter(c for pid in others for c in os.sched_getaffinity(pid))
      free_first = sorted(os.sched_getaffinity(0), key=lambda core: busy[core])
      os.sched_setaffinity(process.pid, free_first[: self._cores])

  def running(self, run: pathlib.Path) -> bool:
    process = self._processes.get(run)
    # The trainer holds the lock even if its parent process was killed.
    return (process is not None and process.poll() is None) or job.alive(run)

  def stop(self) -> None:
    alive = [p for p in self._processes.values() if p.poll() is None]
    for process in dict.fromkeys(alive):  # Once each: runs may share a process.
      process.terminate()
    if alive:
      start = "\n" if sys.stderr.isatty() else ""  # The terminal has written ^C.
      told = f"{start}{len(alive)} runs save and end; a second Ctrl-C kills them."
      print(told, file=sys.stderr, flush=True)
    for process in alive:
      process.wait()

  def kill(self) -> None:
    for run, process in self._processes.items():
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # The job and its trainer.
        process.wait()
        end = time.monotonic() + RELEASE
        while job.alive(run) and time.monotonic() < end:
          time.sleep(0.02)
