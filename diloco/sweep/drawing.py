"""What the figures of a sweep share: panels, one color per algorithm, legends."""

from collections.abc import Iterable, Sequence
from typing import Any

Axes = Any
OUTER_RATE = "best outer learning rate"
CURVES = ("data-parallel", *(f"DiLoCo, M={m}" for m in (1, 2, 4, 8)))
MARKERS = "o^sDvP"


def color(name: str) -> str:
  """The same color for an algorithm in every figure."""
  return f"C{CURVES.index(name) if name in CURVES else 5 + len(name) % 5}"


def line(
  panel: Axes, name: str, x: Sequence[float], y: Sequence[float], **style
) -> None:
  """A curve in its color and marker, once in the key."""
  # The later ones are smaller: what lies below stays visible.
  i = CURVES.index(name) if name in CURVES else len(CURVES)
  style = {"color": color(name), "marker": MARKERS[i], "ms": 8 - i, **style}
  known = panel.get_legend_handles_labels()[1]
  panel.plot(x, y, label=None if name in known else name, **style)


def beside(x: Sequence[float], i: int, spread: float) -> list[float]:
  """Shifts curve i aside on a logarithmic axis: best rates often coincide.

  Args:
    x: of its points.
    i: which curve it is.
    spread: largest over smallest x of all curves.
  """
  return [v * spread ** (0.03 * i) for v in x]


def spread(values: Iterable[float]) -> float:
  """Largest over smallest."""
  found = list(values)
  return max(found) / min(found)


def axes(columns: int):
  """Panels side by side; matplotlib is imported late."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, panels = pyplot.subplots(
    1, columns, figsize=(4 * columns, 3.4), layout="constrained", squeeze=False
  )
  return figure, list(panels[0])


def legend(figure, panel_with_all: Axes):
  """Finishes a figure: grid, few ticks, one legend below the panels."""
  from matplotlib import ticker

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
  handles = panel_with_all.get_legend_handles_labels()
  figure.legend(*handles, loc="outside lower center", ncols=columns, fontsize=8)
  return figure
