"""Draws how similar the replicas' outer gradients are, of several runs. No JAX.

python -m diloco cosines runs/a-0 runs/a-1 runs/b-0 --out=cosines.png

The first panel has a line for each setting: the mean of all fragments, and a band from
the least to the largest seed (2501.18512, figure 17a). The second has a line for each
fragment of the first setting, seeds averaged; the earlier layers are darker (figure
18). The cosines are those of what was received, which every run writes. Prints the
means of the first and the last tenth of training.
"""

import argparse
import itertools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from diloco.config import Config
from diloco.config.resolve import leaves
from diloco.errors import ConfigError
from diloco.log import workdir
from diloco.log.read_run import joined, read_all
from diloco.log.workdir import title
from diloco.util import palette
from diloco.util.command import Parser, as_path, check_picture, guarded

BINS = 20  # Points of a line.


def cosines(folder: pathlib.Path) -> pd.DataFrame:
  """Reads a run: the mean cosine of each fragment (columns) in each bin of steps.

  Raises:
    ConfigError: the run has no cosines.
  """
  c, read_parts = workdir.read(folder, "receive", parts=True)
  received = itertools.chain(*(part["receive"] for part in read_parts))
  found = pd.DataFrame(received, columns=["step", "fragment", "outer_grad_cosine"])
  found = found.dropna()
  if found.empty:
    raise ConfigError(
      f"WORKDIR is {str(folder)!r}, which has no cosines: a run needs at least two"
      " replicas that synchronise, and not wire.exchange=psum."
    )
  # What arrives after the last step belongs to the last bin.
  steps = found["step"].clip(upper=c.train.steps - 1)
  found["bin"] = (steps * BINS / c.train.steps).astype(int)
  means = found.groupby(["bin", "fragment"])["outer_grad_cosine"].mean()
  return means.unstack()


def run(args: argparse.Namespace) -> None:
  """Prints the table and draws the picture."""
  check_picture(args.out, "cosines.png")
  runs = read_all(args.workdir)
  places = {id(r): folder for r, folder in zip(runs, args.workdir)}
  groups = joined(runs)
  labels = names_of([group[0].config for group in groups])
  found = [[cosines(places[id(r)]) for r in group] for group in groups]
  width = max(map(len, labels))
  print(f"{'setting':<{width}}{'seeds':>7}{'first tenth':>13}{'last tenth':>12}")
  for name, group in zip(labels, found):
    whole = pd.concat(table.mean(axis=1) for table in group).groupby(level=0).mean()
    first, last = whole[whole.index < BINS // 10], whole[whole.index >= BINS * 9 // 10]
    print(f"{name:<{width}}{len(group):>7}{first.mean():>13.2f}{last.mean():>12.2f}")
  print(*palette.save(lambda: draw(labels, found), args.out), sep="\n")


# What `title` names, and what changes no cosine.
_QUIET = (
  *("seed", "algorithm", "replicas", "sync_every", "overlap.taus", "plugins"),
  *("log.", "checkpoint.", "eval.", "profile.", "data.prefetch"),
)
# Names have these fields; if none of them differs, the first four that do.
_FIRST = ("model.dim", "train.batch_size", "overlap.tau", "overlap.alpha")


def names_of(configs: Sequence[Config]) -> list[str]:
  """Names settings by method, M and H, and by other fields that differ."""
  fields = [leaves(c.to_dict()) for c in configs]
  differ = [f for f in fields[0] if len({repr(own.get(f)) for own in fields}) > 1]
  shown = [f for f in _FIRST if f in differ]
  shown = shown or [f for f in differ if not f.startswith(_QUIET)][:4]
  values = lambda own: [f"{f.rpartition('.')[2]}={own.get(f)}" for f in shown]
  return [", ".join([title(c), *values(own)]) for c, own in zip(configs, fields)]


def draw(labels: list[str], found: list[list[pd.DataFrame]]) -> Any:
  """Draws both panels.

  Args:
    labels: of the settings.
    found: for each setting the tables of its seeds, see `cosines`.
  """
  names = ("mean of all fragments", "fragments of the first setting")
  title = "Cosine similarity of the replicas' outer gradients"
  figure, panels = palette.panels(title, names, 3.4, sharey=True)
  middle = lambda index: (np.asarray(index) + 0.5) / BINS
  colors = palette.shades(palette.COLORS["streaming"], len(labels))
  for name, group, color, dash in zip(labels, found, colors, palette.DASHES * 9):
    seeds = pd.concat([table.mean(axis=1) for table in group], axis=1)
    x = middle(seeds.index)
    panels[0].plot(x, seeds.mean(axis=1), color=color, ls=dash, label=name)
    panels[0].fill_between(
      x, seeds.min(axis=1), seeds.max(axis=1), color=color, alpha=0.2, lw=0
    )
  whole = pd.concat(found[0]).groupby(level=0).mean()
  for fragment, color in zip(
    whole, palette.shades("#949494", len(whole.columns))[::-1]
  ):
    panels[1].plot(middle(whole.index), whole[fragment], color=color)
  for panel in panels:
    panel.set(xlabel="share of training")
    panel.axhline(0, color="black", lw=0.5)
  panels[0].set(ylabel="cosine")
  return palette.legend(figure)


def main(argv: list[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco cosines", description=__doc__)
  parser.add_argument("workdir", nargs="+", type=as_path, help="folders of runs")
  parser.add_argument("--out", type=as_path, required=True, help="picture to write")
  return guarded(run, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
