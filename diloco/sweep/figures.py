"""Draws a sweep like the figures of Scaling Laws for DiLoCo, and prints its fits.

python -m diloco.sweep.figures docs/ladder.csv --out=docs/figures --prefix=ladder_

Numbers are the paper's (arXiv 2503.09799): 2 loss against N and per cent to
data-parallel, 3 and 4 loss against the batch, 6 idealised time, 7 and 8 the best outer
learning rate, 9 loss against H, 11 overtraining. Figure 5 is of zero-shot accuracy,
which the table does not hold. A figure whose runs are missing is left out, and said.
"""

import argparse
import collections
import functools
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from diloco.config.command_line import make_folder
from diloco.simulate import wallclock
from diloco.sweep import drawing, tables
from diloco.sweep.runs import Run, best, by_curve, main_grid, read

FILLS = ("full", "none", "left", "top")
UNITS = {"h": 3600.0, "s": 1.0, "ms": 1e-3}


class Missing(ValueError):
  """The table has no runs for a figure."""


def figure_2(runs: Sequence[Run]):
  """Loss against N by algorithm, and the difference to data-parallel in per cent."""
  cells = best(main_grid(runs), lambda r: (r.curve, r.params))
  plain = {n: r.loss for (name, n), r in cells.items() if name == "data-parallel"}
  figure, (left, right) = drawing.axes(2)
  for name, some in by_curve(cells.values()).items():
    drawing.line(left, name, [r.params for r in some], [r.loss for r in some])
    shared = [r for r in some if r.params in plain]
    if name != "data-parallel" and shared:
      drawing.line(
        right,
        name,
        [r.params for r in shared],
        [100 * (r.loss / plain[r.params] - 1) for r in shared],
      )
  left.set(xscale="log", yscale="log", xlabel="parameters N", ylabel="held-out loss")
  right.axhline(0, color="black", lw=0.8)
  right.set(xscale="log", xlabel="parameters N", ylabel="% above data-parallel")
  return drawing.legend(figure, left)


def figure_3(runs: Sequence[Run]):
  """Data-parallel and DiLoCo with M = 1 against the batch, by N."""
  few = [r for r in runs if r.algorithm == "data_parallel" or r.replicas == 1]
  return _batches(few)


def figure_4(runs: Sequence[Run]):
  """All algorithms against the batch, by N; the best rates at every batch."""
  return _batches(runs)


def figure_6(runs: Sequence[Run], chip_tokens: float | None = None):
  """Loss against idealised time (Appendix A) of every batch, on three networks.

  `chip_tokens` of a batch are on a chip; None: as many as `wallclock.chips` says.
  """
  cells = best(main_grid(runs), lambda r: (r.params, r.curve, r.batch))
  largest = max(_swept(cells.values()), default=0)
  some = [r for r in cells.values() if r.params == largest]
  if not some:
    raise Missing("no size has three batches")
  networks = dict(reversed(wallclock.NETWORKS.items()))

  try:
    seconds = {
      (r, name): wallclock.total_time(_training(r, network, chip_tokens))
      for r in some
      for name, network in networks.items()
    }
  except ValueError as error:
    raise Missing(f"the runs are too small for the wall-clock model: {error}") from None
  figure, axes = drawing.axes(3)
  for panel, name in zip(axes, networks):
    unit = _unit(seconds[r, name] for r in some)
    for curve, points in by_curve(some).items():
      times = [seconds[r, name] / UNITS[unit] for r in points]
      drawing.line(panel, curve, times, [r.loss for r in points])
    panel.set(xscale="log", xlabel=f"idealised time ({unit})")
    panel.set_title(f"{name} bandwidth")
  axes[0].set_ylabel(f"held-out loss, N={largest:,.0f}")
  drawing.legend(figure, axes[0])
  for panel in axes:
    # Not "10m": beside a unit a prefix reads as another one.
    panel.xaxis.set_major_formatter("{x:g}")
  return figure


def figure_7(runs: Sequence[Run]):
  """Best outer learning rate against N, by M."""
  cells = best(_outer_swept(main_grid(runs)), lambda r: (r.replicas, r.params))
  if not cells:
    raise Missing("no cell has three outer learning rates")
  if len({r.params for r in cells.values()}) < 2:
    raise Missing("outer learning rates were tried at one N only")
  figure, (panel,) = drawing.axes(1)
  spread = drawing.spread(r.params for r in cells.values())
  for i, (name, some) in enumerate(by_curve(cells.values()).items()):
    x = drawing.beside([r.params for r in some], i, spread)
    drawing.line(panel, name, x, [r.outer_rate for r in some])
  panel.set(xscale="log", xlabel="parameters N", ylabel=drawing.OUTER_RATE)
  return drawing.legend(figure, panel)


def figure_8(runs: Sequence[Run]):
  """Best outer learning rate against H (mean over N) and against N (mean over H)."""
  some = _outer_swept(_cadences(runs))
  cells = best(some, lambda r: (r.replicas, r.sync_every, r.params))
  if len({r.sync_every for r in cells.values()}) < 2:
    raise Missing("outer learning rates were tried at one H only")
  fields = {"sync_every": "inner steps between syncs H", "params": "parameters N"}
  if len({r.params for r in cells.values()}) < 2:
    print("figure 8: the panel over N is left out, rates were tried at one N only")
    del fields["params"]
  figure, panels = drawing.axes(len(fields))
  for panel, (field, label) in zip(panels, fields.items()):
    spread = drawing.spread(getattr(r, field) for r in cells.values())
    for i, (name, points) in enumerate(by_curve(cells.values()).items()):
      values = collections.defaultdict(list)
      for r in points:
        values[getattr(r, field)].append(r.outer_rate)
      x = drawing.beside(sorted(values), i, spread)
      rates = [values[v] for v in sorted(values)]
      drawing.line(panel, name, x, [statistics.mean(v) for v in rates])
      low, high = [min(v) for v in rates], [max(v) for v in rates]
      panel.fill_between(x, low, high, color=drawing.color(name), alpha=0.15)
    panel.set(xscale="log", xlabel=label, ylabel=drawing.OUTER_RATE)
  return drawing.legend(figure, panels[0])


def figure_9(runs: Sequence[Run]):
  """Loss against H by M and N, at the best outer learning rate of each H."""
  cells = best(_cadences(runs), lambda r: (r.params, r.replicas, r.sync_every))
  count = collections.Counter(k[:2] for k in cells)
  sizes = sorted({n for (n, _), c in count.items() if c > 1})
  if not sizes:
    raise Missing("no cell was run at two H")
  figure, panels = _loss_by_size(
    cells.values(), sizes, lambda r: r.sync_every, "inner steps between syncs H"
  )
  panels[0].set_ylabel("held-out loss")
  return drawing.legend(figure, panels[0])


def figure_11(runs: Sequence[Run]):
  """Loss against training FLOPs 6 N D, a line per algorithm and overtraining."""
  seed = statistics.mode(r.seed for r in runs)
  cadence = statistics.mode(r.sync_every for r in runs)
  same = [
    r
    for r in runs
    if r.seed == seed and (r.sync_every == cadence or r.algorithm == "data_parallel")
  ]
  cells = best(same, lambda r: (r.curve, r.overtrain, r.params))
  if len({r.overtrain for r in cells.values()}) < 2:
    raise Missing("no run is overtrained")
  figure, (panel,) = drawing.axes(1)
  multiples = sorted({r.overtrain for r in cells.values()})
  fills = dict(zip(multiples, FILLS))
  for name, some in by_curve(cells.values()).items():
    for multiple, fill in fills.items():
      points = [r for r in some if r.overtrain == multiple]
      x = [6 * r.params * r.tokens for r in points]
      drawing.line(panel, name, x, [r.loss for r in points], fillstyle=fill)
  for multiple, fill in fills.items():
    style = {"color": "grey", "marker": "o", "ls": "", "fillstyle": fill}
    panel.plot([], [], label=f"{multiple:g}x tokens", **style)
  panel.set(xscale="log", yscale="log", xlabel="6 N D (FLOP)", ylabel="held-out loss")
  return drawing.legend(figure, panel)


FIGURES = {
  2: figure_2,
  3: figure_3,
  4: figure_4,
  6: figure_6,
  7: figure_7,
  8: figure_8,
  9: figure_9,
  11: figure_11,
}


def _cadences(runs: Sequence[Run]) -> list[Run]:
  seed = statistics.mode(r.seed for r in runs)
  return [
    r
    for r in runs
    if r.algorithm != "data_parallel" and (r.overtrain, r.seed) == (1, seed)
  ]


def _outer_swept(runs: Sequence[Run]) -> list[Run]:
  """DiLoCo runs of the cells in which three outer learning rates or more were tried."""
  rates = collections.defaultdict(set)
  for r in runs:
    rates[r.params, r.replicas, r.sync_every].add(r.outer_rate)
  return [
    r
    for r in runs
    if r.algorithm != "data_parallel"
    and len(rates[r.params, r.replicas, r.sync_every]) > 2
  ]


def _swept(runs: Iterable[Run]) -> list[float]:
  """Sizes at which data-parallel was tried at three batches or more."""
  batches = collections.defaultdict(set)
  for r in runs:
    if r.algorithm == "data_parallel":
      batches[r.params].add(r.batch)
  return sorted(n for n, b in batches.items() if len(b) >= 3)


def _batches(runs: Sequence[Run]):
  cells = best(main_grid(runs), lambda r: (r.params, r.curve, r.batch))
  sizes = _swept(cells.values())
  if not sizes:
    raise Missing("no size has three batches")
  figure, panels = _loss_by_size(
    cells.values(), sizes, lambda r: r.batch, "batch (tokens)"
  )
  panels[0].set_ylabel("held-out loss, best rates")
  return drawing.legend(figure, panels[0])


def _loss_by_size(
  runs: Iterable[Run],
  sizes: Sequence[float],
  of: Callable[[Run], float],
  label: str,
):
  """A panel for each size: loss against what `of` takes of a run, a line per curve."""
  figure, panels = drawing.axes(len(sizes))
  for panel, size in zip(panels, sizes):
    points = [r for r in runs if r.params == size]
    for name, some in by_curve(points, of).items():
      drawing.line(panel, name, [of(r) for r in some], [r.loss for r in some])
    panel.set(xscale="log", xlabel=label, title=f"N={size:,.0f}")
  return figure, panels


def _training(
  run: Run, network: wallclock.Network, chip_tokens: float | None
) -> wallclock.Training:
  return wallclock.Training(
    params=run.params,
    tokens=run.tokens,
    batch_tokens=run.batch,
    method="data_parallel" if run.algorithm == "data_parallel" else "diloco",
    replicas=run.replicas,
    sync_every=run.sync_every,
    chips=run.batch / chip_tokens if chip_tokens else None,
    across=network,
  )


def _unit(seconds: Iterable[float]) -> str:
  """The largest unit in which all of these times are at least 1, or the smallest."""
  least = min(seconds)
  return next((unit for unit, size in UNITS.items() if least >= size), "ms")


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("table", type=pathlib.Path, help="an exported CSV file")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
  parser.add_argument("--prefix", default="", help="of the pictures' names")
  parser.add_argument(
    "--where", action="append", default=[], metavar="COLUMN=VALUE", help="of the rows"
  )
  parser.add_argument("--only", type=int, nargs="*", choices=FIGURES, default=FIGURES)
  parser.add_argument(
    "--chip_tokens", type=float, help="of a batch on a chip in figure 6, for toys"
  )
  args = parser.parse_args(argv)
  if args.chip_tokens is not None and not args.chip_tokens > 0:
    why = f"--chip_tokens is {args.chip_tokens:g}; give a positive number of tokens."
    print(f"error: {why}", file=sys.stderr)
    return 2
  draw: dict[int, Callable[..., Any]] = {
    **FIGURES,
    6: functools.partial(figure_6, chip_tokens=args.chip_tokens),
  }
  try:
    runs = read(args.table, args.where)
    make_folder(args.out, "--out")
  except (OSError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  for table in (tables.losses, tables.best_points, tables.laws, tables.seeds):
    print("\n".join(table(runs)) + "\n")
  for number in args.only:
    path = args.out / f"{args.prefix}{number}.png"
    try:
      draw[number](runs).savefig(path, dpi=80)
      print(f"figure {number}: {path}")
    except Missing as why:
      print(f"figure {number}: left out, {why}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
