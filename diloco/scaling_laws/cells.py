"""Cells of a table of one's own runs: the best run of each, and what ails its grid.

A cell is an algorithm, a size N and a number of replicas M. Its runs differ in
learning rate, batch size and outer learning rate.
"""

import collections
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

from diloco.scaling_laws import rows
from diloco.scaling_laws.best_batch import fit_best_batch

# What a cell's runs differ in.
AXES = ("learning_rate", "batch", "outer_learning_rate")


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
    outer_learning_rate: 0 where there is none, or where it is not known.
    tokens: D; 0 where it is not known.
  """

  algorithm: str
  params: float
  replicas: int
  loss: float
  learning_rate: float
  batch: float
  outer_learning_rate: float = 0.0
  tokens: float = 0.0

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
    swept: fields of which the cell has two values or more.
    problems: sentences about the cell's grid.
  """

  run: Run
  batch: float
  swept: tuple[str, ...] = ()
  problems: tuple[str, ...] = ()


def read_csv(
  path: str | os.PathLike, where: Mapping[str, str] | None = None
) -> list[Run]:
  """Runs of a CSV file, such as a sweep exports.

  Columns: algorithm, params, replicas, loss, learning_rate, and batch_tokens or both
  batch_sequences and seq_len; outer_learning_rate and tokens if they are known. Rows
  whose status is not `done` are left out.

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
    row.number("tokens") if row.has("tokens") else 0.0,
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


def missing_cells(
  cells: Sequence[tuple[str, float, int]],
) -> dict[tuple[str, float, int], str]:
  """A sentence for every cell that a full grid of N and M would have."""
  sizes = sorted({n for _, n, _ in cells})
  present = set(cells)
  wanted = sorted({(a, m) for a, _, m in cells})
  return {
    (algorithm, n, m): f"{algorithm} has no run at N = {n:g}, M = {m}, but other cells"
    " have this N; run it, or fit without it (--any, strict=False)."
    for algorithm, m in wanted
    for n in sizes
    if (algorithm, n, m) not in present
  }


def _best(runs: list[Run]) -> Best:
  run = min(runs, key=lambda r: r.loss)
  where = _describe(run)
  # Data-parallel has no outer rate, and a table need not have its column.
  axes = AXES if any(r.outer_learning_rate for r in runs) else AXES[:2]
  swept = tuple(f for f in axes if len({getattr(r, f) for r in runs}) > 1)
  problems = [p for p in (_axis_problem(run, runs, f, axes) for f in axes) if p]
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
  return Best(run, batch, swept, tuple(problems))


def _axis_problem(
  run: Run, runs: list[Run], field: str, axes: Sequence[str]
) -> str | None:
  """What is wrong with the values of a field beside the best run, if anything.

  Only runs that have the best one's other values can show that it is interior.
  """
  others = [f for f in axes if f != field]
  beside = [r for r in runs if all(getattr(r, f) == getattr(run, f) for f in others)]
  line = sorted({getattr(r, field) for r in beside})
  value = getattr(run, field)
  start = f"{_describe(run)}: the best {field}, {value:g}, is the"
  at = " and ".join(f"{f} {getattr(run, f):g}" for f in others)
  if len({getattr(r, field) for r in runs}) == 1:
    return (
      f"{_describe(run)}: {field} was not swept, all its runs have {value:g}; add runs"
      " with smaller and larger ones."
    )
  if len(line) == 1:
    return f"{start} only one tried with {at}; add smaller and larger ones there."
  if line[0] < value < line[-1]:
    return None
  side, beyond = ("smallest", "smaller") if value == line[0] else ("largest", "larger")
  return (
    f"{start} {side} of {len(line)} tried with {at}; extend the grid to {beyond} ones"
    " until the best is interior."
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
