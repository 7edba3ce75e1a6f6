"""Trains whole runs over limited links: held-out loss against wall-clock time.

  python scripts/experiments/loss_over_time.py --out=/tmp/time --rates=4,16

Two replicas, each a process on a core of its own in a network namespace (netns.py),
train the small model of the ablations on the same tokens, with each of SETTINGS at each
rate. A setting without limit gives the compute time of a step. Beside the measured time
of every run is that of `python -m diloco plan` for this compute time. Needs root,
iproute2 and an idle machine. Writes loss_over_time.csv, .md and .png.

Evaluations do not count, nor what compiles: the first quarter of a run counts as long
as its steps take later.
"""

import argparse
import dataclasses
import pathlib
import runpy
import sys
import tempfile

import netns
import numpy as np
import pandas as pd
import sites_run
import wan_run
from sites_run import ROOT

from diloco.config import Config, resolve
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.simulate import from_config
from diloco.simulate.steady import steady_utilisation
from diloco.util import palette
from diloco.util.command import Parser, guarded, make_folder
from diloco.util.palette import COLORS, shades

# The small model of configs/ablations.py, and the settings of its best runs.
MODEL = {
  "model.num_layers": 6,
  "model.num_heads": 2,
  "model.dim": 32,
  "train.batch_size": 8,
  "inner.warmup_steps": 180,
  "outer.optimizer": "sgd(momentum=0.5, nesterov=True)",
  "outer.learning_rate": 0.8,
  "data.shuffle_window": -1,
  "eval.tokens": 16_384,
  "eval.batch_size": 8,
}
PLAIN = "data-parallel"
SETTINGS = {
  PLAIN: {"algorithm": "data_parallel", "inner.learning_rate": 0.0312},
  "H = 10": {"sync_every": 10, "overlap.tau": 1},
  "H = 30": {"sync_every": 30, "overlap.tau": 1},
  "H = 30, float32": {"sync_every": 30, "overlap.tau": 5, "wire.format": "fp32"},
  "H = 100, float32": {"sync_every": 100, "overlap.tau": 1, "wire.format": "fp32"},
}
RATE = {"inner.learning_rate": 0.0221}  # Of streaming.


def fields(options: argparse.Namespace, name: str) -> dict:
  """Returns the fields in which a setting differs from configs/wan.py."""
  every = {"train.steps": options.steps, "eval.every": options.steps // 12}
  return MODEL | every | RATE | SETTINGS[name]


def resolved(options: argparse.Namespace, name: str) -> Config:
  c = runpy.run_path(str(ROOT / wan_run.CONFIG))["get_config"]()
  c.update_from_flattened_dict(fields(options, name))
  return resolve(c)


def train(
  options: argparse.Namespace, name: str, network: netns.Network, rate: float | None
) -> list[dict]:
  """Trains a setting to its end; returns the lines of its metrics.jsonl.

  Args:
    rate: bits per second of every link; None: no limit.

  Raises:
    RuntimeError: a process failed.
  """
  with tempfile.TemporaryDirectory(prefix="time_") as folder:
    workdir = pathlib.Path(folder)
    network.limit(rate)
    processes = wan_run.start(options, fields(options, name), network, workdir)
    try:
      codes = [p.wait(timeout=options.timeout) for p in processes]
    finally:
      sites_run.stop(processes)
    if any(codes):
      raise RuntimeError(f"{name}: {(workdir / '0.log').read_text()[-3000:]}")
    return list(metrics.Follower(workdir / "run").records())


def curve(records: list[dict]) -> list[tuple[int, float, float]]:
  """Returns (step, seconds of training, held-out loss).

  Pauses for evaluations do not count: after one, the time of the logged steps is the
  median of all. The first quarter, in which JAX compiles, counts as long as its steps
  take later on average.
  """
  times = sorted((r["step"], r["time"]) for r in records if r["kind"] == "step")
  losses = {r["step"]: r["loss_outer"] for r in records if r["kind"] == "eval"}
  steps, when = np.array(times).T
  each = np.diff(when) / np.diff(steps)
  pauses = np.isin(steps[:-1], list(losses))
  each = np.where(pauses, np.median(each), each)
  warm = steps[:-1] >= steps[-1] / 4
  mean = np.average(each[warm], weights=np.diff(steps)[warm])
  each = np.where(warm, each, mean)
  clock = np.cumsum([steps[0] * mean, *(each * np.diff(steps))])
  at = dict(zip(steps, clock))
  return [(step, float(at[step]), loss) for step, loss in sorted(losses.items())]


def compute_seconds(records: list[dict]) -> float:
  """Returns the median seconds of a step."""
  times = sorted((r["step"], r["time"]) for r in records if r["kind"] == "step")
  steps, seconds = np.array(times[len(times) // 5 :]).T
  return float(np.median(np.diff(seconds) / np.diff(steps)))


def predicted(c: Config, compute_s: float, rate: float) -> float:
  """Returns the seconds of the whole run, as the planner computes them."""
  # Gloo's all-reduce reaches the rate of slow links, its all-gather does not
  # (docs/measured.md).
  link = "ideal" if c.one_model else "gloo"
  work = dataclasses.replace(from_config.workload(c, compute_s), link=link)
  return c.train.steps * compute_s / float(steady_utilisation(work, [rate])[0])


def table(rows: pd.DataFrame) -> str:
  """Formats a line for each run: its time, that of the plan, and the last loss."""
  lines = ["| setting | Mbit/s | seconds | planned | difference | last loss |"]
  lines += ["|---|--:|--:|--:|--:|--:|"]
  for (name, rate), own in rows.groupby(["setting", "rate_mbit_s"], sort=False):
    last = own.iloc[-1]
    apart = last["seconds"] / last["planned_s"] - 1
    lines.append(
      f"| {name} | {rate:g} | {last['seconds']:.1f} | {last['planned_s']:.1f}"
      f" | {apart:+.1%} | {last['loss']:.3f} |"
    )
  return "\n".join(lines)


def picture(rows: pd.DataFrame):
  """Draws a panel for each rate."""
  rates = sorted(rows["rate_mbit_s"].unique())
  names = [f"{rate:g} Mbit/s" for rate in rates]
  title, same = "Loss over time, two processes", {"sharex": True, "sharey": True}
  figure, panels = palette.panels(title, names, **same)
  streaming = [name for name in SETTINGS if name != PLAIN]
  colors = dict(zip(streaming, shades(COLORS["streaming"], len(streaming))))
  for panel, rate in zip(panels, rates):
    for name in SETTINGS:
      own = rows[(rows["rate_mbit_s"] == rate) & (rows["setting"] == name)]
      color = colors.get(name, COLORS["data_parallel"])
      panel.plot(own["seconds"], own["loss"], ".-", color=color, label=name)
    panel.set(xscale="log", xlabel="wall-clock time (s)")
  panels[0].set(ylabel="held-out loss (nats/token)")
  return palette.legend(figure)


def main(options: argparse.Namespace) -> None:
  netns.prepare()
  make_folder(options.out, "--out")
  found = list[dict]()
  with netns.star(2) as network:
    compute_s = compute_seconds(train(options, "H = 30", network, None))
    print(f"a step computes for {1e3 * compute_s:.2f} ms")
    for rate in options.rates:
      for name in options.settings:
        planned = predicted(resolved(options, name), compute_s, rate)
        if planned > options.longest:
          print(f"{name} at {rate / 1e6:g} Mbit/s would take {planned:.0f} s: left out")
          continue
        run = {"setting": name, "rate_mbit_s": rate / 1e6, "planned_s": planned}
        for step, seconds, loss in curve(train(options, name, network, rate)):
          found.append(run | {"step": step, "seconds": seconds, "loss": loss})
        rows = pd.DataFrame(found)
        rows.to_csv(options.out / "loss_over_time.csv", index=False)
        print(table(rows).splitlines()[-1], flush=True)
  (options.out / "loss_over_time.md").write_text(table(rows) + "\n")
  palette.save(lambda: picture(rows), options.out / "loss_over_time.png")


def parse(argv=None) -> argparse.Namespace:
  parser = Parser(description=__doc__)
  add = parser.add_argument
  add("--out", type=pathlib.Path, required=True, help="folder for the results")
  rates = lambda text: [1e6 * float(x) for x in text.split(",")]
  add("--rates", type=rates, default=rates("4,16"), help="Mbit/s, with commas")
  add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
  add("--steps", type=int, default=1800)
  add("--longest", type=float, default=900, help="seconds of a run; else left out")
  add("--timeout", type=float, default=1800, help="seconds for each run")
  return parser.parse_args(argv, argparse.Namespace(replicas=2, transport="host"))


if __name__ == "__main__":
  sys.exit(guarded(main, parse(), mistakes=ConfigError))
