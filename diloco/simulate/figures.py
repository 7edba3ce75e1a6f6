"""Draws the papers' simulated figures.

Names that begin with s are figures of Streaming DiLoCo (2501.18512), names that begin
with c are figures of Scaling Laws (2503.09799).
"""

import pathlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from diloco.config import Config, changed
from diloco.simulate import from_config, limits
from diloco.simulate.steady import steady_utilisation
from diloco.simulate.tables import GRID, TABLE_6, papers_workload
from diloco.simulate.utilisation import Node, Workload, utilisation
from diloco.simulate.wallclock import NETWORKS, Training, total_time
from diloco.spec.fragments import make_fragments
from diloco.spec.shapes import num_params
from diloco.util.palette import COLORS, PAGE, legend, looks, panels, save, shades

GREYS = {"forward": "0.8", "backward_activations": "0.6", "backward_parameters": "0.4"}
Settings = dict[str, dict[str, Any]]  # {label: fields of Workload or Training}.
METHODS: Settings = {
  "data-parallel": {"method": "data_parallel"},
  "DiLoCo": {"method": "diloco"},
  "Streaming": {"method": "streaming"},
  "+ overlap": {"method": "streaming", "tau": 1},
  "+ overlap, FP4": {"method": "streaming", "tau": 1, "bits": 4},
}
SHARE = (-0.03, 1.05)  # Limits of y, with space for whole markers.
Simulator = Callable[[Workload, np.ndarray], np.ndarray]
Model = tuple[float, int, float]  # Parameters, layers, seconds per step.
MODEL_100B = (100e9, 108, 4.9)


def draw(name: str, folder: pathlib.Path) -> list[str]:
  """Draws one of FIGURES as PNG and SVG; returns the paths.

  Raises:
    ValueError: there is no such figure.
  """
  limits.check("figure", name, FIGURES)
  return save(FIGURES[name], folder / f"simulated_{name}", ".png", ".svg")


def plot_utilisation(
  axis: Axes, gbits: np.ndarray, works: Mapping[str, Workload], simulate: Simulator
) -> None:
  """Draws utilisation against bandwidth, with one line per label.

  Args:
    axis: the panel.
    gbits: bandwidths in Gbit/s.
    works: {label: workload}.
    simulate: `utilisation` or `steady_utilisation`.
  """
  methods = {label: work.method for label, work in works.items()}
  for work, look in zip(works.values(), looks(methods)):
    axis.plot(gbits, simulate(work, gbits * 1e9), **look)
  axis.set(xscale="log", xlabel="bandwidth (Gbit/s)", ylim=SHARE)
  axis.set_ylabel("compute utilisation (share)")
  axis.label_outer()


def curves(title: str, models: Mapping[str, Model], settings: Settings) -> Figure:
  """Draws utilisation against bandwidth: one panel per model, one curve per setting."""
  figure, axes = panels(title, list(models), sharey=True)
  for axis, model in zip(axes, models.values()):
    works = {k: papers_workload(*model, **fields) for k, fields in settings.items()}
    plot_utilisation(axis, GRID, works, utilisation)
  return legend(figure)


def busy_times(
  title: str, settings: Settings, layers: int, rate: float, steps: int, **fields: Any
) -> Figure:
  """Draws when the link and the devices are busy, with one panel per setting.

  Args:
    title: title of the figure.
    settings: {title of the panel: fields of Workload}.
    layers: number of layers. The model has 1B parameters and steps of one second.
    rate: bits per second of the link.
    steps: steps to draw.
    fields: fields of Workload that all panels share.
  """
  figure = Figure(figsize=(PAGE, 0.9 + 0.8 * len(settings)), layout="constrained")
  axes = figure.subplots(len(settings), 1, sharex=True)
  for axis, (panel_title, panel_fields) in zip(axes, settings.items()):
    nodes: list[Node] = []
    work = Workload.of_equal_layers(1e9, layers, 1.0, **fields, **panel_fields)
    utilisation(work, [rate], steps, nodes)
    for n in nodes:
      color = GREYS.get(n.kind, COLORS[work.method])
      style = {"color": color, "edgecolor": "white", "lw": 0.3}
      axis.barh(int(n.resource == "compute"), n.end - n.start, 0.8, n.start, **style)
    axis.set(yticks=[0, 1], yticklabels=["reductions on the link", "compute"])
    axis.set_title(panel_title, fontsize="medium", loc="left")
    axis.grid(axis="y", visible=False)
  axes[-1].set_xlabel("time (steps of compute)")
  handles = [Patch(color=c, label=kind.replace("_", " ")) for kind, c in GREYS.items()]
  figure.legend(handles=handles, loc="outside lower center", ncols=4)
  figure.suptitle(title)
  return figure


def hours(title: str, xlabel: str, lines: dict[str, dict[float, Training]]) -> Figure:
  """Draws idealised hours of training runs, with one panel per network.

  Args:
    title: title of the figure.
    xlabel: label of the x axis.
    lines: {label: {x: run}}.
  """
  titles = [f"{name}: {n.bandwidth / 1e9:g} Gbit/s" for name, n in NETWORKS.items()]
  figure, axes = panels(title, titles, sharey=True)
  methods = {label: next(iter(runs.values())).method for label, runs in lines.items()}
  for axis, network in zip(axes, NETWORKS.values()):
    for runs, look in zip(lines.values(), looks(methods)):
      y = [total_time(replace(run, across=network)) / 3600 for run in runs.values()]
      axis.plot(list(runs), y, marker="o", ms=2.5, **look)
    axis.set(xscale="log", yscale="log", xlabel=xlabel)
  axes[0].set_ylabel("idealised time (hours)")
  return legend(figure)


def figure_s2() -> Figure:
  """Draws which layers each fragment has, in the sequential and the strided pattern."""
  patterns, layers = ("sequential", "strided"), 12
  title = f"Fragments of 3 of {layers} layers, in the order of their sends"
  figure, axes = panels(title, patterns, sharey=True)
  for axis, pattern in zip(axes, patterns):
    fragments = make_fragments(layers, 3, pattern)
    for p, color in enumerate(shades(COLORS["streaming"], len(fragments))):
      rows = [*fragments[p].layers, *[-1 for _ in fragments[p].rest]]
      axis.barh(rows, 0.9, 0.9, p + 0.55, color=color)
    axis.set_xticks(range(1, len(fragments) + 1))
    axis.set(xlabel="fragment", xlim=(0.4, p + 1.6), ylim=(-1.6, layers - 0.4))
    axis.set_yticks(range(-1, layers), ["embedding", *map(str, range(layers))])
  axes[0].set_ylabel("layer")
  return figure


def figure_s3() -> Figure:
  """Draws schedules of four methods, for two fragments of one layer and H = 2."""
  settings = dict(list(METHODS.items())[:4])
  title = "When link and devices are busy: two fragments of one layer, H = 2"
  return busy_times(title, settings, 2, 40e9, 4, sync_every=2, fragment_size=1)


def figure_s4() -> Figure:
  """Draws utilisation for 1B, 10B and 100B parameters."""
  models = {
    "1B, 0.1 s per step": (1e9, 24, 0.1),
    "10B, 0.8 s per step": (10e9, 48, 0.8),
    "100B, 4.9 s per step": MODEL_100B,
  }
  return curves("Simulated compute utilisation", models, METHODS)


def of_config(c: Config, seconds: float, latency: float = 0.0) -> Figure:
  """Draws figure s4 for the model, M, H and fragments of a config.

  Args:
    c: the config. Values on the link have 16 bits, or 4 bits if the label says FP4.
    seconds: seconds of compute per step.
    latency: seconds added to every reduction.
  """
  fields: dict[str, Any] = {"overlap.tau": 1, "overlap.taus": ()}
  fields |= {"inner.gradient_dtype": "bfloat16", "wire.format": "bf16"}
  as_method = lambda method, **more: from_config.workload(
    changed(c, fields | {"algorithm": method} | more), seconds, latency
  )
  overlapped = as_method("streaming")
  works = {
    "data-parallel": as_method("data_parallel"),
    "DiLoCo": replace(as_method("diloco"), method="diloco", plan=None),
    "Streaming": replace(overlapped, tau=0),
    "+ overlap": overlapped,
    "+ overlap, FP4": as_method("streaming", **{"wire.format": "e3m0"}),
  }
  size = f"{num_params(c.model) / 1e9:.3g}B, {seconds:.3g} s per step"
  name = f"{size}, M = {c.replicas}, H = {c.sync_every}"
  figure, (axis,) = panels("Simulated compute utilisation", [name])
  plot_utilisation(axis, GRID, works, steady_utilisation)
  return legend(figure)


def figure_s6() -> Figure:
  """Draws the largest payload of a sync against fragment size: figure 6b, for 500M."""
  layers, embedding = 18, 32_000 / (12 * 1536)  # Unit: a block of 12 width^2 values.
  sizes = (1, 2, 3, 6, 9, 18)
  figure, (axis,) = panels("Largest payload of a sync, 500M, 18 layers")
  for label, embed, look in (("with", embedding, "o-"), ("without", 0, "o:")):
    peaks = [max(size, embed) / (layers + embed) for size in sizes]
    axis.plot(sizes, peaks, look, label=f"{label} embedding", color=COLORS["streaming"])
  axis.set(xscale="log", ylim=(0, 1.05), xlabel="layers per fragment")
  axis.set_xticks(sizes, map(str, sizes))
  axis.minorticks_off()
  axis.set_ylabel("share of DiLoCo's payload")
  return legend(figure)


def figure_s7() -> Figure:
  """Draws utilisation with sequential and with strided fragments."""
  settings = {
    f"{pattern}, tau = {tau}": {"pattern": pattern, "tau": tau}
    for pattern in ("sequential", "strided")
    for tau in (0, 1)
  }
  title = "Order of layers in fragments"
  return curves(title, {"100B, fragments of 3 layers": MODEL_100B}, settings)


def figure_s9() -> Figure:
  """Draws utilisation for different tau."""
  settings = {f"tau = {tau}": {"tau": tau} for tau in (0, 1, 2, 5, 10)}
  return curves("Streaming with more overlap", {"100B, 16 bits": MODEL_100B}, settings)


def figure_s14() -> Figure:
  """Draws schedules with sequential and with strided fragments."""
  settings = {pattern: {"pattern": pattern} for pattern in ("sequential", "strided")}
  title = "When link and devices are busy: three fragments of two layers, H = 4"
  return busy_times(title, settings, 6, 24e9, 6, sync_every=4, fragment_size=2)


def figure_s15() -> Figure:
  """Draws utilisation for different step times."""
  models = {f"100B, {s} s per step": (100e9, 108, s) for s in (1, 5, 10)}
  return curves("Simulated compute utilisation by step time", models, METHODS)


def figure_s16() -> Figure:
  """Draws utilisation for Llama 3 and DeepSeek-V3."""
  models = {
    "llama3 405B, 26.9 s per step": (405e9, *TABLE_6["llama3"]),
    "deepseek_v3 671B, 20.1 s per step": (671e9, *TABLE_6["deepseek_v3"]),
  }
  return curves("Simulated compute utilisation", models, METHODS)


def figure_c10() -> Figure:
  """Draws utilisation of DiLoCo for different H, for the models of Table 6."""
  models = {
    "chinchilla 10B": (10e9, *TABLE_6["chinchilla"]),
    "llama3 405B": (405e9, *TABLE_6["llama3"]),
    "deepseek_v3 671B": (671e9, *TABLE_6["deepseek_v3"]),
  }
  every = (1, 10, 50, 100, 300)
  settings = {f"DiLoCo, H = {h}": {"method": "diloco", "sync_every": h} for h in every}
  return curves("DiLoCo synchronises every H steps", models, settings)


def figure_c6() -> Figure:
  """Draws hours against parameters N, for D = 20 N and a batch of 2^20 tokens."""
  settings: Settings = {
    "data-parallel": {"method": "data_parallel", "replicas": 1},
    "DiLoCo, M = 1": {"replicas": 1},
    "DiLoCo, M = 2": {"replicas": 2},
    "DiLoCo, M = 4": {"replicas": 4},
    "overlapped, M = 2": {"method": "overlapped", "replicas": 2},
  }
  sizes = (35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9, 4e9, 10e9)
  lines = {
    label: {n: Training(n, 20 * n, 2**20, **fields) for n in sizes}
    for label, fields in settings.items()
  }
  return hours("Idealised training time, 20 tokens per parameter", "parameters", lines)


def figure_c12() -> Figure:
  """Draws hours against the overtraining factor; DiLoCo has twice the batch."""
  lines = {}
  for name, batch in (("data-parallel", 2**20), ("DiLoCo", 2**21)):
    method = METHODS[name]["method"]
    for n in (335e6, 1.3e9, 2.4e9):
      runs = {x: Training(n, 20 * n * x, batch, 2, method) for x in (1.0, 4.0, 16.0)}
      lines[f"{name}, {n / 1e9:.2g}B"] = runs
  xlabel = "tokens / (20 N)"
  return hours("Idealised training time with overtraining", xlabel, lines)


FIGURES = {
  name.removeprefix("figure_"): function
  for name, function in list(globals().items())
  if name.startswith("figure_")
}
