"""Measures compute utilisation of real training over slow links: table and picture.

  python scripts/experiments/wan_bench.py --out=/tmp/wan

Each replica has one network namespace and one process (netns.py), and a core of its
own if there are enough cores. Each method is one run of `diloco.main` with
configs/wan.py, during which the rate of the links falls step by step. A measurement
begins some steps after a change of the rate and covers whole rounds. Bytes are those of
the interfaces' counters, headers included. Needs root and iproute2. Writes wan.csv,
wan.md and wan.png; keeps earlier rows of other methods in --out.

Utilisation is compute time over wall time. The compute time of a step is the median of
the measured steps; most steps exchange nothing. In data-parallel every step exchanges
gradients, so its rows use DiLoCo's compute time at the same rate: DiLoCo does the same
computation.
"""

import itertools
import pathlib
import runpy
import sys

import netns
import numpy as np
import pandas as pd
from sites_run import ROOT
from wan_run import CONFIG, Phase, Trace, run

from diloco.config import Config, resolve
from diloco.errors import ConfigError
from diloco.simulate import from_config
from diloco.simulate import utilisation as simulate_lib
from diloco.util import palette
from diloco.util.command import Parser, guarded, make_folder
from diloco.util.palette import COLORS, shades
from diloco.wire.ledger import gradient_bytes

# DiLoCo is before data-parallel, which uses DiLoCo's compute time.
METHODS = {
  "DiLoCo": {"algorithm": "diloco"},
  "data-parallel": {"algorithm": "data_parallel", "log.every": 1},
  "Streaming": {"overlap.tau": 0, "wire.format": "fp32"},
  "Streaming, overlap": {"wire.format": "fp32"},
  "Streaming, overlap, FP4": {"wire.format": "e3m0"},
}
# Each curve has the colour of its algorithm; Streaming's variants have shades of it.
CURVES = {"data-parallel": COLORS["data_parallel"], "DiLoCo": COLORS["diloco"]}
CURVES |= dict(zip([*METHODS][2:], shades(COLORS["streaming"], 3)))
# The log lags behind, so a measurement begins this many steps after a change of rate.
SETTLE = 20


def fields(options, method: str, steps: int = 1000) -> dict:
  """Returns the fields in which a method's config differs from configs/wan.py."""
  m = options.replicas
  shared = {"replicas": m, "train.batch_size": 2 * m, "eval.batch_size": 2 * m}
  return {**shared, "train.steps": steps, **METHODS[method]}


def resolved(options, method: str) -> Config:
  """Resolves the config of a method."""
  c = runpy.run_path(str(ROOT / CONFIG))["get_config"]()
  c.update_from_flattened_dict(fields(options, method))
  return resolve(c)


def plan(options, method: str, compute_s: float) -> list[Phase]:
  """Plans the phases of a method's run, fastest rate first.

  A measurement begins and ends between two sends, when nothing is on the links. At slow
  rates a step of data-parallel takes many seconds, so fewer steps are measured, and
  rates at which a step takes too long are left out.
  """
  c = resolved(options, method)
  rates = sorted(options.rates, reverse=True)
  phases: list[Phase] = []
  if method == "data-parallel":
    # JAX compiles during the first steps.
    at, bits = 5, gradient_bytes(c) * 8
    for rate in rates:
      seconds = bits / rate + compute_s
      if seconds <= options.longest_step:
        first = at + 3
        last = first + int(np.clip(options.seconds / seconds, 2, 40))
        phases.append(Phase(rate, at, first, last))
        at = last
    return phases
  schedule = c.make_schedule()
  gap = c.sync_every // schedule.num_fragments
  # In the second round every fragment is sent for the first time: programs compile.
  # Half-way between two sends nothing is on the links or in the sockets' buffers.
  at = 2 * c.sync_every + gap // 2
  for rate in [rate for rate in rates for _ in range(options.repeats)]:
    first = at + SETTLE
    last = first + c.sync_every * options.rounds
    phases.append(Phase(rate, at, first, last))
    at = last + (at - last) % gap
  return phases


def predicted(c, compute_s: float, rate: float) -> float:
  """Simulates the utilisation."""
  work = from_config.workload(c, compute_s)
  return float(simulate_lib.utilisation(work, [rate], 10 * c.sync_every)[0])


def row(c, method: str, phase: Phase, set_at: float, trace: Trace, compute_s: float):
  """Makes a row of the table.

  Args:
    method: name of the method.
    set_at: when the phase's rate was set.
    compute_s: compute time of a step.

  Raises:
    RuntimeError: a measured exchange may have begun before the rate was set.
  """
  times, steps = trace.step_times(), phase.last - phase.first
  begin, end = times[phase.first], times[phase.last]
  # Nothing is exchanged before the next send, so until then the rate may be set.
  sends = [r["step"] for r in trace.records if r["kind"] == "send"]
  quiet_until = min((t for t in sends if t > phase.first), default=phase.first + 1)
  needed = max(when for t, when in times.items() if t < quiet_until)
  if set_at > needed:
    raise RuntimeError(
      f"{method} at {phase.rate / 1e6:g} Mbit/s: the rate was set {set_at - needed:.1f}"
      " s too late; run again on an idle machine."
    )
  wall = end - begin
  booked = gradient_bytes(c)
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


def measure(options, method: str, network: netns.Network, rows: list[dict]):
  """Measures a method; prints and returns its rows.

  Args:
    method: name of the method.
    network: a star with a node for each replica.
    rows: the rows of other methods; data-parallel uses DiLoCo's compute times.

  Raises:
    RuntimeError: data-parallel finds no row of DiLoCo at a rate.
  """
  c, diloco = resolved(options, method), rows_of(rows, "DiLoCo")
  parallel = c.one_model
  compute = {r["rate_mbit_s"] * 1e6: r["compute_s_per_step"] for r in diloco}
  if parallel and not {*options.rates} <= {*compute}:
    raise RuntimeError(
      "data-parallel needs DiLoCo at the same rates; measure it first."
    )
  phases = plan(options, method, max(compute.values(), default=0))
  if not phases:
    print(f"{method}: no step ends within --longest_step at these --rates")
    return []
  trace = run(options, fields(options, method, phases[-1].last + 5), phases, network)
  found: list[dict] = []
  for phase, set_at in zip(phases, trace.changes):
    seconds = compute[phase.rate] if parallel else trace.compute_seconds(phase)
    try:
      found.append(row(c, method, phase, set_at, trace, seconds))
      print(line(found[-1:]), flush=True)
    except RuntimeError as error:
      print(f"left out: {error}", file=sys.stderr)
  return found


def rows_of(rows: list[dict], method: str) -> list[dict]:
  """Returns the rows of one method."""
  return [r for r in rows if r["method"] == method]


def load(options) -> list[dict]:
  """Reads the rows of other methods that earlier calls have written to --out."""
  path = options.out / "wan.csv"
  if not path.exists():
    return []
  rows = pd.read_csv(path).to_dict("records")
  return [r for r in rows if r["method"] not in options.methods]


def save(options, rows: list[dict]) -> None:
  """Writes the table as CSV and as markdown, and the picture."""
  path = options.out / "wan.csv"
  pd.DataFrame(rows).to_csv(path, index=False, float_format="%.6g")
  (options.out / "wan.md").write_text(table(rows))
  palette.save(lambda: picture(options, rows), options.out / "wan.png")


HEADER = (
  "| method | Mbit/s | utilisation | simulated | tokens/s | bytes/step | counters"
  " / ledger | fewer bytes than data-parallel |\n|---|--:|--:|--:|--:|--:|--:|--:|"
)


def line(rows: list[dict], reference: float | None = None) -> str:
  """Formats a line of the table as markdown: medians, and the range of utilisation.

  Args:
    rows: from the function `row`, of one method at one rate.
    reference: bytes per step of data-parallel; None: the last cell is empty.
  """
  found = {k: np.median([r[k] for r in rows]) for k in rows[0] if k != "method"}
  shares = [r["utilisation"] for r in rows]
  spread = f" ({min(shares):.1%} to {max(shares):.1%})" if len(rows) > 1 else ""
  fewer = f"{reference / found['bytes_per_step']:.0f}x" if reference else ""
  return (
    f"| {rows[0]['method']} | {found['rate_mbit_s']:g} | {found['utilisation']:.1%}"
    f"{spread} | {found['predicted']:.1%} | {found['tokens_per_s']:,.0f}"
    f" | {found['bytes_per_step']:,.0f} | {found['counters_to_ledger']:.3f} | {fewer} |"
  )


def table(rows: list[dict]) -> str:
  """Formats all rows as markdown, sorted by rate."""
  parallel = [r["bytes_per_step"] for r in rows_of(rows, "data-parallel")]
  reference = float(np.median(parallel)) if parallel else None
  order = [*METHODS]
  key = lambda r: (r["rate_mbit_s"], order.index(r["method"]))
  groups = [[*group] for _, group in itertools.groupby(sorted(rows, key=key), key)]
  return "\n".join([HEADER, *(line(group, reference) for group in groups)]) + "\n"


def picture(options, rows: list[dict]):
  """Draws measured utilisation against bandwidth, like figure 4 of 2501.18512.

  A point is the median of the measurements at a rate; a bar is their range.
  """
  found = {r["method"] for r in rows}
  h = resolved(options, "DiLoCo").sync_every
  title = f"Measured utilisation: {options.replicas} processes, H = {h}"
  figure, (axes,) = palette.panels(title, height=3.6)
  figure.set_figwidth(palette.PAGE)
  for method, color in CURVES.items():
    if method not in found:
      continue
    own = pd.DataFrame(rows_of(rows, method))
    shares = own.groupby("rate_mbit_s")["utilisation"].agg(["median", "min", "max"])
    axes.plot(shares.index, shares["median"], "o-", color=color, label=method)
    axes.vlines(shares.index, shares["min"], shares["max"], color=color)
    c, seconds = resolved(options, method), own["compute_s_per_step"].median()
    grid = np.geomspace(min(options.rates), max(options.rates), 60)
    simulated = [predicted(c, seconds, rate) for rate in grid]
    axes.plot(grid / 1e6, simulated, ":", color=color)
  axes.plot([], [], ":", color="grey", label="simulated")
  axes.set(xscale="log", xlabel="rate of every link (Mbit/s)")
  axes.set(ylim=(-0.03, 1.05), ylabel="compute utilisation (share)")
  rates = sorted({r["rate_mbit_s"] for r in rows})
  axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
  axes.minorticks_off()
  return palette.legend(figure, "Points: median. Bars: least and greatest measurement.")


def parse(argv=None):
  """Parses the command line."""
  parser = Parser(description=__doc__)
  add = parser.add_argument
  add("--out", type=pathlib.Path, required=True, help="folder for the results")
  add("--replicas", type=int, default=2, help="number of replicas")
  rates = lambda text: [1e6 * float(x) for x in text.split(",")]
  text = "comma-separated, in Mbit/s"
  add("--rates", type=rates, default=rates("4,16,64,256,1000"), help=text)
  add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
  add("--repeats", type=int, default=1, help="measurements for each rate")
  add("--rounds", type=int, default=1, help="rounds of H steps for each rate")
  add("--seconds", type=float, default=8, help="aim for a data-parallel row")
  text = "seconds; data-parallel is not run at rates at which a step takes longer"
  add("--longest_step", type=float, default=20, help=text)
  add("--timeout", type=float, default=900, help="seconds for each method")
  options = parser.parse_args(argv)
  # Runs DiLoCo first, as in METHODS, because data-parallel uses its compute time.
  options.methods = [m for m in METHODS if m in options.methods]
  return options


def main(options) -> None:
  netns.prepare()
  make_folder(options.out, "--out")
  rows = load(options)
  print(HEADER)
  with netns.star(options.replicas) as network:
    for method in options.methods:
      rows += measure(options, method, network, rows)
      save(options, rows)
  print(f"\n{table(rows)}\n{options.out}/wan.csv, wan.md, wan.png")


if __name__ == "__main__":
  sys.exit(guarded(main, parse(), mistakes=ConfigError))
