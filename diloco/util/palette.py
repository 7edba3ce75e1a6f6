"""The style of every picture, with one colour per algorithm. No JAX.

A figure shows the algorithm by its colour. Shades of the colour (`shades`), markers or
line styles show replicas M, parameters N and inner steps H.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diloco.util import files

if TYPE_CHECKING:  # Matplotlib is slow to import.
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

# Colours of seaborn's palette "colorblind".
COLORS = {
  "data_parallel": "#0173b2",  # blue
  "diloco": "#de8f05",  # orange
  "streaming": "#029e73",  # green
}
# Colours for everything but algorithms, such as parts of a step; visible on white.
OTHERS = ("#cc78bc", "#ca9161", "#949494", "#d55e00", "#591e71", "#56b4e9", "#7f7a00")

# Line styles for the lines of one algorithm; the darkest line has the first style.
DASHES = ("-", "--", "-.", ":", (0, (1, 3)))
# Widths in inches of a figure with one panel, and of a figure across a page.
COLUMN, PAGE = 4.0, 7.0
# File with the settings of every picture, for `matplotlib.style`.
STYLE = pathlib.Path(__file__).with_name("paper.mplstyle")


def save(draw: Callable[[], "Figure"], path: pathlib.Path, *suffixes: str) -> list[str]:
  """Draws a figure in this style and saves it; returns the names of the files.

  Args:
    draw: returns a figure of matplotlib.
    path: the file.
    suffixes: such as .png; if given, saves `path` with each suffix instead of its own.
  """
  import matplotlib.style  # Slow to import.

  paths = [path.with_suffix(suffix) for suffix in suffixes] or [path]
  with matplotlib.style.context(STYLE):
    figure = draw()
    for path in paths:
      with files.replacing(path) as file:  # Readers never see an incomplete file.
        figure.savefig(file, format=path.suffix.removeprefix("."))
  return [str(path) for path in paths]


def panels(
  title: str, names: Sequence[str] = ("",), height: float = 3.0, **options: Any
) -> tuple["Figure", list["Axes"]]:
  """Makes a titled figure of matplotlib with panels side by side.

  Args:
    title: title of the figure. With one panel, the title stands above the axes.
    names: the title of each panel, or "".
    height: height in inches.
    options: options of `Figure.subplots`, such as sharey.
  """
  from matplotlib.figure import Figure

  one = len(names) == 1
  size = (COLUMN if one else PAGE, height)
  figure = Figure(figsize=size, layout="constrained")
  axes = list(figure.subplots(1, len(names), squeeze=False, **options)[0])
  for panel, name in zip(axes, names):
    panel.set_title(f"{title}\n{name}".strip() if one else name)
  figure.suptitle("" if one else title)
  return figure, axes


def legend(figure: "Figure", note: str = "") -> "Figure":
  """Puts one legend below the panels, which all have the same curves; returns `figure`.

  Args:
    figure: a figure of matplotlib.
    note: a text above the legend, for example about the error bars.
  """
  handles, labels = figure.axes[0].get_legend_handles_labels()
  order = sorted(range(len(labels)), key=lambda i: -_height(handles[i]))
  if not labels:
    figure.supxlabel(note, fontsize="small")
    return figure
  # An inch has space for 16 letters. A label's line, marker and gap take 7 letters.
  most = int(16 * figure.get_figwidth() / (max(map(len, labels)) + 7))
  rows = -(-len(labels) // max(most, 1))
  figure.legend(
    [handles[i] for i in order],
    [labels[i] for i in order],
    title=note,
    loc="outside lower center",
    ncols=-(-len(labels) // rows),
  )
  return figure


def _height(handle: Any) -> float:
  """Returns the mean y of a curve; -infinity for a curve without points."""
  import numpy as np  # Slow to import.

  line = handle[0] if isinstance(handle, tuple) else handle  # A curve with error bars.
  y = np.asarray(line.get_ydata() if hasattr(line, "get_ydata") else [], dtype=float)
  y = y[np.isfinite(y)]
  return float(y.mean()) if len(y) else -np.inf


def shades(color: str, count: int) -> list[str]:
  """Returns `count` shades of a colour, from light to dark, as #rrggbb.

  A single shade is the colour itself.
  """
  rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
  mixed_colors = []
  for i in range(count):
    # Shades go from 20% white (paler lines do not print) to 65% black.
    share = 0.85 * i / (count - 1) - 0.2 if count > 1 else 0.0
    end = 0 if share > 0 else 255
    mixed = (round(c + (end - c) * abs(share)) for c in rgb)
    mixed_colors.append("#" + "".join(f"{c:02x}" for c in mixed))
  return mixed_colors


def looks(methods: Mapping[str, str]) -> list[dict[str, Any]]:
  """Returns the matplotlib options of the line of each label.

  Args:
    methods: {label: method}. Lines of one method have shades of its color and different
      dashes; the last line of a method is the darkest and has no dashes.
  """
  styles: list[dict[str, Any]] = []
  for label, method in methods.items():
    same = [other for other, m in methods.items() if m == method]
    # The simulator's method `overlapped` stands for Streaming DiLoCo.
    color = COLORS.get(method, COLORS["streaming"])
    i = same.index(label)
    styles.append(
      {
        "label": label,
        "color": shades(color, len(same))[i],
        "ls": DASHES[(len(same) - 1 - i) % len(DASHES)],
      }
    )
  return styles
