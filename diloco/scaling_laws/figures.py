"""Draws figures 2b and 13 of the scaling-laws paper, from its tables and our fits."""

import pathlib

import numpy as np
from matplotlib.figure import Figure

from diloco.scaling_laws import paper

COLORS = dict(zip(paper.ALGORITHMS, ("k", "C0", "C1", "C2", "C3")))


def extrapolation(axes) -> None:
  """Draws figure 13: the losses from 35M to 10B and the laws fitted up to 2.4B."""
  n = paper.model_sizes()
  large = paper.model_sizes(models=paper.LARGE)
  line = np.geomspace(n[0], large[-1] * 1.2, 60)
  for algorithm in ("data_parallel", "diloco_M2", "diloco_M4"):
    color = COLORS[algorithm]
    for fit, style in ((paper.loss_fit, ":"), (paper.floor_fit, "-")):
      law = fit(algorithm)
      axes.plot(line, [law(x) for x in line], style, color=color, lw=1)
    _points(axes, algorithm, n, paper.losses(algorithm), large, _large(algorithm))
  axes.set(xscale="log", xlabel="N", ylabel="evaluation loss")
  axes.set_title(
    "dots fitted, stars measured; dotted A N^α, solid A N^α + C", fontsize=9
  )
  axes.legend()


def difference(axes) -> None:
  """Draws figure 2b: losses and laws with a floor, in per cent above data-parallel."""
  n = paper.model_sizes()
  large = paper.model_sizes(models=paper.LARGE)
  line = np.geomspace(n[0], large[-1], 60)
  base = paper.floor_fit("data_parallel")
  for algorithm in paper.ALGORITHMS[1:]:
    law = paper.floor_fit(algorithm)
    fitted = [100 * (law(x) / base(x) - 1) for x in line]
    axes.plot(line, fitted, color=COLORS[algorithm], lw=1)
    ratio = paper.losses(algorithm) / paper.losses("data_parallel")
    beyond = _large(algorithm) / _large("data_parallel")
    _points(axes, algorithm, n, 100 * (ratio - 1), large, 100 * (beyond - 1))
  axes.axhline(0, color="k", lw=0.5)
  axes.set(xscale="log", xlabel="N", ylabel="loss, % above data-parallel")
  axes.legend()


def draw(output: pathlib.Path) -> list[pathlib.Path]:
  """Draws both figures as PNG and SVG; returns the paths."""
  paths = []
  for name, function in (("c13", extrapolation), ("c2", difference)):
    figure = Figure(figsize=(6, 4), layout="constrained")
    function(figure.subplots())
    for suffix in ("png", "svg"):
      path = output / f"scaling_{name}.{suffix}"
      figure.savefig(path, dpi=120)
      paths.append(path)
  return paths


def _points(axes, algorithm: str, n, values, large, beyond) -> None:
  """Draws dots at the sizes that were fitted, and stars at 4B and 10B."""
  name = algorithm.replace("data_parallel", "data-parallel")
  label = name.replace("diloco_M", "M = ")
  style = {"color": COLORS[algorithm], "ls": ""}
  axes.plot(n, values, marker="o", ms=4, label=label, **style)
  axes.plot(large, beyond, marker="*", ms=9, **style)


def _large(algorithm: str) -> np.ndarray:
  """Returns the losses measured at 4B and 10B; NaN stands for no run."""
  fit = "independent" if algorithm == "data_parallel" else "joint"
  found = [paper.measured(algorithm, fit, scale) for scale in paper.LARGE]
  return np.array(found, float)
