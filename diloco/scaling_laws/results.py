"""Fits to a table of one's own runs: the best run of each cell, then the laws.

A cell is an algorithm, a size N and a number of replicas M. Its runs differ in
learning rate, batch size and outer learning rate.
"""

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from diloco.scaling_laws import rows
from diloco.scaling_laws.fits import Fit, fit_best_batch, fit_power_law

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


@dataclasses.dataclass(frozen=True)
class Laws:
  """Laws of one algorithm, and the runs that they hold for.

  Attributes:
    loss, learning_rate, batch: of the evaluation loss, the inner rate and the batch in
      tokens; None where a quantity was swept at fewer sizes (or replica counts) than a
      law needs.
    sizes: all N, rising.
    replicas: all M, rising.
    tokens_per_param: least and most D / N; None where some D is not known.
    outer_rates: best outer rate by M, at the largest N where it was swept, or else at
      the largest N; without M whose outer rates are not known.
    problems: sentences about the cells and about laws that there are none of.
  """

  loss: Fit
  learning_rate: Fit | None
  batch: Fit | None
  sizes: tuple[float, ...]
  replicas: tuple[int, ...]
  tokens_per_param: tuple[float, float] | None
  outer_rates: dict[int, float]
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


def fit_runs(
  runs: Iterable[Run], strict: bool = True
) -> tuple[dict[str, Laws], list[str]]:
  """All laws of a table of runs.

  Args:
    runs: of any algorithms.
    strict: whether a best point on the edge of its grid, a hyperparameter that was not
      swept, batches without an interior minimum or a missing cell is an error.

  Returns:
    Laws by name, `data_parallel`, `diloco_M2`, ... for each algorithm and M with two
    sizes or more, and `diloco_joint` over all M of an algorithm that has several; and
    the problems found, one sentence each (none if strict).

  Raises:
    ValueError: bad runs; if strict, any problem; too few sizes for a single law.
  """
  best = best_of_cells(runs)
  missing = missing_cells(list(best))
  problems = [p for b in best.values() for p in b.problems] + [*missing.values()]
  _refuse(problems if strict else [])
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
      found[name] = _laws(name, group, False, missing)
  for name, group in joint.items():
    if len({b.run.replicas for b in group}) > 1 < len({b.run.params for b in group}):
      try:
        found[name] = _laws(name, group, True, missing)
      except ValueError as error:  # Cells are missing.
        problems.append(str(error))
  if not found:
    raise ValueError(problems[-1] if problems else "there are no runs; add some.")
  # Those of cells are known already, those of the laws are not.
  problems += dict.fromkeys(
    p for law in found.values() for p in law.problems if p not in problems
  )
  _refuse(problems if strict else [])
  return found, problems


def missing_cells(
  cells: Sequence[tuple[str, float, int]],
) -> dict[tuple[str, float, int], str]:
  """A sentence for every cell that a full grid of N and M would have."""
  sizes = sorted({n for _, n, _ in cells})
  present = set(cells)
  wanted = sorted({(a, m) for a, _, m in cells})
  return {
    (algorithm, n, m): f"{algorithm} has no run at N = {n:g}, M = {m}, but other cells"
    " have this N; run it, or fit without it (strict=False)."
    for algorithm, m in wanted
    for n in sizes
    if (algorithm, n, m) not in present
  }


def _refuse(problems: list[str]) -> None:
  if problems:
    more = f" ({len(problems) - 1} more of the kind.)" if len(problems) > 1 else ""
    raise ValueError(problems[0] + more)


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


def _laws(
  name: str,
  group: list[Best],
  joint: bool,
  missing: Mapping[tuple[str, float, int], str],
) -> Laws:
  algorithms, sizes, replicas = (
    tuple(sorted(set(x))) for x in zip(*(b.run.cell for b in group))
  )
  problems = [p for b in group for p in b.problems]
  problems += [
    p for (a, _, m), p in missing.items() if a in algorithms and m in replicas
  ]

  def fit(what: str, some: list[Best], value: Callable[[Best], float]) -> Fit:
    m = [b.run.replicas for b in some] if joint else None
    n, values = [b.run.params for b in some], [value(b) for b in some]
    return fit_power_law(n, values, m, f"the {what} of {name}")

  def fit_swept(field: str, value: Callable[[Best], float]) -> Fit | None:
    some = [b for b in group if field in b.swept]
    n, m = (len({b.run.cell[i] for b in some}) for i in (1, 2))
    try:
      if n < 2 or (joint and m < 2):
        of = f" and {m} replica count(s)" if joint else ""
        raise ValueError(
          f"{name} has no law of the {field}, which was swept at {n} size(s){of};"
          " sweep it at 2 or more."
        )
      return fit(field, some, value)
    except ValueError as error:
      problems.append(str(error))
      return None

  ratios = [b.run.tokens / b.run.params for b in group]
  # The last one of an M stays: swept before not swept, then large before small.
  order = sorted(group, key=lambda b: (AXES[2] in b.swept, b.run.params))
  return Laws(
    fit("loss", group, lambda b: b.run.loss),
    fit_swept("learning_rate", lambda b: b.run.learning_rate),
    fit_swept("batch", lambda b: b.batch),
    sizes,
    replicas,
    (min(ratios), max(ratios)) if all(ratios) else None,
    {
      b.run.replicas: b.run.outer_learning_rate
      for b in order
      if b.run.outer_learning_rate
    },
    tuple(problems),
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
