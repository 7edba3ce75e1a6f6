"""Figures 2 and 13 of the scaling-laws paper, from its tables and our fits."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from diloco.scaling_laws import paper

COLOURS = dict(zip(paper.ALGORITHMS, ("k", "C0", "C1", "C2", "C3")))


def extrapolation(axes) -> None:
  """Figure 13: losses with the laws fitted to 35M to 2.4B, and what 4B and 10B gave."""
  n = paper.model_sizes()
  line = np.geomspace(n[0], paper.model_sizes(models=["10B"])[0] * 1.2, 60)
  for algorithm in ("data_parallel", "diloco_M2", "diloco_M4"):
    colour = COLOURS[algorithm]
    axes.plot(
      n, paper.losses(algorithm), "o", color=colour, ms=4, label=_name(algorithm)
    )
    for fit, style in ((paper.loss_fit, ":"), (paper.floor_fit, "-")):
      law = fit(algorithm)
      axes.plot(line, [law(x) for x in line], style, color=colour, lw=1)
    for scale in ("4B", "10B"):
      size = paper.model_sizes(models=[scale])[0]
      how = "independent" if algorithm == "data_parallel" else "joint"
      axes.plot(size, _measured(algorithm, how, scale), "*", color=colour, ms=9)
  axes.set(xscale="log", xlabel="N", ylabel="evaluation loss")
  axes.set_title(
    "dots fitted, stars measured; dotted A N^α, solid A N^α + C", fontsize=9
  )
  axes.legend()


def difference(axes) -> None:
  """Figure 2b: per cent above data-parallel, of the data and of laws with a floor."""
  n = paper.model_sizes()
  line = np.geomspace(n[0], paper.model_sizes(models=["10B"])[0], 60)
  base = paper.floor_fit("data_parallel")
  for algorithm in paper.ALGORITHMS[1:]:
    colour, law = COLOURS[algorithm], paper.floor_fit(algorithm)
    ratio = paper.losses(algorithm) / paper.losses("data_parallel")
    axes.plot(n, 100 * (ratio - 1), "o", color=colour, ms=4, label=_name(algorithm))
    fitted = [100 * (law(x) / base(x) - 1) for x in line]
    axes.plot(line, fitted, color=colour, lw=1)
    if algorithm != "diloco_M8":
      for scale in ("4B", "10B"):
        theirs = _measured(algorithm, "joint", scale)
        dp = _measured("data_parallel", "independent", scale)
        size = paper.model_sizes(models=[scale])[0]
        axes.plot(size, 100 * (theirs / dp - 1), "*", color=colour, ms=9)
  axes.axhline(0, color="k", lw=0.5)
  axes.set(xscale="log", xlabel="N", ylabel="loss, % above data-parallel")
  axes.legend()


def draw(output: pathlib.Path) -> list[pathlib.Path]:
  """Draws both as PNG and SVG; returns the paths."""
  output.mkdir(parents=True, exist_ok=True)
  paths = []
  for name, function in (("c13", extrapolation), ("c2", difference)):
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    function(axes)
    for suffix in ("png", "svg"):
      path = output / f"scaling_{name}.{suffix}"
      figure.savefig(path, dpi=120)
      paths.append(path)
    plt.close(figure)
  return paths


def _measured(algorithm: str, how: str, scale: str) -> float:
  rows = paper.read("table12_fit_extrapolation")
  row = next(r for r in rows if (r["algorithm"], r["fit"]) == (algorithm, how))
  return float(row[f"loss_{scale}"])


def _name(algorithm: str) -> str:
  return algorithm.replace("data_parallel", "data-parallel").replace("diloco_M", "M = ")
