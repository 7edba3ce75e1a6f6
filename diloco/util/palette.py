"""One colour per algorithm and one style, in every picture of the project. No JAX.

A figure shows the algorithm by its colour. Replicas M, parameters N and inner steps H
have shades of that colour (`shades`), markers or line styles.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from diloco.util import files

# Colours of seaborn's palette "colorblind".
COLORS = {
  "data_parallel": "#0173b2",  # blue
  "diloco": "#de8f05",  # orange
  "streaming": "#029e73",  # green
}
# For what is no algorithm, such as the parts of a step.
OTHERS = ("#cc78bc", "#ca9161", "#949494", "#d55e00", "#fbafe4", "#56b4e9", "#ece133")

# The lines of one algorithm, the darkest first.
DASHES = ("-", "--", "-.", ":", (0, (1, 3)))
# Widths in inches of a figure with one panel, and of a figure across a page.
COLUMN, PAGE = 3.4, 7.0
# For matplotlib's settings: letters as large as a paper's captions.
STYLE: dict[Any, Any] = {
  "axes.axisbelow": True,
  "axes.grid": True,
  "axes.labelsize": 8,
  "axes.titlesize": 9,
  "figure.constrained_layout.use": True,
  "figure.titlesize": 9,
  "font.size": 8,
  "grid.alpha": 0.3,
  "grid.linewidth": 0.5,
  "legend.fontsize": 7,
  "lines.linewidth": 1.2,
  "lines.markersize": 4,
  "savefig.dpi": 240,
  "xtick.labelsize": 7,
  "ytick.labelsize": 7,
}


def save(draw: Callable[[], Any], path: pathlib.Path, *suffixes: str) -> list[str]:
  """Draws a figure in this style and saves it; returns the names of the files.

  Args:
    draw: returns a figure of matplotlib.
    path: the file. With suffixes such as .png, there is a file for each of them.
  """
  import matplotlib  # Slow to import.

  paths = [path.with_suffix(suffix) for suffix in suffixes] or [path]
  with matplotlib.rc_context(STYLE):
    figure = draw()
    for path in paths:
      write_picture(figure, path)
  return [str(path) for path in paths]


def write_picture(figure: Any, path: pathlib.Path, **options: Any) -> None:
  """Writes a figure of matplotlib; a reader never sees a part of the picture."""
  with files.replacing(path) as file:
    figure.savefig(file, format=path.suffix.removeprefix("."), **options)


def shades(color: str, count: int) -> list[str]:
  """Returns `count` shades of a colour, from light to dark, as #rrggbb.

  A single shade is the colour itself.
  """
  rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
  found = []
  for i in range(count):
    # From 0.55 of white to 0.55 of black.
    share = 1.1 * i / (count - 1) - 0.55 if count > 1 else 0.0
    end = 0 if share > 0 else 255
    mixed = (round(c + (end - c) * abs(share)) for c in rgb)
    found.append("#" + "".join(f"{c:02x}" for c in mixed))
  return found


def looks(methods: Mapping[str, str]) -> list[dict[str, Any]]:
  """Returns matplotlib's style of a line for each label.

  Args:
    methods: {label: method}. Lines of one method have shades of its color and different
      dashes; the last line of a method is the darkest and has no dashes.
  """
  found: list[dict[str, Any]] = []
  for label, method in methods.items():
    same = [other for other, m in methods.items() if m == method]
    color = COLORS.get(method, COLORS["streaming"])  # `overlapped` is Streaming.
    i = same.index(label)
    found.append(
      {
        "label": label,
        "color": shades(color, len(same))[i],
        "ls": DASHES[(len(same) - 1 - i) % len(DASHES)],
      }
    )
  return found
