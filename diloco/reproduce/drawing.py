"""Draws curves, panels and legends for the figures of a sweep."""

from typing import Any

import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.reproduce.runs import curves
from diloco.sweep.chart import PLAIN
from diloco.util import palette
from diloco.util.palette import COLORS, DASHES, shades

OUTER_RATE = "best outer learning rate"
REPLICAS = (1, 2, 4, 8)
MARKERS = {"^": 8.5, "s": 5.5, "D": 4.5, "v": 3.5}  # With their sizes in points.
OTHER_M = "P"  # The marker of any other number of replicas.
SPREAD = "standard deviation over the seeds"


def look(name: str) -> dict[str, Any]:
  """Returns the style of a curve: the algorithm's colour; shade, marker, dashes for M.

  Curves may coincide: those drawn later have smaller markers and more gaps.

  Args:
    name: a value of the column `curve`, such as "DiLoCo, M=2".
  """
  if name == PLAIN:
    return {"color": COLORS["data_parallel"], "marker": "o", "ms": 8}
  algorithm, _, replicas = name.lower().partition(", m=")
  m = int(replicas)
  if m not in REPLICAS:
    return {"color": COLORS[algorithm], "marker": OTHER_M, "ms": 4}
  i = REPLICAS.index(m)
  color, (marker, size) = shades(COLORS[algorithm], 4)[i], [*MARKERS.items()][i]
  return {"color": color, "marker": marker, "ms": size, "ls": DASHES[i]}


def lines(panel: Axes, table: pd.DataFrame, x: str, y: str, **style: Any) -> None:
  """Draws column y against column x: one line per curve, in the order of the rows."""
  known = panel.get_legend_handles_labels()[1]
  for name in curves(table):
    some = table[table["curve"] == name]
    label = None if name in known else name
    panel.plot(some[x], some[y], label=label, **look(name) | style)


def legend(figure: Figure, note: str = "") -> Figure:
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
      panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
  return palette.legend(figure, note)
