"""Draws figures 2 and 13 of the scaling-laws paper, from its tables and our fits."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.scaling_laws import paper
from diloco.scaling_laws.fits import Array
from diloco.util import palette

# Each M has a shade of DiLoCo's colour, a marker and a marker size. Markers drawn later
# cover earlier markers, so later markers are smaller or have another shape.
_ORANGES = palette.shades(palette.COLORS["diloco"], len(paper.ALGORITHMS) - 1)
COLORS = dict(zip(paper.ALGORITHMS, (palette.COLORS["data_parallel"], *_ORANGES)))
MARKERS = dict(zip(paper.ALGORITHMS, "o^sDv"))
MARKER_SIZES = dict(zip(paper.ALGORITHMS, (8, 6, 5, 3, 4)))
# N of the models that the laws are fitted to, and N of the larger models.
FITTED, LARGE = paper.model_sizes(), paper.model_sizes(models=paper.LARGE)


def losses(axes: Axes, names: Sequence[str] = paper.ALGORITHMS) -> None:
  """Draws figure 2a: losses up to 10B, and laws with a floor, fitted up to 2.4B."""
  line = np.geomspace(FITTED[0], LARGE[-1] * 1.2, 60)
  for algorithm in names:
    law = paper.floor_fit(algorithm)
    axes.plot(line, [law(x) for x in line], color=COLORS[algorithm])
    _points(axes, algorithm, lambda losses, plain: losses)
  axes.set(xscale="log", xlabel="parameters N")
  axes.set_ylabel("evaluation loss (nats per token)")


def extrapolation(axes: Axes) -> None:
  """Draws figure 13: figure 2a for three algorithms, with laws without a floor too."""
  some = ("data_parallel", "diloco_M2", "diloco_M4")
  losses(axes, some)
  line = np.geomspace(FITTED[0], LARGE[-1] * 1.2, 60)
  for algorithm in some:
    law = paper.loss_fit(algorithm)
    axes.plot(line, [law(x) for x in line], ":", color=COLORS[algorithm])
  axes.plot([], [], ":", color="0.4", label="law A N^α")


def difference(axes: Axes) -> None:
  """Draws figure 2b: losses and laws with a floor, in percent above data-parallel."""
  line = np.geomspace(FITTED[0], LARGE[-1], 60)
  more = lambda losses, plain: 100 * (losses / plain - 1)
  base = paper.floor_fit("data_parallel")
  for algorithm in paper.ALGORITHMS[1:]:
    law = paper.floor_fit(algorithm)
    axes.plot(line, [more(law(x), base(x)) for x in line], color=COLORS[algorithm])
    _points(axes, algorithm, more)
  axes.axhline(0, color="k", lw=0.5)
  axes.set(xscale="log", xlabel="parameters N", ylabel="loss above data-parallel (%)")


FIGURES = {
  "c13": ("Laws fitted up to 2.4B, and losses up to 10B", [extrapolation]),
  "c2": ("DiLoCo against data-parallel", [losses, difference]),
}


def draw(output: pathlib.Path) -> list[str]:
  """Draws both figures as PNG and SVG; returns the paths."""
  paths = []
  for name, (title, parts) in FIGURES.items():
    make = functools.partial(whole_figure, title, parts)
    paths += palette.save(make, output / f"scaling_{name}", ".png", ".svg")
  return paths


def whole_figure(title: str, parts: Sequence[Callable[[Axes], None]]) -> Figure:
  """Draws one panel for each part, and a legend below the panels."""
  figure, panels = palette.panels(title, [""] * len(parts), height=3.4)
  for part, axes in zip(parts, panels):
    part(axes)
  grey: dict[str, Any] = {"color": "0.4"}
  panels[0].plot([], [], "*", ms=8, label="measured, not fitted", **grey)
  panels[0].plot([], [], label="law A N^α + C", **grey)
  return palette.legend(figure)


def _points(axes: Axes, algorithm: str, y: Callable[[Array, Array], Array]) -> None:
  """Draws markers at the fitted sizes, and stars at 4B and 10B.

  Args:
    y: computes the drawn values from the losses of the algorithm and of data-parallel.
  """
  name = algorithm.replace("data_parallel", "data-parallel")
  label = name.replace("diloco_M", "DiLoCo, M = ")
  size = MARKER_SIZES[algorithm]
  style: dict[str, Any] = {"color": COLORS[algorithm], "ls": ""}
  values, beyond = (y(f(algorithm), f("data_parallel")) for f in (paper.losses, _large))
  axes.plot(FITTED, values, marker=MARKERS[algorithm], ms=size, label=label, **style)
  axes.plot(LARGE, beyond, marker="*", ms=size + 4, **style)


def _large(algorithm: str) -> Array:
  """Returns the losses measured at 4B and 10B; NaN stands for no run."""
  fit = "independent" if algorithm == "data_parallel" else "joint"
  losses = [paper.measured(algorithm, fit, scale) for scale in paper.LARGE]
  return np.array(losses, float)
