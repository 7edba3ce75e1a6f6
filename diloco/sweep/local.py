"""Executes runs as processes of this machine, which may train on other machines."""

import collections
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from diloco.sweep import job, table

# Seconds to wait until a killed trainer has ended and released its run's lock.
RELEASE = 10.0


class Local:
  """Starts runs as processes of this machine.

  Args:
    cores: number of CPU cores to which each run is bound; 0: not bound.
    environment: additional environment variables of the runs.
    launch: the command that trains a run, as in `job.run`. Its {worker} becomes the
      least number from 0 that no other running run has.
    workdir: a bucket's address; `launch` trains run NAME in the folder WORKDIR/NAME.
  """

  detached = False

  def __init__(
    self,
    cores: int,
    environment: Mapping[str, str],
    launch: str = "",
    workdir: str = "",
  ):
    self._cores, self._environment = cores, environment
    self._launch, self._workdir = launch, workdir
    self._processes: dict[pathlib.Path, subprocess.Popen] = {}

  def start(self, *runs: pathlib.Path) -> None:
    others = {p.pid for p in self._processes.values() if p.poll() is None}
    command = [sys.executable, "-m", "diloco", "job", *map(str, runs)]
    command += job.plugins_flag(runs)
    if self._launch:
      worker = self._free_worker(runs[0])
      table.note(runs[0], worker=worker)
      command.append(f"--launch={self._launch.replace('{worker}', str(worker))}")
    if self._workdir:
      command.append(f"--workdir={self._workdir}/{runs[0].name}")
    process = subprocess.Popen(
      command,
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

  def _free_worker(self, run: pathlib.Path) -> int:
    """Returns the least worker number that no running run of any driver has."""
    rows = table.read_rows(run.parents[1]).values()
    busy = {row.get("worker") for row in rows if self.running(row["folder"])}
    return next(number for number in itertools.count() if number not in busy)

  def running(self, run: pathlib.Path) -> bool:
    process = self._processes.get(run)
    # The trainer holds the lock even if its parent process was killed.
    return (process is not None and process.poll() is None) or job.alive(run)

  def stop(self) -> None:
    alive = [p for p in self._processes.values() if p.poll() is None]
    for process in dict.fromkeys(alive):  # Several runs may share a process.
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
        os.killpg(process.pid, signal.SIGKILL)  # Kills the job and its trainer.
        process.wait()
        end = time.monotonic() + RELEASE
        while job.alive(run) and time.monotonic() < end:
          time.sleep(0.02)
