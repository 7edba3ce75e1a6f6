"""Draws a sweep like the figures of Scaling Laws for DiLoCo, and prints its fits.

python -m diloco.reproduce.figures docs/ladder.csv --out=docs/figures --prefix=ladder_

Figures are numbered as in the paper (arXiv 2503.09799). 2 shows the loss against N, and
in per cent above data-parallel; 4 the loss against the batch; 7 the best outer learning
rate. Figure 2 takes means over the seeds of a point, without the tuning seed; 4 takes
the seeds that all points of a panel have. The command names the figures whose runs are
missing.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from diloco.reproduce import drawing, tables
from diloco.reproduce.runs import above_plain, at_common_seeds, best, main_grid, read
from diloco.sweep.chart import LOSS, PLAIN
from diloco.util.command import Parser, as_path, guarded, make_folder
from diloco.util.palette import panels as make_panels
from diloco.util.palette import save

PARAMS = "parameters N"


class Missing(ValueError):
  """The table has no runs for a figure."""


def figure_2(table: pd.DataFrame) -> Figure:
  """Draws the loss against N by algorithm, and in per cent above data-parallel."""
  cells = best(main_grid(table), "curve", "params")
  others = above_plain(cells)
  figure, panels = make_panels("Loss against size", [""] * (1 + (not others.empty)))
  drawing.lines(panels[0], cells, "params", "loss")
  panels[0].set(xscale="log", yscale="log", xlabel=PARAMS, ylabel=LOSS)
  if others.empty:
    print(
      "figure 2: the panel of differences is left out, no N has runs of both"
      " data-parallel and DiLoCo"
    )
  else:
    drawing.lines(panels[1], others, "params", "more")
    for name, some in others.groupby("curve"):
      color, bar = drawing.look(name)["color"], some["more_std"].fillna(0.0)
      style: dict[str, Any] = {"color": color, "ls": "", "capsize": 2}
      panels[1].errorbar(some["params"], some["more"], bar, **style)
    panels[1].axhline(0, color="black", lw=0.8)
    panels[1].set(xscale="log", xlabel=PARAMS, ylabel="loss above data-parallel (%)")
  bars = f"Bars: {drawing.SPREAD}, of differences at the same seed."
  return drawing.legend(figure, "" if others.empty else bars)


def figure_4(table: pd.DataFrame) -> Figure:
  """Draws the loss of all algorithms against the batch, by N, at the best rates."""
  cells = best(main_grid(table), "params", "curve", "batch")
  sizes = _swept(cells)
  title = "Loss against batch, at the best learning rates"
  figure, panels = make_panels(title, [f"N = {size:,.0f}" for size in sizes])
  for panel, size in zip(panels, sizes):
    some = at_common_seeds(cells[cells["params"] == size])
    drawing.lines(panel, some, "batch", "loss")
    panel.set(xscale="log", xlabel="batch (tokens)")
  panels[0].set_ylabel(LOSS)
  return drawing.legend(figure)


def figure_7(table: pd.DataFrame) -> Figure:
  """Draws the best outer learning rate against N, by M."""
  cells = best(_outer_swept(main_grid(table)), "curve", "params")
  if cells.empty:
    raise Missing("no cell has three outer learning rates")
  if cells["params"].nunique() < 2:
    raise Missing("outer learning rates were tried at one N only")
  figure, (panel,) = make_panels("Best outer learning rate by size")
  drawing.lines(panel, cells, "params", "outer_learning_rate")
  panel.set(xscale="log", xlabel=PARAMS, ylabel=drawing.OUTER_RATE)
  return drawing.legend(figure)


FIGURES = {2: figure_2, 4: figure_4, 7: figure_7}


def _outer_swept(table: pd.DataFrame) -> pd.DataFrame:
  """Selects DiLoCo's runs of cells with three outer learning rates or more."""
  table = table[table["curve"] != PLAIN]
  cells = table.groupby(["params", "curve", "sync_every"])
  return table[cells["outer_learning_rate"].transform("nunique") > 2]


def _swept(cells: pd.DataFrame) -> list[float]:
  """Lists the sizes at which data-parallel was tried with three batches or more."""
  plain = cells[cells["curve"] == PLAIN]
  count = plain.groupby("params")["batch"].nunique()
  if not (count > 2).any():
    raise Missing("data-parallel was tried with three batches at no N")
  return sorted(count.index[count > 2])


def run(args: argparse.Namespace) -> None:
  """Prints the tables and draws the figures."""
  table = read(args.table, args.where)
  make_folder((args.out / f"{args.prefix}2.png").parent, "--out")
  for lines in (tables.losses, tables.best_points, tables.laws, tables.seeds):
    print("\n".join(lines(table)) + "\n")
  for number, draw in FIGURES.items():
    path = args.out / f"{args.prefix}{number}.png"
    try:
      save(functools.partial(draw, table), path)
      print(f"figure {number}: {path}")
    except Missing as why:
      print(f"figure {number}: left out, {why}")


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco.reproduce.figures", description=__doc__)
  add = parser.add_argument
  add("table", type=as_path, help="an exported CSV file")
  add("--out", type=as_path, required=True, help="output folder")
  add("--prefix", default="", help="prefix of the file names")
  where = "rows to take, such as seed=0,replicas=2"
  add("--where", default="", metavar="COLUMN=VALUE,...", help=where)
  return guarded(run, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
