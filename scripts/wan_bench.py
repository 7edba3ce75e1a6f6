"""Compute utilisation of real training over a real, slow interface: a table, a picture.

  python scripts/wan_bench.py --out=/tmp/wan

One network namespace and one process per replica (scripts/netns.py), each on a core of
its own if there are enough. Each method is one run of `diloco.main` with configs/wan.py
in which the rate of the links is lowered from one setting to the next. What is measured
begins some steps after the change and ends a whole number of rounds later. Bytes are
those of the interfaces' counters, headers included. Needs root and iproute2. Writes
wan.csv, wan.md and wan.png.

Utilisation is compute time over wall time. A step's compute time is the median over
the steps of the same run, most of which exchange nothing; data-parallel has no such
steps and takes that of DiLoCo's run, which computes the same.
"""

import argparse
import csv
import dataclasses
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time

import netns
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = "configs/wan.py"
sys.path.insert(0, str(ROOT))

from diloco import config as config_lib  # noqa: E402
from diloco.simulate import own  # noqa: E402
from diloco.simulate import utilisation as simulate_lib  # noqa: E402
from diloco.wire import ledger as ledger_lib  # noqa: E402

# In this order: data-parallel takes the compute time of the run before it.
METHODS = {
  "DiLoCo": {"algorithm": "diloco"},
  "data-parallel": {"algorithm": "data_parallel", "log.every": 1},
  "Streaming": {"overlap.tau": 0, "wire.format": "fp32"},
  "Streaming, overlap": {"overlap.transport": "host", "wire.format": "fp32"},
  "Streaming, overlap, FP4": {"overlap.transport": "host", "wire.format": "e3m0"},
}
# Bits on the wire per value of data-parallel's gradient: XLA's CPU backend widens a
# 16-bit all-reduce to 32 bits. The ledger and the papers count 16.
GRADIENT_BITS = 32


@dataclasses.dataclass(frozen=True)
class Phase:
  """A rate in bits per second, measured over the steps first + 1 .. last of a run.

  It is set once step `starts` is seen in the log, which is some steps late.
  """

  rate: float
  starts: int
  first: int
  last: int


@dataclasses.dataclass
class Trace:
  """What was seen of a run.

  Attributes:
    records: lines of metrics.jsonl.
    samples: (seconds since the epoch, mean bytes sent by a node), in order of time.
    changes: when each phase's rate was set.
  """

  records: list[dict] = dataclasses.field(default_factory=list)
  samples: list[tuple[float, float]] = dataclasses.field(default_factory=list)
  changes: list[float] = dataclasses.field(default_factory=list)

  def step_times(self) -> dict[int, float]:
    """{step: when it was finished}."""
    return {r["step"]: r["time"] for r in self.records if r["kind"] == "step"}

  def sent(self, when: float) -> float:
    """Bytes that a node had sent by then."""
    return float(np.interp(when, *zip(*self.samples)))

  def total(self, kind: str, value: str, phase: Phase) -> float:
    """Sum of a value over the lines of a kind within a phase."""
    inside = (r for r in self.records if phase.first < r["step"] <= phase.last)
    return sum(r.get(value) or 0 for r in inside if r["kind"] == kind)

  def compute_seconds(self) -> float:
    """Median seconds of a step; the first line of all is left out, it compiles."""
    steps, times = np.asarray(sorted(self.step_times().items())[1:]).T
    return float(np.median(np.diff(times) / np.diff(steps)))


def fields(options, method: str, steps: int = 1000) -> dict:
  """What a method's config differs in from configs/wan.py."""
  m = options.replicas
  shared = {"replicas": m, "train.batch_size": 2 * m, "eval.batch_size": 2 * m}
  return {**shared, "train.steps": steps, **METHODS[method]}


def resolved(options, method: str):
  """The resolved config of a method."""
  c = runpy.run_path(str(ROOT / CONFIG))["get_config"]()
  c.update_from_flattened_dict(fields(options, method))
  return config_lib.resolve(c)


def plan(options, method: str, compute_s: float | None) -> list[Phase]:
  """The phases of a method's run, fastest rate first.

  Rounds begin and end half-way between two sends, where nothing is under way unless
  the link is too slow. A step of data-parallel at a slow rate takes many seconds: it
  is measured over few, and rates at which it takes too long are left out.
  """
  c = resolved(options, method)
  rates = sorted(options.rates, reverse=True)
  phases: list[Phase] = []
  if method == "data-parallel":
    # The first steps compile.
    at, bits = 5, all_reduce(c) * 8
    for rate in rates:
      seconds = bits / rate + (compute_s or 0.1)
      if seconds <= options.longest_step:
        first = at + 4
        last = first + int(np.clip(options.seconds / seconds, 2, 40))
        phases.append(Phase(rate, at, first, last))
        at = last
    return phases
  schedule = config_lib.make_schedule(c)
  gap = c.sync_every // schedule.num_fragments
  # In the second round every fragment is sent for the first time, which compiles.
  at = 2 * c.sync_every - gap + gap // 2
  for rate in rates:
    # One gap of the schedule to settle.
    first = at + gap
    last = first + c.sync_every * options.rounds
    phases.append(Phase(rate, at, first, last))
    at = last
  return phases


def run(options, method: str, phases: list[Phase], network: netns.Network) -> Trace:
  """Trains once through all phases.

  Raises:
    RuntimeError: a process failed, or the run took longer than allowed.
  """
  trace = Trace()
  network.limit(None)
  with tempfile.TemporaryDirectory(prefix="wan_") as folder:
    workdir = pathlib.Path(folder)
    processes = start(
      options, fields(options, method, phases[-1].last + 5), network, workdir
    )
    stop = threading.Event()
    sampler = threading.Thread(target=sample, args=(network, trace, stop))
    sampler.start()
    try:
      follow(options, phases, network, processes, workdir, trace)
    finally:
      stop.set()
      sampler.join()
      for process in processes:
        process.kill()
        process.wait()
  return trace


def start(options, fields: dict, network: netns.Network, workdir: pathlib.Path):
  """One process per node, each with a log in workdir."""
  cores = sorted(os.sched_getaffinity(0))
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
  processes = []
  for i in range(options.replicas):
    argv = [
      *("taskset", "-c", str(cores[i % len(cores)])),
      *(sys.executable, "-m", "diloco.main", f"--config={CONFIG}"),
      *(f"--config.{name}={value}" for name, value in fields.items()),
      *(f"--workdir={workdir}/run", f"--coordinator={network.addresses[0]}:7777"),
      *(f"--num_processes={options.replicas}", f"--process_id={i}"),
    ]
    with (workdir / f"{i}.log").open("w") as log:
      processes.append(
        subprocess.Popen(
          network.command(i, argv), env=env, cwd=ROOT, stdout=log, stderr=log
        )
      )
  return processes


def sample(network: netns.Network, trace: Trace, stop: threading.Event) -> None:
  """Reads the counters fifty times a second."""
  nodes = range(len(network.names))
  while not stop.wait(0.02):
    sent = np.mean([network.counters(i)[1] for i in nodes])
    trace.samples.append((time.time(), float(sent)))


def follow(options, phases, network, processes, workdir, trace: Trace) -> None:
  """Reads metrics.jsonl as it grows, and sets the rate when a phase starts."""
  path, position, step = workdir / "run/metrics.jsonl", 0, 0
  deadline = time.time() + options.timeout
  waiting = list(phases)
  while step < phases[-1].last:
    failed = [i for i, p in enumerate(processes) if p.poll() is not None]
    if failed or time.time() > deadline:
      log = (workdir / f"{(failed or [0])[0]}.log").read_text()[-3000:]
      what = f"process {failed[0]} ended early" if failed else "the run took too long"
      raise RuntimeError(f"{what}, at step {step}:\n{log}")
    time.sleep(0.02)
    if path.exists():
      with path.open() as file:
        file.seek(position)
        for line in iter(file.readline, ""):
          if not line.endswith("\n"):
            break
          position = file.tell()
          trace.records.append(json.loads(line))
    steps = [r["step"] for r in trace.records if r["kind"] == "step"]
    step = max(steps, default=0)
    if waiting and step >= waiting[0].starts:
      network.limit(waiting.pop(0).rate)
      trace.changes.append(time.time())


def all_reduce(c) -> float:
  """Bytes that one worker of data-parallel sends in a step."""
  size = GRADIENT_BITS / 8 * config_lib.num_params(c)
  return ledger_lib.all_reduce_bytes(c.replicas, size)


def predicted(c, compute_s: float, rate: float) -> float:
  """The simulator's utilisation."""
  work = own.workload(c, compute_s)
  if c.algorithm == "data_parallel":
    work = dataclasses.replace(work, bits=GRADIENT_BITS)
  rounds = simulate_lib.Assumptions(steps=10 * c.sync_every)
  return float(simulate_lib.utilisation(work, [rate], rounds)[0])


def row(c, method: str, phase: Phase, set_at: float, trace: Trace, compute_s: float):
  """One line of the table.

  Args:
    c: resolved config.
    method: its name.
    phase: what was measured.
    set_at: when the phase's rate was set.
    trace: of the run.
    compute_s: compute time of a step.

  Raises:
    RuntimeError: the rate was set too late for what was to be measured.
  """
  times, steps = trace.step_times(), phase.last - phase.first
  begin, end = times[phase.first], times[phase.last]
  if set_at > begin:
    raise RuntimeError(
      f"{method} at {phase.rate / 1e6:g} Mbit/s: the rate was set {set_at - begin:.1f}"
      " s after the measurement began; run again on a machine with less to do."
    )
  wall = end - begin
  booked = all_reduce(c)
  if c.algorithm != "data_parallel":
    booked = trace.total("send", "bytes", phase) / steps
  sent = (trace.sent(end) - trace.sent(begin)) / steps
  return {
    "method": method,
    "replicas": c.replicas,
    "rate_mbit_s": phase.rate / 1e6,
    "steps": steps,
    "wall_s": wall,
    "compute_s_per_step": compute_s,
    "utilisation": steps * compute_s / wall,
    "predicted": predicted(c, compute_s, phase.rate),
    "waited_s": trace.total("receive", "waited_s", phase),
    "tokens_per_s": steps * c.train.batch_size * c.model.seq_len / wall,
    "bytes_per_step": sent,
    "ledger_bytes_per_step": booked,
    "counters_to_ledger": sent / booked,
  }


def measure(options, network: netns.Network) -> list[dict]:
  """All rows, method by method; prints each as it comes."""
  rows, compute_s = [], None
  for method in options.methods:
    c = resolved(options, method)
    phases = plan(options, method, compute_s)
    trace = run(options, method, phases, network)
    if c.algorithm != "data_parallel":
      compute_s = trace.compute_seconds()
    assert compute_s is not None
    for phase, set_at in zip(phases, trace.changes):
      rows.append(row(c, method, phase, set_at, trace, compute_s))
      print(line(rows[-1]), flush=True)
  return rows


HEADER = (
  "| method | Mbit/s | utilisation | simulated | tokens/s | bytes/step | counters"
  " / ledger | fewer bytes than data-parallel |\n|---|--:|--:|--:|--:|--:|--:|--:|"
)


def line(row: dict, reference: float | None = None) -> str:
  """A row of the table in markdown.

  Args:
    row: see `row`.
    reference: bytes per step of data-parallel.
  """
  fewer = f"{reference / row['bytes_per_step']:.0f}x" if reference else ""
  return (
    f"| {row['method']} | {row['rate_mbit_s']:g} | {row['utilisation']:.1%}"
    f" | {row['predicted']:.1%} | {row['tokens_per_s']:,.0f}"
    f" | {row['bytes_per_step']:,.0f} | {row['counters_to_ledger']:.3f} | {fewer} |"
  )


def table(rows: list[dict]) -> str:
  """All rows in markdown, by rate."""
  parallel = [r["bytes_per_step"] for r in rows if r["method"] == "data-parallel"]
  reference = float(np.median(parallel)) if parallel else None
  ordered = sorted(rows, key=lambda r: r["rate_mbit_s"])
  return "\n".join([HEADER, *(line(r, reference) for r in ordered)]) + "\n"


def picture(options, rows: list[dict], path: pathlib.Path) -> None:
  """Utilisation against bandwidth, as in 2501.18512, figure 4, but measured."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
  for i, method in enumerate(dict.fromkeys(r["method"] for r in rows)):
    own_rows = [r for r in rows if r["method"] == method]
    x = [r["rate_mbit_s"] for r in own_rows]
    color = f"C{i}"
    axes.plot(x, [r["utilisation"] for r in own_rows], "o-", color=color, label=method)
    c, seconds = resolved(options, method), own_rows[0]["compute_s_per_step"]
    grid = np.geomspace(min(options.rates), max(options.rates), 60)
    simulated = [predicted(c, seconds, rate) for rate in grid]
    axes.plot(grid / 1e6, simulated, ":", color=color, lw=1)
  axes.plot([], [], ":", color="grey", label="simulated")
  axes.set(
    xscale="log",
    ylim=(0, 1.05),
    xlabel="rate of every link (Mbit/s)",
    ylabel="compute utilisation",
    title=f"Measured: {options.replicas} processes, H = {c.sync_every}",
  )
  axes.grid(alpha=0.3)
  axes.legend(fontsize=8)
  figure.savefig(path, dpi=150)


def parse(argv=None):
  """Options of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--out", type=pathlib.Path, required=True, help="folder for the results")
  add("--replicas", type=int, default=2, help="M")
  add(
    "--rates",
    type=lambda text: [1e6 * float(x) for x in text.split(",")],
    default=[2e6, 8e6, 32e6, 128e6, 512e6],
    help="comma-separated, in Mbit/s",
  )
  add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
  add("--rounds", type=int, default=1, help="rounds of H steps for each rate")
  add("--seconds", type=float, default=15, help="for each rate of data-parallel")
  add(
    "--longest_step",
    type=float,
    default=20,
    help="seconds; data-parallel is not run at rates at which a step takes longer",
  )
  add("--timeout", type=float, default=900, help="seconds for each method")
  options = parser.parse_args(argv)
  options.methods = [m for m in METHODS if m in options.methods]
  if "data-parallel" in options.methods and "DiLoCo" not in options.methods:
    parser.error("--methods: data-parallel takes DiLoCo's compute time; add DiLoCo")
  return options


def main() -> None:
  options = parse()
  # So that processes and namespaces are removed.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  reason = netns.missing()
  if reason:
    sys.exit(f"error: {reason}.")
  options.out.mkdir(parents=True, exist_ok=True)
  print(HEADER)
  with netns.star(options.replicas) as network:
    rows = measure(options, network)
  with (options.out / "wan.csv").open("w", newline="") as file:
    writer = csv.DictWriter(file, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
  (options.out / "wan.md").write_text(table(rows))
  picture(options, rows, options.out / "wan.png")
  print(f"\n{table(rows)}\n{options.out}/wan.csv, wan.md, wan.png")


if __name__ == "__main__":
  main()
