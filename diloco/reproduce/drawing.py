"""Draws curves, panels and legends for the figures of a sweep."""

from typing import Any

import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.reproduce.runs import curves
from diloco.sweep.chart import PLAIN
from diloco.util.palette import COLORS, COLUMN, PAGE, shades

OUTER_RATE = "best outer learning rate"
REPLICAS = (1, 2, 4, 8)
MARKERS = "^sDv"
HEIGHT = 2.8  # Inches of a figure.
OTHER_M = "P"  # The marker of any other number of replicas.


def look(name: str) -> dict[str, Any]:
  """Returns the style of a curve: the algorithm's colour, a shade and a marker for M.

  Args:
    name: a value of the column `curve`, such as "DiLoCo, M=2".
  """
  if name == PLAIN:
    return {"color": COLORS["data_parallel"], "marker": "o", "ms": 6}
  algorithm, _, replicas = name.lower().partition(", m=")
  m = int(replicas)
  if m not in REPLICAS:
    return {"color": COLORS[algorithm], "marker": OTHER_M, "ms": 4}
  i = REPLICAS.index(m)
  # Later markers are smaller, so that the earlier ones stay visible.
  color = shades(COLORS[algorithm], len(REPLICAS))[i]
  return {"color": color, "marker": MARKERS[i], "ms": 5 - i // 2}


def lines(panel: Axes, table: pd.DataFrame, x: str, y: str, **style) -> None:
  """Draws column y against column x: one line per curve, in the order of the rows."""
  known = panel.get_legend_handles_labels()[1]
  for name in curves(table):
    some = table[table["curve"] == name]
    label = None if name in known else name
    panel.plot(some[x], some[y], label=label, **look(name) | style)


def beside(table: pd.DataFrame, x: str) -> pd.DataFrame:
  """Shifts each curve along a logarithmic axis x, because best rates often coincide."""
  spread = table[x].max() / table[x].min()
  place = table["curve"].map(curves(table).index)
  return table.assign(**{x: table[x] * spread ** (0.03 * place)})


def axes(columns: int, title: str, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
  """Makes a titled figure with panels side by side; the height is in inches."""
  width = COLUMN if columns == 1 else PAGE
  figure = Figure(figsize=(width, height), layout="constrained")
  figure.suptitle(title)
  return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def legend(figure: Figure) -> Figure:
  """Finishes a figure: grid, few ticks, one legend below the panels."""
  for panel in figure.axes:
    panel.grid(visible=True, which="both")
    for axis in (panel.xaxis, panel.yaxis):
      if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        subs = (1, 2, 5) if high < 40 * low else (1,)  # More labels would overlap.
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=6))
        axis.set_major_formatter(ticker.EngFormatter(sep=""))
        axis.set_minor_formatter(ticker.NullFormatter())
    if panel.get_ylabel() == OUTER_RATE:
      panel.set_ylim(bottom=0)
  columns = 2 if len(figure.axes) == 1 else 4
  handles = figure.axes[0].get_legend_handles_labels()
  figure.legend(*handles, loc="outside lower center", ncols=columns)
  return figure
