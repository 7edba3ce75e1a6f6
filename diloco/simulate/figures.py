"""The papers' simulated figures; every function returns a matplotlib figure.

Numbers with an s are figures of Streaming DiLoCo (2501.18512), with a c of Scaling Laws
(2503.09799).
"""

import pathlib
from collections.abc import Callable
from typing import Any

from diloco.simulate import wallclock
from diloco.simulate.tables import GRID, PARAMS, TABLE_6, papers_workload
from diloco.simulate.utilisation import Assumptions, Node, Workload, utilisation

COLORS = {
  "forward": "#7aa6d8",
  "backward_activations": "#b7d99c",
  "backward_parameters": "#5e9e4a",
  "reduction": "#8d6bb8",
}
# Layers and seconds per step of Table 4.
SIZES = {"1B": (24, 0.1), "10B": (48, 0.8), "100B": (108, 4.9)}
SERIES: dict[str, dict[str, Any]] = {
  "data-parallel": {"method": "data_parallel"},
  "DiLoCo": {"method": "diloco"},
  "Streaming": {"method": "streaming"},
  "+ overlap": {"method": "streaming", "tau": 1},
  "+ overlap, FP4": {"method": "streaming", "tau": 1, "bits": 4},
}


def _pyplot():
  """Imported late: queries and tables draw nothing."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  return pyplot


def _axes(columns: int = 1):
  """Curves side by side."""
  size = (4.6 * columns, 3.6)
  return _pyplot().subplots(
    1, columns, figsize=size, layout="constrained", squeeze=False
  )


def _rows(rows: int, height: float):
  """Schedules on a common axis of time, with one legend for all."""
  figure, axes = _pyplot().subplots(
    rows, 1, figsize=(8, height), layout="constrained", sharex=True
  )
  handles = [
    _pyplot().Rectangle((0, 0), 1, 1, color=color, label=kind.replace("_", " "))
    for kind, color in COLORS.items()
  ]
  figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
  return figure, axes


def _curves(axes, series: dict[str, Workload], title: str) -> None:
  for name, work in series.items():
    axes.plot(GRID, utilisation(work, GRID * 1e9), label=name)
  axes.set(
    xscale="log", xlabel="bandwidth (Gbit/s)", ylabel="compute utilisation", title=title
  )
  axes.set_ylim(0, 1.03)
  axes.grid(alpha=0.3)
  axes.legend(fontsize=7)


def gantt(axes, work: Workload, rate: float, steps: int, title: str) -> None:
  """Draws the events of the first steps on the two resources."""
  nodes: list[Node] = []
  utilisation(work, [rate], Assumptions(steps=steps), nodes)
  for n in nodes:
    row = 1 if n.resource == "compute" else 0
    axes.barh(
      row,
      n.end - n.start,
      left=n.start,
      height=0.8,
      color=COLORS[n.kind],
      edgecolor="white",
      lw=0.3,
    )
  axes.set(yticks=[0, 1], yticklabels=["link", "compute"], title=title)
  axes.set_xlabel("steps of compute" if work.step_time == 1 else "seconds")


def figure_s3():
  """Schedules of four methods; two fragments of one layer, H = 2."""
  figure, grid = _rows(4, height=7)
  kinds = dict(list(SERIES.items())[:4])
  for axis, (name, fields) in zip(grid, kinds.items()):
    extra = {"sync_every": 2, "fragment_size": 1, **fields}
    gantt(axis, Workload.of_equal_layers(1e9, 2, 1.0, **extra), 40e9, 4, name)
  return figure


def figure_s4():
  """Utilisation over bandwidth for 1B, 10B and 100B."""
  figure, axes = _axes(3)
  for axis, (size, (layers, seconds)) in zip(axes[0], SIZES.items()):
    series = {
      name: papers_workload(PARAMS[size], layers, seconds, **fields)
      for name, fields in SERIES.items()
    }
    _curves(axis, series, f"{size}, {seconds} s per step")
  return figure


def figure_s7():
  """Sequential against strided fragments, 100B."""
  figure, axes = _axes()
  series = {
    f"{pattern}, tau = {tau}": papers_workload(
      100e9, 108, 4.9, pattern=pattern, tau=tau
    )
    for pattern in ("sequential", "strided")
    for tau in (0, 1)
  }
  _curves(axes[0][0], series, "100B, fragments of 3 layers")
  return figure


def figure_s9():
  """Over tau, 100B."""
  figure, axes = _axes()
  series = {
    f"tau = {tau}": papers_workload(100e9, 108, 4.9, tau=tau)
    for tau in (0, 1, 2, 5, 10)
  }
  _curves(axes[0][0], series, "100B, 16 bits")
  return figure


def figure_s14():
  """Schedules with sequential and strided fragments."""
  figure, grid = _rows(2, height=4)
  for axis, pattern in zip(grid, ("sequential", "strided")):
    work = Workload.of_equal_layers(
      1e9, 6, 1.0, sync_every=4, fragment_size=2, pattern=pattern
    )
    gantt(axis, work, 24e9, 6, pattern)
  return figure


def figure_s15():
  """Over the step time, 100B."""
  figure, axes = _axes(3)
  for axis, seconds in zip(axes[0], (1.0, 5.0, 10.0)):
    series = {
      name: papers_workload(100e9, 108, seconds, **fields)
      for name, fields in SERIES.items()
    }
    _curves(axis, series, f"100B, {seconds:g} s per step")
  return figure


def figure_s16():
  """Llama 3 405B and DeepSeek-V3 671B."""
  figure, axes = _axes(2)
  models = {"llama3": "405B", "deepseek_v3": "671B"}
  for axis, (name, size) in zip(axes[0], models.items()):
    layers, seconds = TABLE_6[name]
    series = {
      label: papers_workload(PARAMS[size], layers, seconds, **fields)
      for label, fields in SERIES.items()
    }
    _curves(axis, series, f"{name} {size}, {seconds:g} s per step")
  return figure


def figure_c10():
  """Over H for the three architectures of Table 6."""
  figure, axes = _axes(3)
  models = {"chinchilla": "10B", "llama3": "405B", "deepseek_v3": "671B"}
  for axis, (name, size) in zip(axes[0], models.items()):
    layers, seconds = TABLE_6[name]
    series = {
      f"DiLoCo, H = {h}": papers_workload(
        PARAMS[size], layers, seconds, method="diloco", sync_every=h
      )
      for h in (1, 10, 50, 100, 300)
    }
    _curves(axis, series, f"{name} {size}")
  return figure


def _hours(axis, runs: Callable[..., wallclock.Training], xs, label, style) -> None:
  hours = [wallclock.total_time(runs(x)) / 3600 for x in xs]
  axis.plot(xs, hours, style, label=label, ms=3)


def figure_c6():
  """Idealised hours over N on three networks, D = 20 N, batch of 2^20 tokens."""
  figure, axes = _axes(3)
  sizes = [35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9, 4e9, 10e9]
  kinds: dict[str, dict[str, Any]] = {
    "data-parallel": {"method": "data_parallel", "replicas": 1},
    "DiLoCo, M = 1": {"replicas": 1},
    "DiLoCo, M = 2": {"replicas": 2},
    "DiLoCo, M = 4": {"replicas": 4},
    "overlapped, M = 2": {"replicas": 2, "method": "overlapped"},
  }
  for axis, (name, network) in zip(axes[0], wallclock.NETWORKS.items()):
    for label, fields in kinds.items():

      def run(n, fields=fields, network=network):
        return wallclock.Training(n, 20 * n, 2**20, across=network, **fields)

      _hours(axis, run, sizes, label, "o-")
    axis.set(xscale="log", yscale="log", xlabel="parameters", ylabel="hours")
    axis.set_title(f"{name}: {network.bandwidth / 1e9:g} Gbit/s")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
  return figure


def figure_c12():
  """Idealised hours over the overtraining multiplier; DiLoCo takes larger batches."""
  figure, axes = _axes(3)
  for axis, (name, network) in zip(axes[0], wallclock.NETWORKS.items()):
    for n, color in ((335e6, "C0"), (1.3e9, "C1"), (2.4e9, "C2")):
      for method, batch, style in (
        ("data_parallel", 2**20, f"{color}--"),
        ("diloco", 2**21, f"{color}-"),
      ):

        def run(x, n=n, method=method, batch=batch, network=network):
          return wallclock.Training(
            n, 20 * n * x, batch, replicas=2, method=method, across=network
          )

        _hours(axis, run, [1, 4, 16], f"{n / 1e9:.2g}B {method}", style)
    axis.set(xscale="log", yscale="log", xlabel="overtraining", ylabel="hours")
    axis.set_title(f"{name}: {network.bandwidth / 1e9:g} Gbit/s")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
  return figure


def plot_own(work: Workload, path: pathlib.Path, gbits: float) -> None:
  """Draws one workload's utilisation over bandwidth and marks one bandwidth."""
  figure, axes = _axes()
  _curves(axes[0][0], {f"{work.method}, H = {work.sync_every}": work}, "")
  axes[0][0].axvline(gbits, color="black", lw=0.8, ls=":")
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=110)
  _pyplot().close(figure)


FIGURES = {
  name.removeprefix("figure_"): function
  for name, function in list(globals().items())
  if name.startswith("figure_")
}


def draw(name: str, folder: pathlib.Path) -> list[pathlib.Path]:
  """Draws one figure as PNG and SVG; returns the paths.

  Raises:
    ValueError: there is no such figure.
  """
  if name not in FIGURES:
    raise ValueError(f"figure is {name!r}; choose one of {', '.join(FIGURES)}.")
  folder.mkdir(parents=True, exist_ok=True)
  figure = FIGURES[name]()
  paths = [folder / f"simulated_{name}.{kind}" for kind in ("png", "svg")]
  for path in paths:
    figure.savefig(path, dpi=110)
  _pyplot().close(figure)
  return paths
