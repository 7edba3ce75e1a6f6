"""Trains once over links whose rate changes, and records the run."""

import dataclasses
import os
import pathlib
import tempfile
import threading
import time

import netns
import numpy as np
import sites_run

from diloco.log import metrics

CONFIG = "configs/wan.py"


@dataclasses.dataclass(frozen=True)
class Phase:
  """A part of a run with one rate of the links, in bits per second.

  The rate is set when the log shows step `starts`; the log is some steps late. The
  measurement covers the steps first + 1 to last.
  """

  rate: float
  starts: int
  first: int
  last: int


@dataclasses.dataclass
class Trace:
  """The record of a run.

  Attributes:
    records: lines of metrics.jsonl.
    samples: (seconds since the epoch, bytes that a node has sent: mean over nodes).
    changes: when each phase's rate was set, in seconds since the epoch.
  """

  records: list[dict] = dataclasses.field(default_factory=list)
  samples: list[tuple[float, float]] = dataclasses.field(default_factory=list)
  changes: list[float] = dataclasses.field(default_factory=list)

  def step_times(self) -> dict[int, float]:
    """Returns {step: when the step was finished}."""
    return {r["step"]: r["time"] for r in self.records if r["kind"] == "step"}

  def sent(self, when: float) -> float:
    """Interpolates the bytes that a node had sent until `when`, mean over nodes."""
    return float(np.interp(when, *zip(*self.samples)))

  def total(self, kind: str, value: str, phase: Phase) -> float:
    """Sums a value over the lines of a kind within a phase."""
    inside = (r for r in self.records if phase.first < r["step"] <= phase.last)
    return sum(r.get(value) or 0 for r in inside if r["kind"] == kind)

  def compute_seconds(self, phase: Phase) -> float:
    """Returns the median seconds of a step within a phase."""
    found = sorted(self.step_times().items())
    inside = [pair for pair in found if phase.first <= pair[0] <= phase.last]
    steps, times = np.asarray(inside).T
    return float(np.median(np.diff(times) / np.diff(steps)))


def run(options, fields: dict, phases: list[Phase], network: netns.Network) -> Trace:
  """Trains once through all phases.

  Args:
    options: replicas, and timeout in seconds.
    fields: the fields of the config that differ from CONFIG.
    phases: the phases, in order.
    network: a star with a node for each replica.

  Raises:
    RuntimeError: a process failed, or the run took longer than `timeout`.
  """
  trace = Trace()
  network.limit(None)
  with tempfile.TemporaryDirectory(prefix="wan_") as folder:
    workdir = pathlib.Path(folder)
    processes = start(options, fields, network, workdir)
    stop = threading.Event()
    sampler = threading.Thread(target=sample, args=(options, network, trace, stop))
    sampler.start()
    try:
      follow(options, phases, network, processes, workdir, trace)
    finally:
      stop.set()
      sampler.join()
      sites_run.stop(processes)
  return trace


def start(options, fields: dict, network: netns.Network, workdir: pathlib.Path):
  """Starts one process per replica, with logs in workdir.

  The process of replica i is pinned to a core; the log is i.log.
  """
  cores, commands = sorted(os.sched_getaffinity(0)), list[list[str]]()
  flags = [f"--config.{name}={value}" for name, value in fields.items()]
  nodes = range(options.replicas)
  for i in nodes:
    command = sites_run.process(network, nodes, i, workdir, CONFIG, flags)
    commands.append(["taskset", "-c", str(cores[i % len(cores)]), *command])
  logs = [workdir / f"{i}.log" for i in range(len(commands))]
  # By default XLA makes one thread per core. A process has one core here, and an
  # exchange in the background would occupy its only thread.
  return [sites_run.start(c, log, PJRT_NPROC="4") for c, log in zip(commands, logs)]


def sample(
  options, network: netns.Network, trace: Trace, stop: threading.Event
) -> None:
  """Reads the counters of the replicas' links fifty times a second."""
  while not stop.wait(0.02):
    sent = np.mean([network.counters(i)[1] for i in range(options.replicas)])
    trace.samples.append((time.time(), float(sent)))


def follow(options, phases, network, processes, workdir, trace: Trace) -> None:
  """Reads metrics.jsonl as it grows, and sets the rate when a phase starts."""
  follower, step = metrics.Follower(workdir / "run"), 0
  deadline = time.time() + options.timeout
  waiting = list(phases)
  while step < phases[-1].last:
    failed = [i for i, p in enumerate(processes) if p.poll() is not None]
    if failed or time.time() > deadline:
      log = (workdir / f"{(failed or [0])[0]}.log").read_text()[-3000:]
      what = f"process {failed[0]} ended early" if failed else "the run took too long"
      raise RuntimeError(f"{what}, at step {step}:\n{log}")
    time.sleep(0.02)
    if (workdir / "run" / metrics.FILE).exists():
      trace.records += follower.records()
    steps = [r["step"] for r in trace.records if r["kind"] == "step"]
    step = max(steps, default=0)
    if waiting and step >= waiting[0].starts:
      network.limit(waiting.pop(0).rate)
      trace.changes.append(time.time())
