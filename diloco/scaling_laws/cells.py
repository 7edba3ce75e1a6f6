"""Joins runs by seed, finds the best run of each cell and the problems of its grid.

A cell is an algorithm, a size N and a number of replicas M. The runs of a cell differ
in learning rate, batch size and outer learning rate.
"""

import statistics
from collections.abc import Sequence

import numpy as np
import pandas as pd

from diloco.scaling_laws.fits import Numbers, check_points

CELL = ["algorithm", "replicas", "params"]
# Hyperparameters in which the runs of a cell may differ.
AXES = ["learning_rate", "batch", "outer_learning_rate"]
# Other columns of an export that runs of one setting share.
_SHAPE = ("num_layers", "dim", "vocab_size", "seq_len")
_TEXT = ("tokenizer", "text", "held_out")  # Digests; "" for runs of earlier versions.
_OUTER = "outer_optimizer"
_MORE = (_OUTER, *_SHAPE, "tokens", "sync_every", "config", *_TEXT)
# The most by which D / N of runs of one budget may differ: D is rounded to batches.
BUDGET = 1.1


def joined(runs: pd.DataFrame) -> pd.DataFrame:
  """Joins runs of one setting that differ only in the seed to one row.

  A sweep tunes with one seed, and repeats the best settings with other seeds. `choice`
  finds the best setting. It is the loss of the tuning seed alone: if it were a mean, a
  lucky single run would beat settings that were repeated. The best of many runs is
  partly luck, so the report of a repeated setting leaves out the tuning seed.

  Args:
    runs: a row per run, with the columns of `runs.read`; without `seed`, all seeds
      are 0 and nothing is joined.

  Returns:
    A row per setting, that of the most frequent seed of `runs`, or else of the first.
    `all_losses` has (seed, loss) of every seed; `losses` leaves out the tuning seed,
    which is the most frequent one, if others repeat the setting; `loss` is the mean of
    `losses`. Runs with equal seeds differ in something else, so they stay apart.
  """
  runs = runs.assign(seed=runs.get("seed", 0))
  most = runs["seed"].mode()
  tuning = most[0] if len(most) == 1 else None  # All seeds are alike: none tunes.
  same = [c for c in (*CELL, *AXES, *_MORE) if c in runs]
  rows = {}
  for _, some in runs.groupby(same, sort=False):
    parts = [some] if some["seed"].is_unique else [some.loc[[i]] for i in some.index]
    for part in parts:
      row = part.index[(part["seed"] != most[0]).argmin()]
      every = tuple(zip(part["seed"], part["loss"]))
      rows[row] = tuple(x for x in every if x[0] != tuning) or every, every
  settings = runs.loc[sorted(rows)]
  losses, every = zip(*(rows[i] for i in settings.index))
  means = [statistics.mean(loss for _, loss in some) for some in losses]
  return settings.assign(loss=means, losses=losses, all_losses=every)


def best_of_cells(runs: pd.DataFrame) -> pd.DataFrame:
  """Finds the best run and the best batch of every cell.

  Args:
    runs: as `runs.read` returns them; without `choice`, `loss` chooses.

  Returns:
    A row per cell, ordered by algorithm, M and N: the one with the least `choice`. Its
    `batch` is replaced by the minimum of the quadratic in log2 B (Section 6.1), if the
    quadratic has one. Two columns are added:
      swept: the axes with two or more values in this cell.
      problems: sentences about the cell's grid.

  Raises:
    ValueError: two runs of a cell have the same hyperparameters, or runs differ in what
      is no hyperparameter.
  """
  _refuse_mixed(runs)
  alike = _alike(runs)
  if len(alike):
    run, (first, second, *_) = alike.iloc[0], alike.index
    raise ValueError(
      f"two runs of {_name(run)} have {_values(run, AXES, ', ')} (lines {first} and"
      f" {second}); {_remedy(alike)}."
    )
  runs = runs.assign(choice=runs.get("choice", runs["loss"]))
  swept = runs.groupby("algorithm")[AXES].nunique() > 1
  return pd.DataFrame(
    [
      _best(some, [axis for axis in AXES if swept.loc[algorithm, axis]])
      for (algorithm, *_), some in runs.groupby(CELL)
    ]
  )


def missing_cells(cells: pd.DataFrame) -> dict[tuple[str, int], list[str]]:
  """Returns {(algorithm, M): a sentence for each N that only other cells have}."""
  sizes = set(cells["params"])
  return {
    (algorithm, m): [
      f"{algorithm} has no run at N = {n:g}, M = {m}, but other cells have this N; run"
      " it, or fit without it by --any."
      for n in sorted(sizes - set(some["params"]))
    ]
    for (algorithm, m), some in cells.groupby(["algorithm", "replicas"])
  }


def fit_best_batch(
  batches: Numbers, losses: Numbers, name: str = "the best batch"
) -> float:
  """Fits a quadratic in log2 B to the losses, and finds its minimum (Section 6.1).

  Args:
    batches: batch size B of each run [n], in any unit; no B occurs twice.
    losses: loss of the best learning rate at each B [n].
    name: the cell's name in errors.

  Returns:
    B at the minimum, in the unit of `batches`.

  Raises:
    ValueError: fewer than three batch sizes, no minimum, or a minimum outside the range
      of the batch sizes.
  """
  b, y = np.asarray(batches, float), np.asarray(losses, float)
  check_points(b, y, np.ones_like(b), name)
  if len(b) < 3:
    raise ValueError(
      f"{name}: only {len(b)} batch sizes were tried; the quadratic needs 3: add one."
    )
  x = np.log2(b)
  center = x.mean()
  curvature, slope, _ = np.polyfit(x - center, y, 2)
  low, high = b.min(), b.max()
  if curvature <= 0:
    raise ValueError(
      f"{name}: the loss over log2 B has no minimum between {low:g} and {high:g};"
      " extend the sweep on the side where the loss falls."
    )
  best = float(2 ** (center - slope / (2 * curvature)))
  if not low <= best <= high:
    raise ValueError(
      f"{name}: the quadratic's minimum {best:g} lies outside the batch sizes swept,"
      f" {low:g} to {high:g}; add {'smaller' if best < low else 'larger'} ones."
    )
  return best


def _refuse_mixed(runs: pd.DataFrame) -> None:
  """Refuses runs of other vocabularies, texts, lengths, H, outer optimizers or budgets.

  Their losses follow no common law, and the best run of a cell would be the one with
  the fewest words, the least H or the most tokens.

  Raises:
    ValueError: names the column, two values and how to choose.
  """
  columns = [(column, runs) for column in ("vocab_size", "seq_len", *_TEXT)]
  synced = runs[runs["algorithm"] != "data_parallel"].groupby("algorithm")
  columns += [(x, some) for _, some in synced for x in ("sync_every", _OUTER)]
  for column, some in columns:
    values = some.get(column, pd.Series(dtype=str)).replace("", None).dropna()
    is_text = column in (*_TEXT, _OUTER)
    values = values if is_text else pd.to_numeric(values, errors="coerce")
    first = values.drop_duplicates()
    if len(first) > 1:
      a, b = (str(value).removesuffix(".0") for value in first[:2])
      raise ValueError(
        f"the runs have {column} {a} (line {first.index[0]}) and {b} (line"
        f" {first.index[1]}), so their losses follow no common law; choose by"
        f" --where={column}={a}."
      )
  for _, some in runs[runs["tokens"] > 0].groupby(CELL):
    ends = some.sort_values("tokens").iloc[[0, -1]]
    least, most = ends["tokens"]
    if most > BUDGET * least:
      raise ValueError(
        f"two runs of {_name(ends.iloc[0])} have {least:g} and {most:g} tokens (lines"
        f" {ends.index[0]} and {ends.index[1]}); {_remedy(ends)}."
      )


def _remedy(runs: pd.DataFrame) -> str:
  """Says how to choose one of several runs: by other columns, which are text."""
  text = runs.loc[:, runs.map(lambda x: isinstance(x, str)).all()]
  differ = ", ".join(text.columns[text.nunique() > 1])
  return f"choose by --where; they differ in {differ}" if differ else "keep one"


def _alike(runs: pd.DataFrame) -> pd.DataFrame:
  """Returns the first runs of one cell with the same hyperparameters; else no rows."""
  twice = runs[runs.duplicated([*CELL, *AXES], keep=False)]
  keys = twice[[*CELL, *AXES]]
  return twice[(keys == keys.head(1).squeeze()).all(axis=1)]


def _best(runs: pd.DataFrame, axes: Sequence[str]) -> dict:
  """Makes the row of one cell.

  Args:
    axes: those of which some cell of the algorithm has two values. Another is fixed, or
      the table lacks its column, as the outer learning rate of data-parallel.
  """
  best = runs.loc[runs["choice"].idxmin()]
  problems = [p for axis in axes if (p := _axis_problem(best, runs, axis, axes))]
  # The loss at each batch, with the best rates (Section 6.1).
  losses = runs.groupby("batch", sort=False)["choice"].min()
  batch = best["batch"]
  if len(losses) > 1:
    try:
      batch = fit_best_batch(losses.index, losses, _name(best))
    except ValueError as error:
      problems.append(str(error))
  swept = [axis for axis in axes if runs[axis].nunique() > 1]
  return best.to_dict() | {"batch": batch, "swept": swept, "problems": problems}


def _axis_problem(
  best: pd.Series, runs: pd.DataFrame, axis: str, axes: Sequence[str]
) -> str | None:
  """Says why the best run is not interior along an axis; None if it is.

  The neighbours are the runs with the best run's values on the other axes.
  """
  others = [other for other in axes if other != axis]
  neighbours = runs[(runs[others] == best[others]).all(axis=1)]
  line, value = sorted(neighbours[axis].unique()), best[axis]
  start = f"{_name(best)}: the best {axis}, {value:g}, is the"
  at = _values(best, others, " and ")
  if runs[axis].nunique() == 1:
    return (
      f"{_name(best)}: {axis} was not swept, all its runs have {value:g}; add runs with"
      " smaller and larger ones."
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


def _values(run: pd.Series, axes: Sequence[str], separator: str) -> str:
  return separator.join(f"{axis} {run[axis]:g}" for axis in axes)


def _name(run: pd.Series) -> str:
  return f"{run['algorithm']} at N = {run['params']:g}, M = {run['replicas']}"
