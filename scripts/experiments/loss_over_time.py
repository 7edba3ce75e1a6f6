"""Trains whole runs over limited links: held-out loss against wall-clock time.

  python scripts/experiments/loss_over_time.py --out=/tmp/time --rates=6,25

Two replicas train the small model of the ablations, with each of SETTINGS at each rate,
always on the same tokens. Each replica is a process with its own core and network
namespace (netns.py). Needs root, iproute2 and an idle machine. Writes
loss_over_time.csv, .md and .png, and keeps each setting's run at the last rate.

The times leave out evaluations and compilation: steps of the first quarter of a run
count with the mean time of later steps.
"""

import argparse
import pathlib
import shutil
import sys

import netns
import numpy as np
import pandas as pd
import sites_run
import wan_run
from sites_run import ROOT

from diloco.config.command_line import load_config
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.util import palette
from diloco.util.command import Parser, guarded, make_folder
from diloco.util.palette import COLORS, shades

# The small model of configs/ablations.py, and the settings of its best runs.
MODEL = {
  "model.num_layers": 6,
  "model.num_heads": 2,
  "model.dim": 32,
  "train.batch_size": 32,
  "train.steps": 450,
  "inner.learning_rate": 0.0221,
  "inner.warmup_steps": 45,
  "outer.optimizer": "sgd(momentum=0.5, nesterov=True)",
  "outer.learning_rate": 0.8,
  "data.shuffle_window": -1,
  "eval.every": 35,  # Evaluations come at different places of a round.
  "eval.tokens": 16_384,
  "eval.batch_size": 8,
}
PLAIN = "data-parallel"
SETTINGS = {
  PLAIN: {"algorithm": "data_parallel", "inner.learning_rate": 0.0312},
  "H = 5": {"sync_every": 5, "overlap.tau": 1},
  "H = 10": {"sync_every": 10, "overlap.tau": 1},
  "H = 10, tau = 5": {"sync_every": 10},
  "H = 20, tau = 2": {"sync_every": 20, "overlap.tau": 2},
  "H = 15, float32": {"sync_every": 15, "overlap.tau": 1, "wire.format": "fp32"},
  "H = 50, tau = 5, bf16": {"sync_every": 50, "wire.format": "bf16"},
}


def flags(name: str) -> list[str]:
  """Returns the flags that a setting adds to configs/wan.py."""
  return [f"--config.{k}={v}" for k, v in (MODEL | SETTINGS[name]).items()]


def run(options: argparse.Namespace, name: str, network: netns.Network) -> pathlib.Path:
  """Trains a setting to its end; returns the folder of the run.

  Raises:
    RuntimeError: a process failed.
  """
  workdir = options.out / name.replace(" ", "")
  shutil.rmtree(workdir, ignore_errors=True)
  workdir.mkdir()
  processes = wan_run.start(options, MODEL | SETTINGS[name], network, workdir)
  try:
    codes = [p.wait(timeout=3600) for p in processes]
  finally:
    sites_run.stop(processes)
  if any(codes):
    raise RuntimeError(f"{name}: {(workdir / '0.log').read_text()[-3000:]}")
  return workdir


def curve(records: list[dict], sync_every: int) -> list[tuple[int, float, float]]:
  """Returns (step, seconds of training, held-out loss) of each evaluation.

  Pauses for evaluations do not count: a step after an evaluation gets the mean time of
  the steps at the same place of other rounds. A step of the first quarter, in which JAX
  compiles, gets the mean time of later steps.
  """
  times = sorted((r["step"], r["time"]) for r in records if r["kind"] == "step")
  losses = {r["step"]: r["loss_outer"] for r in records if r["kind"] == "eval"}
  steps, when = np.array(times).T
  each = pd.Series(np.diff(when) / np.diff(steps))
  warm = steps[:-1] >= steps[-1] / 4
  each[~warm | np.isin(steps[:-1], list(losses))] = np.nan
  each = each.fillna(each.groupby(steps[:-1] % sync_every).transform("mean"))
  each = each.fillna(each[warm].mean())
  each[~warm] = np.average(each[warm], weights=np.diff(steps)[warm])
  clock = np.cumsum([steps[0] * each[0], *(each * np.diff(steps))])
  at = dict(zip(steps, clock))
  return [(step, float(at[step]), loss) for step, loss in sorted(losses.items())]


def table(rows: pd.DataFrame) -> str:
  """Formats a line for each run: its time and the last loss."""
  lines = ["| setting | Mbit/s | seconds | last loss |", "|---|--:|--:|--:|"]
  for (name, rate), own in rows.groupby(["setting", "rate_mbit_s"], sort=False):
    last = own.iloc[-1]
    lines.append(f"| {name} | {rate:g} | {last['seconds']:.1f} | {last['loss']:.3f} |")
  return "\n".join(lines)


def picture(rows: pd.DataFrame):
  """Draws a panel for each rate."""
  rates = sorted(rows["rate_mbit_s"].unique())
  names = [f"{rate:g} Mbit/s" for rate in rates]
  title, same = "Loss over time, two processes", {"sharex": True, "sharey": True}
  figure, panels = palette.panels(title, names, **same)
  shown = [name for name in SETTINGS if name in {*rows["setting"]}]
  streaming = [name for name in shown if name != PLAIN]
  colors = dict(zip(streaming, shades(COLORS["streaming"], len(streaming))))
  for panel, rate in zip(panels, rates):
    for name in shown:
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
  with netns.star(2, mtu=1500) as network:
    for rate in options.rates:
      network.limit(rate)
      for name in options.settings:
        c = load_config(str(ROOT / wan_run.CONFIG), flags(name))
        setting = {"setting": name, "rate_mbit_s": rate / 1e6}
        records = metrics.Follower(run(options, name, network) / "run").records()
        for step, seconds, loss in curve(list(records), c.sync_every):
          found.append(setting | {"step": step, "seconds": seconds, "loss": loss})
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
  add("--rates", type=rates, default=rates("6,25"), help="Mbit/s, with commas")
  add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
  return parser.parse_args(argv, argparse.Namespace(replicas=2))


if __name__ == "__main__":
  sys.exit(guarded(main, parse(), mistakes=ConfigError))
