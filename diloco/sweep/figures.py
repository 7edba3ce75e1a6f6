"""Draws a sweep like the figures of Scaling Laws for DiLoCo, and prints its fits.

python -m diloco.sweep.figures docs/ladder.csv --out=docs/figures --prefix=ladder_

Numbers are the paper's (arXiv 2503.09799): 2 loss against N and per cent to
data-parallel, 3 and 4 loss against the batch, 6 idealised time, 7 and 8 the best outer
learning rate, 9 loss against H, 11 overtraining. Figure 5 is of zero-shot accuracy,
which the table does not hold. A figure whose runs are missing is left out, and said.
"""

import argparse
import collections
import csv
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from diloco.scaling_laws import results
from diloco.simulate import wallclock

Axes = Any
OUTER = "best outer learning rate"


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run, as the exported table has it.

  Attributes:
    algorithm: data_parallel, diloco or streaming.
    replicas: M.
    params: N.
    sync_every: H.
    rate, outer_rate: inner and outer learning rate.
    batch: tokens per step over all replicas.
    tokens: D.
    overtrain: D / N as a multiple of the table's smallest.
    seed: of the run.
    loss: held-out, nats per token.
  """

  algorithm: str
  replicas: int
  params: float
  sync_every: int
  rate: float
  outer_rate: float
  batch: float
  tokens: float
  overtrain: int
  seed: int
  loss: float

  @property
  def curve(self) -> str:
    """Its name in legends."""
    if self.algorithm == "data_parallel":
      return "data-parallel"
    name = "DiLoCo" if self.algorithm == "diloco" else self.algorithm
    return f"{name}, M={self.replicas}"


class Missing(ValueError):
  """The table has no runs for a figure."""


def read(path: pathlib.Path) -> list[Run]:
  """The finished runs of an exported table.

  Raises:
    ValueError: the file is no such table, or has no finished run.
  """
  with path.open(newline="") as file:
    rows = [row for row in csv.DictReader(file) if row.get("status") == "done"]
  if not rows:
    raise ValueError(
      f"{path} has no finished run; write it with python -m diloco.sweep --export."
    )
  try:
    least = min(float(r["tokens"]) / float(r["params"]) for r in rows)
    return [_run(row, least) for row in rows]
  except (KeyError, ValueError) as error:
    raise ValueError(
      f"{path} is no table of a sweep ({error}); write it with python -m diloco.sweep"
      " --export."
    ) from error


def main_grid(runs: Sequence[Run]) -> list[Run]:
  """The runs of the main grid: most frequent H and seed, no overtraining."""
  cadence = statistics.mode(r.sync_every for r in runs)
  seed = statistics.mode(r.seed for r in runs)
  return [
    r
    for r in runs
    if (r.overtrain, r.seed) == (1, seed)
    and (r.sync_every == cadence or r.algorithm == "data_parallel")
  ]


def best(runs: Iterable[Run], key: Callable[[Run], Any]) -> dict[Any, Run]:
  """The run with the least loss for every value of `key`, in order of the values."""
  found: dict[Any, Run] = {}
  for run in runs:
    k = key(run)
    if k not in found or run.loss < found[k].loss:
      found[k] = run
  return dict(sorted(found.items()))


def figure_2(runs: Sequence[Run]):
  """Loss against N by algorithm, and the difference to data-parallel in per cent."""
  cells = best(main_grid(runs), lambda r: (r.curve, r.params))
  plain = {n: r.loss for (name, n), r in cells.items() if name == "data-parallel"}
  figure, (left, right) = _axes(2)
  for name, some in _by_curve(cells.values()).items():
    left.plot([r.params for r in some], [r.loss for r in some], "o-", label=name)
    shared = [r for r in some if r.params in plain]
    if name != "data-parallel" and shared:
      right.plot(
        [r.params for r in shared],
        [100 * (r.loss / plain[r.params] - 1) for r in shared],
        "o-",
        color=left.lines[-1].get_color(),
      )
  left.set(xscale="log", yscale="log", xlabel="parameters N", ylabel="held-out loss")
  right.axhline(0, color="black", lw=0.8)
  right.set(xscale="log", xlabel="parameters N", ylabel="% above data-parallel")
  return _legend(figure, left)


def figure_3(runs: Sequence[Run]):
  """Data-parallel and DiLoCo with M = 1 against the batch, by N."""
  few = [r for r in runs if r.algorithm == "data_parallel" or r.replicas == 1]
  return _batches(few)


def figure_4(runs: Sequence[Run]):
  """All algorithms against the batch, by N; the best rates at every batch."""
  return _batches(runs)


def figure_6(runs: Sequence[Run]):
  """Loss against idealised time (Appendix A) of every batch, on three networks."""
  cells = best(main_grid(runs), lambda r: (r.params, r.curve, r.batch))
  largest = max(_swept(cells.values()), default=0)
  some = [r for r in cells.values() if r.params == largest]
  if not some:
    raise Missing("no size has three batches")
  figure, axes = _axes(3)
  for panel, (name, network) in zip(axes, reversed(wallclock.NETWORKS.items())):
    for curve, points in _by_curve(some).items():
      times = [wallclock.total_time(_training(r, network)) for r in points]
      panel.plot(times, [r.loss for r in points], "o-", label=curve)
    panel.set(xscale="log", xlabel="idealised time (s)", title=f"{name} bandwidth")
  axes[0].set_ylabel(f"held-out loss, N={largest:,.0f}")
  return _legend(figure, axes[0])


def figure_7(runs: Sequence[Run]):
  """Best outer learning rate against N, by M."""
  cells = best(_outer_swept(main_grid(runs)), lambda r: (r.replicas, r.params))
  if not cells:
    raise Missing("no cell has three outer learning rates")
  figure, (panel,) = _axes(1)
  for name, some in _by_curve(cells.values()).items():
    panel.plot([r.params for r in some], [r.outer_rate for r in some], "o-", label=name)
  panel.set(xscale="log", xlabel="parameters N", ylabel=OUTER)
  return _legend(figure, panel)


def figure_8(runs: Sequence[Run]):
  """Best outer learning rate against H (mean over N) and against N (mean over H)."""
  some = _outer_swept(_cadences(runs))
  cells = best(some, lambda r: (r.replicas, r.sync_every, r.params))
  if len({r.sync_every for r in cells.values()}) < 2:
    raise Missing("outer learning rates were tried at one H only")
  figure, panels = _axes(2)
  for panel, field, label in zip(
    panels, ("sync_every", "params"), ("inner steps between syncs H", "parameters N")
  ):
    for name, points in _by_curve(cells.values()).items():
      values = collections.defaultdict(list)
      for r in points:
        values[getattr(r, field)].append(r.outer_rate)
      x = sorted(values)
      panel.plot(x, [statistics.mean(values[v]) for v in x], "o-", label=name)
      low, high = [min(values[v]) for v in x], [max(values[v]) for v in x]
      panel.fill_between(x, low, high, alpha=0.15)
    panel.set(xscale="log", xlabel=label, ylabel=OUTER)
  return _legend(figure, panels[0])


def figure_9(runs: Sequence[Run]):
  """Loss against H by M and N, at the best outer learning rate of each H."""
  cells = best(_cadences(runs), lambda r: (r.params, r.replicas, r.sync_every))
  count = collections.Counter(k[:2] for k in cells)
  sizes = sorted({n for (n, _), c in count.items() if c > 1})
  if not sizes:
    raise Missing("no cell was run at two H")
  figure, panels = _axes(len(sizes))
  for panel, size in zip(panels, sizes):
    points = [r for r in cells.values() if r.params == size]
    for name, some in _by_curve(points, lambda r: r.sync_every).items():
      panel.plot([r.sync_every for r in some], [r.loss for r in some], "o-", label=name)
    panel.set(
      xscale="log", xlabel="inner steps between syncs H", title=f"N={size:,.0f}"
    )
  panels[0].set_ylabel("held-out loss")
  return _legend(figure, panels[0])


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
  figure, (panel,) = _axes(1)
  styles = dict(
    zip(sorted({r.overtrain for r in cells.values()}), ("-", "--", ":", "-."))
  )
  for i, (name, some) in enumerate(_by_curve(cells.values()).items()):
    for multiple, style in styles.items():
      points = [r for r in some if r.overtrain == multiple]
      panel.plot(
        [6 * r.params * r.tokens for r in points],
        [r.loss for r in points],
        "o" + style,
        color=f"C{i}",
        label=name if multiple == 1 else f"{multiple}x" if i == 0 else None,
      )
  panel.set(xscale="log", yscale="log", xlabel="6 N D (FLOP)", ylabel="held-out loss")
  return _legend(figure, panel)


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


def table_4(runs: Sequence[Run]) -> list[str]:
  """Best loss of every cell and its difference to data-parallel, as Markdown."""
  cells = best(main_grid(runs), lambda r: (r.params, r.curve))
  names = list(_by_curve(cells.values()))
  lines = [
    f"| N | {' | '.join(names)} |",
    "|---" * (len(names) + 1) + "|",
  ]
  for size in sorted({n for n, _ in cells}):
    plain = cells.get((size, "data-parallel"))
    row = []
    for name in names:
      r = cells.get((size, name))
      text = f"{r.loss:.4f}" if r else "-"
      if r and plain and r is not plain:
        text += f" ({100 * (r.loss / plain.loss - 1):+.2f}%)"
      row.append(text)
    lines.append(f"| {size:,.0f} | {' | '.join(row)} |")
  return lines


def table_best(runs: Sequence[Run]) -> list[str]:
  """Hyperparameters of the best run of every cell, as Markdown."""
  cells = best(main_grid(runs), lambda r: (r.params, r.curve))
  count = collections.Counter((r.params, r.curve) for r in main_grid(runs))
  lines = [
    "| N | algorithm | runs | learning rate | batch (tokens) | outer rate | loss |",
    "|---|---|---|---|---|---|---|",
  ]
  for (size, name), r in cells.items():
    outer = "-" if name == "data-parallel" else f"{r.outer_rate:g}"
    lines.append(
      f"| {size:,.0f} | {name} | {count[size, name]} | {r.rate:.4g} | {r.batch:,.0f} |"
      f" {outer} | {r.loss:.4f} |"
    )
  return lines


def table_laws(runs: Sequence[Run]) -> list[str]:
  """Power laws A N^alpha (M^beta) of the best runs, as Markdown, and what ails them."""
  converted = [
    results.Run(
      r.algorithm,
      r.params,
      1 if r.algorithm == "data_parallel" else r.replicas,
      r.loss,
      r.rate,
      r.batch,
      0.0 if r.algorithm == "data_parallel" else r.outer_rate,
    )
    for r in main_grid(runs)
  ]
  try:
    laws, problems = results.fit_runs(converted, strict=False)
  except ValueError as error:
    return [f"no laws: {error}"]
  lines = [
    "| runs | loss | learning rate | batch (tokens) |",
    "|---|---|---|---|",
  ]
  for name, law in laws.items():
    row = [_law(fit) for fit in (law.loss, law.learning_rate, law.batch)]
    lines.append(f"| {name} | {' | '.join(row)} |")
  return [*lines, "", *(f"- {problem}" for problem in problems)]


def table_seeds(runs: Sequence[Run]) -> list[str]:
  """Spread over seeds of runs that differ in nothing else."""
  groups = collections.defaultdict(list)
  for r in runs:
    groups[dataclasses.replace(r, seed=0, loss=0.0)].append(r.loss)
  lines = [
    f"{r.curve}, N={r.params:,.0f}: {len(losses)} seeds, {statistics.mean(losses):.4f}"
    f" +- {statistics.stdev(losses):.4f} (standard deviation)"
    for r, losses in groups.items()
    if len(losses) > 1
  ]
  return lines or ["no run was repeated with another seed"]


def _run(row: dict[str, str], least: float) -> Run:
  tokens, params = float(row["tokens"]), float(row["params"])
  return Run(
    algorithm=row["algorithm"],
    replicas=int(row["replicas"]),
    params=params,
    sync_every=int(row["sync_every"]),
    rate=float(row["learning_rate"]),
    outer_rate=float(row["outer_learning_rate"]),
    batch=float(row["batch_sequences"]) * float(row["seq_len"]),
    tokens=tokens,
    overtrain=round(tokens / params / least),
    seed=int(row["seed"]),
    loss=float(row["loss"]),
  )


def _law(fit) -> str:
  """A N^alpha with the interval of alpha; the same of M where it is joint."""
  low, high = fit.interval()["alpha"]
  text = f"{fit.law.A:.4g} N^{fit.law.alpha:.3f} [{low:.3f}, {high:.3f}]"
  if fit.law.beta:
    low, high = fit.interval()["beta"]
    text += f" M^{fit.law.beta:.3f} [{low:.3f}, {high:.3f}]"
  return text


def _by_curve(
  runs: Iterable[Run], x: Callable[[Run], float] = lambda r: r.params
) -> dict[str, list[Run]]:
  """Runs by curve, data-parallel first, each in order of x (then of the batch)."""
  curves = collections.defaultdict(list)
  for r in runs:
    curves[r.algorithm != "data_parallel", r.curve].append(r)
  return {
    k[1]: sorted(curves[k], key=lambda r: (x(r), r.batch)) for k in sorted(curves)
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
  figure, panels = _axes(len(sizes))
  for panel, size in zip(panels, sizes):
    points = [r for r in cells.values() if r.params == size]
    for name, some in _by_curve(points, lambda r: r.batch).items():
      panel.plot([r.batch for r in some], [r.loss for r in some], "o-", label=name)
    panel.set(xscale="log", xlabel="batch (tokens)", title=f"N={size:,.0f}")
  panels[0].set_ylabel("held-out loss, best rates")
  return _legend(figure, panels[0])


def _training(run: Run, network: wallclock.Network) -> wallclock.Training:
  return wallclock.Training(
    params=run.params,
    tokens=run.tokens,
    batch_tokens=run.batch,
    method="data_parallel" if run.algorithm == "data_parallel" else "diloco",
    replicas=run.replicas,
    sync_every=run.sync_every,
    across=network,
  )


def _axes(columns: int):
  """Panels side by side; matplotlib is imported late."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(
    1, columns, figsize=(4 * columns, 3.4), layout="constrained", squeeze=False
  )
  return figure, list(axes[0])


def _legend(figure, axes: Axes):
  """Finishes a figure: grid, few ticks, one legend below the panels."""
  from matplotlib import ticker

  for panel in figure.axes:
    panel.grid(alpha=0.3, which="both", lw=0.5)
    for axis in (panel.xaxis, panel.yaxis):
      if axis.get_scale() == "log":
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=6))
        axis.set_major_formatter(ticker.EngFormatter(sep=""))
        axis.set_minor_formatter(ticker.NullFormatter())
    if panel.get_ylabel() == OUTER:
      panel.set_ylim(0, 1.1)
  columns = 2 if len(figure.axes) == 1 else 4
  handles = axes.get_legend_handles_labels()
  figure.legend(*handles, loc="outside lower center", ncols=columns, fontsize=8)
  return figure


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("table", type=pathlib.Path, help="an exported CSV file")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
  parser.add_argument("--prefix", default="", help="of the pictures' names")
  args = parser.parse_args(argv)
  try:
    runs = read(args.table)
  except (OSError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  args.out.mkdir(parents=True, exist_ok=True)
  for table in (table_4, table_best, table_laws, table_seeds):
    print("\n".join(table(runs)) + "\n")
  for number, draw in FIGURES.items():
    path = args.out / f"{args.prefix}{number}.png"
    try:
      draw(runs).savefig(path, dpi=80)
      print(f"figure {number}: {path}")
    except Missing as why:
      print(f"figure {number}: left out, {why}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
