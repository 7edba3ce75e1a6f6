"""Fits to a table of one's own runs: the best run of each cell, then the laws.

A cell is an algorithm, a size N and a number of replicas M. Its runs differ in
learning rate, batch size and outer learning rate.
"""

import collections
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

from diloco.scaling_laws import rows
from diloco.scaling_laws.fits import Fit, fit_best_batch, fit_power_law


@dataclasses.dataclass(frozen=True)
class Run:
  """One finished run.

  Attributes:
    algorithm: data_parallel, diloco, ...
    params: N.
    replicas: M; 1 for data_parallel, which has no replicas.
    loss: evaluation loss.
    learning_rate: inner peak learning rate.
    batch: tokens per step over all replicas.
    outer_learning_rate: 0 where there is none.
  """

  algorithm: str
  params: float
  replicas: int
  loss: float
  learning_rate: float
  batch: float
  outer_learning_rate: float = 0.0

  @property
  def cell(self) -> tuple[str, float, int]:
    return self.algorithm, self.params, self.replicas


@dataclasses.dataclass(frozen=True)
class Best:
  """What a cell's sweep found.

  Attributes:
    run: the run with the least loss.
    batch: tokens at the minimum of the quadratic in log2 B (Section 6.1), or the best
      run's where fewer than three batch sizes or no interior minimum allow none.
    problems: sentences about the cell's grid.
  """

  run: Run
  batch: float
  problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Laws:
  """Laws of one algorithm: loss, inner learning rate, batch in tokens."""

  loss: Fit
  learning_rate: Fit
  batch: Fit


def read_csv(
  path: str | os.PathLike, where: Mapping[str, str] | None = None
) -> list[Run]:
  """Runs of a CSV file, such as a sweep exports.

  Columns: algorithm, params, replicas, loss, learning_rate, and batch_tokens or both
  batch_sequences and seq_len; outer_learning_rate if there is one. Rows whose status
  is not `done` are left out.

  Args:
    path: of the file.
    where: {column: value} that rows must have, such as {'sync_every': '30'}.

  Raises:
    ValueError: no row is left, a column is missing or a value is no number; says the
      line.
  """
  return [make_run(row) for row in rows.read(path, where)]


def make_run(row: rows.Row) -> Run:
  """A run from a row with the columns of `read_csv`.

  Raises:
    ValueError: a column is missing or a value is no number.
  """
  if row.has("batch_sequences"):
    batch = row.number("batch_sequences") * row.number("seq_len")
  else:
    batch = row.number("batch_tokens")
  algorithm = row.text("algorithm")
  plain = algorithm == "data_parallel"
  outer = not plain and row.has("outer_learning_rate")
  return Run(
    algorithm,
    row.number("params"),
    1 if plain else row.whole("replicas"),
    row.number("loss"),
    row.number("learning_rate"),
    batch,
    row.number("outer_learning_rate") if outer else 0.0,
  )


def best_of_cells(runs: Iterable[Run]) -> dict[tuple[str, float, int], Best]:
  """The best run and the best batch of every cell, by algorithm, M and N.

  Raises:
    ValueError: a loss, rate or batch is not positive, or two runs of a cell have the
      same hyperparameters.
  """
  cells = collections.defaultdict(list)
  seen = set()
  for run in runs:
    _check(run)
    point = (*run.cell, run.learning_rate, run.batch, run.outer_learning_rate)
    if point in seen:
      raise ValueError(
        f"two runs of {_describe(run)} have learning_rate {run.learning_rate:g}, batch"
        f" {run.batch:g} and outer_learning_rate {run.outer_learning_rate:g}; keep one,"
        " or tell them apart by a filter on another column."
      )
    seen.add(point)
    cells[run.cell].append(run)
  order = sorted(cells, key=lambda c: (c[0], c[2], c[1]))
  return {cell: _best(cells[cell]) for cell in order}


def fit_runs(
  runs: Iterable[Run], strict: bool = True
) -> tuple[dict[str, Laws], list[str]]:
  """All laws of a table of runs.

  Args:
    runs: of any algorithms.
    strict: whether a best point on the edge of its grid, a batch grid without an
      interior minimum or a missing cell is an error.

  Returns:
    Laws by name, `data_parallel`, `diloco_M2`, ... for each algorithm and M with two
    sizes or more, and `diloco_joint` over all M of an algorithm that has several; and
    the problems found, one sentence each (none if strict).

  Raises:
    ValueError: bad runs; if strict, any problem; too few sizes for a single law.
  """
  best = best_of_cells(runs)
  problems = [p for b in best.values() for p in b.problems] + missing_cells(list(best))
  if strict and problems:
    more = f" ({len(problems) - 1} more of the kind.)" if len(problems) > 1 else ""
    raise ValueError(problems[0] + more)
  groups = collections.defaultdict(list)
  joint = collections.defaultdict(list)
  for (algorithm, _, replicas), b in best.items():
    plain = algorithm == "data_parallel"
    groups[algorithm if plain else f"{algorithm}_M{replicas}"].append(b)
    if not plain:
      joint[f"{algorithm}_joint"].append(b)
  found = {}
  for name, group in groups.items():
    if len(group) < 2:
      problems.append(
        f"{name} has 1 size, N = {group[0].run.params:g}; a law needs at least 2:"
        " add runs."
      )
    else:
      found[name] = _laws(name, group, joint=False)
  for name, group in joint.items():
    if len({b.run.replicas for b in group}) > 1 < len({b.run.params for b in group}):
      found[name] = _laws(name, group, joint=True)
  if not found:
    raise ValueError(problems[-1] if problems else "there are no runs; add some.")
  return found, problems


def missing_cells(cells: Sequence[tuple[str, float, int]]) -> list[str]:
  """One sentence for every cell that a full grid of N and M would have."""
  sizes = sorted({n for _, n, _ in cells})
  present = set(cells)
  wanted = sorted({(a, m) for a, _, m in cells})
  return [
    f"{algorithm} has no run at N = {n:g}, M = {m}, but other cells have this N; run"
    " it, or fit without it (strict=False)."
    for algorithm, m in wanted
    for n in sizes
    if (algorithm, n, m) not in present
  ]


def _best(runs: list[Run]) -> Best:
  run = min(runs, key=lambda r: r.loss)
  where = _describe(run)
  problems = []
  for field in ("learning_rate", "batch"):
    values = {getattr(r, field) for r in runs}
    value = getattr(run, field)
    for side, beyond, end in (
      ("smallest", "smaller", min(values)),
      ("largest", "larger", max(values)),
    ):
      # A single value was not swept here, but taken from somewhere.
      if len(values) > 1 and value == end:
        problems.append(
          f"{where}: the best {field}, {value:g}, is the {side} of {len(values)}"
          f" tried; extend the grid to {beyond} ones until the best is interior."
        )
  # Loss of the best rates at each batch (Section 6.1).
  losses: dict[float, float] = {}
  for r in runs:
    losses[r.batch] = min(r.loss, losses.get(r.batch, r.loss))
  batch = run.batch
  if len(losses) >= 3:
    try:
      batch = fit_best_batch(list(losses), list(losses.values()), where).best_batch
    except ValueError as error:
      problems.append(str(error))
  elif len(losses) == 2:
    problems.append(
      f"{where}: only 2 batch sizes were tried; the quadratic needs 3: add one."
    )
  return Best(run, batch, tuple(problems))


def _laws(name: str, group: list[Best], joint: bool) -> Laws:
  n = [b.run.params for b in group]
  m = [b.run.replicas for b in group] if joint else None
  return Laws(
    *(
      fit_power_law(n, values, m, f"{what} of {name}")
      for what, values in (
        ("the loss", [b.run.loss for b in group]),
        ("the learning rate", [b.run.learning_rate for b in group]),
        ("the batch", [b.batch for b in group]),
      )
    )
  )


def _check(run: Run) -> None:
  for field in ("params", "replicas", "loss", "learning_rate", "batch"):
    value = getattr(run, field)
    if not 0 < value < float("inf"):
      raise ValueError(
        f"{field} is {value:g} in a run of {_describe(run)}; a power law needs positive"
        " numbers: leave the run out or repeat it."
      )


def _describe(run: Run) -> str:
  return f"{run.algorithm} at N = {run.params:g}, M = {run.replicas}"
