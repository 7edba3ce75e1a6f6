"""Draws curves, panels and legends for the figures of a sweep."""

from typing import Any

import pandas as pd
from matplotlib import ticker
from matplotlib.figure import Figure

from diloco.sweep.runs import curves

Axes = Any
OUTER_RATE = "best outer learning rate"
CURVES = ("data-parallel", *(f"DiLoCo, M={m}" for m in (1, 2, 4, 8)))
MARKERS = "o^sDvP"


def color(name: str) -> str:
  """Returns the color of an algorithm, the same in every figure."""
  return f"C{CURVES.index(name) if name in CURVES else 5 + len(name) % 5}"


def lines(panel: Axes, table: pd.DataFrame, x: str, y: str, **style) -> None:
  """Draws column y against column x: one line per curve, in the order of the rows."""
  known = panel.get_legend_handles_labels()[1]
  for name in curves(table):
    some = table[table["curve"] == name]
    # Later markers are smaller, so that the earlier ones stay visible.
    i = CURVES.index(name) if name in CURVES else len(CURVES)
    label = None if name in known else name
    default = {"color": color(name), "marker": MARKERS[i], "ms": 8 - i, "label": label}
    panel.plot(some[x], some[y], **default | style)


def beside(table: pd.DataFrame, x: str) -> pd.DataFrame:
  """Shifts each curve along a logarithmic axis x, because best rates often coincide."""
  spread = table[x].max() / table[x].min()
  place = table["curve"].map(curves(table).index)
  return table.assign(**{x: table[x] * spread ** (0.03 * place)})


def axes(columns: int) -> tuple[Figure, list[Axes]]:
  """Makes a figure with panels side by side."""
  figure = Figure(figsize=(4 * columns, 3.4), layout="constrained")
  return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def legend(figure: Figure) -> Figure:
  """Finishes a figure: grid, few ticks, one legend below the panels."""
  for panel in figure.axes:
    panel.grid(alpha=0.3, which="both", lw=0.5)
    for axis in (panel.xaxis, panel.yaxis):
      if axis.get_scale() == "log":
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=6))
        axis.set_major_formatter(ticker.EngFormatter(sep=""))
        axis.set_minor_formatter(ticker.NullFormatter())
    if panel.get_ylabel() == OUTER_RATE:
      panel.set_ylim(0, 1.1)
  columns = 2 if len(figure.axes) == 1 else 4
  handles = figure.axes[0].get_legend_handles_labels()
  figure.legend(*handles, loc="outside lower center", ncols=columns, fontsize=8)
  return figure
