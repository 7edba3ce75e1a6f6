"""One colour per algorithm and one style, in every picture of the project. No JAX.

A figure shows the algorithm by its colour. Replicas M, parameters N and inner steps H
have shades of that colour (`shades`), markers or line styles.
"""

import pathlib
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

# Widths in inches of a figure with one panel, and of a figure across a page.
COLUMN, PAGE = 3.4, 7.0
# For `matplotlib.rc_context`: letters as large as a paper's captions.
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
