"""Draws the papers' simulated figures.

Names that begin with s are figures of Streaming DiLoCo (2501.18512), names that begin
with c are figures of Scaling Laws (2503.09799).
"""

import pathlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from diloco.simulate import limits
from diloco.simulate.failures import Row, show_time
from diloco.simulate.steady import steady_utilisation
from diloco.simulate.tables import GRID, TABLE_6, papers_workload
from diloco.simulate.utilisation import Node, Workload, utilisation
from diloco.simulate.wallclock import NETWORKS, Training, total_time

COLORS = {
  "forward": "#7aa6d8",
  "backward_activations": "#b7d99c",
  "backward_parameters": "#5e9e4a",
  "reduction": "#8d6bb8",
}
Settings = dict[str, dict[str, Any]]  # {label: fields of Workload or Training}.
METHODS: Settings = {
  "data-parallel": {"method": "data_parallel"},
  "DiLoCo": {"method": "diloco"},
  "Streaming": {"method": "streaming"},
  "+ overlap": {"method": "streaming", "tau": 1},
  "+ overlap, FP4": {"method": "streaming", "tau": 1, "bits": 4},
}
LABELS = {
  "data_parallel": "data-parallel, all restart",
  "restart_all": "DiLoCo, all restart",
  "all_wait": "DiLoCo, all wait",
  "quorum": "quorum rounds",
}
Model = tuple[float, int, float]  # Parameters, layers, seconds per step.
MODEL_100B = (100e9, 108, 4.9)


def draw(name: str, folder: pathlib.Path) -> list[pathlib.Path]:
  """Draws one of FIGURES as PNG and SVG; returns the paths.

  Raises:
    ValueError: there is no such figure.
  """
  limits.check("figure", name, FIGURES)
  return save(FIGURES[name](), name, folder)


def save(figure: Figure, name: str, folder: pathlib.Path) -> list[pathlib.Path]:
  """Saves a figure as PNG and SVG; returns the paths."""
  paths = [folder / f"simulated_{name}.{kind}" for kind in ("png", "svg")]
  for path in paths:
    figure.savefig(path, dpi=110)
  return paths


def draw_failures(rows: list[Row], folder: pathlib.Path) -> list[pathlib.Path]:
  """Draws goodput over chips, a panel per mean time between failures; saves it."""
  times = list(dict.fromkeys(row.mtbf_s for row in rows))
  titles = [f"a chip fails once in {show_time(mtbf)}" for mtbf in times]
  figure, axes = panels(titles)
  for axis, mtbf in zip(axes, times):
    own = sorted((r for r in rows if r.mtbf_s == mtbf), key=lambda r: r.chips)
    for name, label in LABELS.items():
      goodput = [row.goodput[name] for row in own]
      deviation = [row.deviation[name] for row in own]
      axis.errorbar(
        [row.chips for row in own], goodput, deviation, None, "o-", ms=3, label=label
      )
    axis.set(xscale="log", xlabel="chips", ylabel="goodput", ylim=(0, 1.03))
    axis.legend(fontsize=7)
  return save(figure, "failures", folder)


def draw_own(work: Workload, path: pathlib.Path, gbits: float) -> None:
  """Draws one workload's utilisation in the long run and marks one bandwidth."""
  figure, [axis] = panels([""])
  marked = gbits or GRID[0]  # A single replica needs no bandwidth.
  grid = np.geomspace(min(GRID[0], marked / 10), max(GRID[-1], marked * 10))
  reached = steady_utilisation(work, grid * 1e9)
  source = work.method if work.plan is None else "config"
  label = f"{source}, H = {work.whole_plan[0].sync_every}"
  plot_utilisation(axis, grid, {label: reached})
  axis.axvline(marked, color="black", lw=0.8, ls=":")
  figure.savefig(path, dpi=110)


def panels(titles: list[str]) -> tuple[Figure, list[Axes]]:
  """Makes a figure with panels side by side."""
  figure = Figure(figsize=(4.6 * len(titles), 3.6), layout="constrained")
  axes = figure.subplots(1, len(titles), squeeze=False)[0]
  for axis, title in zip(axes, titles):
    axis.set_title(title)
    axis.grid(alpha=0.3)
  return figure, axes


def plot_utilisation(
  axis: Axes, gbits: np.ndarray, lines: dict[str, np.ndarray]
) -> None:
  """Draws utilisation against bandwidth in Gbit/s, a line per label."""
  for label, reached in lines.items():
    axis.plot(gbits, reached, label=label)
  axis.set(xscale="log", xlabel="bandwidth (Gbit/s)", ylabel="compute utilisation")
  axis.set_ylim(0, 1.03)
  axis.legend(fontsize=7)


def curves(models: Mapping[str, Model], settings: Settings) -> Figure:
  """Draws utilisation against bandwidth: a panel per model, a curve per setting."""
  figure, axes = panels(list(models))
  for axis, model in zip(axes, models.values()):
    works = {k: papers_workload(*model, **fields) for k, fields in settings.items()}
    lines = {k: utilisation(work, GRID * 1e9) for k, work in works.items()}
    plot_utilisation(axis, GRID, lines)
  return figure


def schedules(
  settings: Settings, layers: int, rate: float, steps: int, **fields
) -> Figure:
  """Draws when the link and the devices are busy; a panel per setting.

  Args:
    settings: {title: fields of Workload}.
    layers: layers of a model of 1B parameters with steps of one second.
    rate: bits per second of the link.
    steps: steps to draw.
    fields: fields of Workload that all panels share.
  """
  figure = Figure(figsize=(8, 1 + 1.5 * len(settings)), layout="constrained")
  axes = figure.subplots(len(settings), 1, sharex=True)
  for axis, (title, own) in zip(axes, settings.items()):
    nodes: list[Node] = []
    work = Workload.of_equal_layers(1e9, layers, 1.0, **fields, **own)
    utilisation(work, [rate], steps, nodes)
    for n in nodes:
      style = {"color": COLORS[n.kind], "edgecolor": "white", "lw": 0.3}
      axis.barh(int(n.resource == "compute"), n.end - n.start, 0.8, n.start, **style)
    axis.set(yticks=[0, 1], yticklabels=["link", "compute"], title=title)
    axis.set_xlabel("steps of compute")
  handles = [Patch(color=c, label=kind.replace("_", " ")) for kind, c in COLORS.items()]
  figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
  return figure


def hours(xlabel: str, lines: dict[str, tuple[str, dict[float, Training]]]) -> Figure:
  """Draws idealised hours of training runs: a panel per network.

  Args:
    xlabel: meaning of x.
    lines: {label: (matplotlib's style of the line, {x: run})}.
  """
  titles = [f"{name}: {n.bandwidth / 1e9:g} Gbit/s" for name, n in NETWORKS.items()]
  figure, axes = panels(titles)
  for axis, network in zip(axes, NETWORKS.values()):
    for label, (style, runs) in lines.items():
      y = [total_time(replace(run, across=network)) / 3600 for run in runs.values()]
      axis.plot(list(runs), y, style, label=label, ms=3)
    axis.set(xscale="log", yscale="log", xlabel=xlabel, ylabel="hours")
    axis.legend(fontsize=7)
  return figure


def figure_s3() -> Figure:
  """Draws schedules of four methods; two fragments of one layer, H = 2."""
  settings = dict(list(METHODS.items())[:4])
  return schedules(settings, 2, 40e9, 4, sync_every=2, fragment_size=1)


def figure_s4() -> Figure:
  """Draws utilisation for 1B, 10B and 100B parameters."""
  models = {
    "1B, 0.1 s per step": (1e9, 24, 0.1),
    "10B, 0.8 s per step": (10e9, 48, 0.8),
    "100B, 4.9 s per step": MODEL_100B,
  }
  return curves(models, METHODS)


def figure_s7() -> Figure:
  """Draws utilisation with sequential and with strided fragments."""
  settings = {
    f"{pattern}, tau = {tau}": {"pattern": pattern, "tau": tau}
    for pattern in ("sequential", "strided")
    for tau in (0, 1)
  }
  return curves({"100B, fragments of 3 layers": MODEL_100B}, settings)


def figure_s9() -> Figure:
  """Draws utilisation for different tau."""
  settings = {f"tau = {tau}": {"tau": tau} for tau in (0, 1, 2, 5, 10)}
  return curves({"100B, 16 bits": MODEL_100B}, settings)


def figure_s14() -> Figure:
  """Draws schedules with sequential and with strided fragments."""
  settings = {pattern: {"pattern": pattern} for pattern in ("sequential", "strided")}
  return schedules(settings, 6, 24e9, 6, sync_every=4, fragment_size=2)


def figure_s15() -> Figure:
  """Draws utilisation for different step times."""
  models = {f"100B, {s} s per step": (100e9, 108, s) for s in (1, 5, 10)}
  return curves(models, METHODS)


def figure_s16() -> Figure:
  """Draws utilisation for Llama 3 and DeepSeek-V3."""
  models = {
    "llama3 405B, 26.9 s per step": (405e9, *TABLE_6["llama3"]),
    "deepseek_v3 671B, 20.1 s per step": (671e9, *TABLE_6["deepseek_v3"]),
  }
  return curves(models, METHODS)


def figure_c10() -> Figure:
  """Draws utilisation of DiLoCo for different H, for the models of Table 6."""
  models = {
    "chinchilla 10B": (10e9, *TABLE_6["chinchilla"]),
    "llama3 405B": (405e9, *TABLE_6["llama3"]),
    "deepseek_v3 671B": (671e9, *TABLE_6["deepseek_v3"]),
  }
  every = (1, 10, 50, 100, 300)
  settings = {f"DiLoCo, H = {h}": {"method": "diloco", "sync_every": h} for h in every}
  return curves(models, settings)


def figure_c6() -> Figure:
  """Draws hours against parameters N; D = 20 N, batch of 2^20 tokens."""
  settings: Settings = {
    "data-parallel": {"method": "data_parallel", "replicas": 1},
    "DiLoCo, M = 1": {"replicas": 1},
    "DiLoCo, M = 2": {"replicas": 2},
    "DiLoCo, M = 4": {"replicas": 4},
    "overlapped, M = 2": {"method": "overlapped", "replicas": 2},
  }
  sizes = (35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9, 4e9, 10e9)
  lines = {
    label: ("o-", {n: Training(n, 20 * n, 2**20, **fields) for n in sizes})
    for label, fields in settings.items()
  }
  return hours("parameters", lines)


def figure_c12() -> Figure:
  """Draws hours against the overtraining factor; DiLoCo has the larger batch."""
  lines = {}
  for color, n in (("C0", 335e6), ("C1", 1.3e9), ("C2", 2.4e9)):
    for method, batch, dash in (("data_parallel", 2**20, "--"), ("diloco", 2**21, "-")):
      runs = {x: Training(n, 20 * n * x, batch, 2, method) for x in (1.0, 4.0, 16.0)}
      lines[f"{n / 1e9:.2g}B {method}"] = (color + dash, runs)
  return hours("overtraining", lines)


FIGURES = {
  name.removeprefix("figure_"): function
  for name, function in list(globals().items())
  if name.startswith("figure_")
}
