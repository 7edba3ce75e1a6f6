"""Joins runs by seed, finds each cell's best run, and checks each cell's grid.

A cell is an algorithm, a size N and a number of replicas M. The runs of a cell differ
in learning rate, batch size and outer learning rate.
"""

import json
import statistics
from collections.abc import Sequence

import numpy as np
import pandas as pd

from diloco.scaling_laws.fits import Numbers, check_points

CELL = ["algorithm", "replicas", "params"]
# Hyperparameters in which the runs of a cell may differ.
AXES = ["learning_rate", "batch", "outer_learning_rate"]
# Runs of one setting also have equal values in these columns of a sweep's export.
_SHAPE = ("num_layers", "dim", "vocab_size", "seq_len")
_TEXT = ("tokenizer", "text", "held_out")  # Digests; "" for runs of earlier versions.
_OUTER = "outer_optimizer"
_MORE = (_OUTER, *_SHAPE, "tokens", "sync_every", "config", *_TEXT)
# D / N of runs with one budget may differ by this factor, as D is rounded to batches.
BUDGET = 1.1


def joined(runs: pd.DataFrame) -> pd.DataFrame:
  """Joins runs that differ only in the seed into one row.

  A sweep tunes with one seed, and repeats the best settings with other seeds. The best
  setting has the least `choice`, which is the loss of the tuning seed alone. If
  `choice` were a mean over seeds, a lucky single run would beat repeated settings. The
  best of many runs is partly lucky, so the `loss` of a repeated setting leaves out the
  tuning seed.

  Args:
    runs: one row per run, with the columns of `runs.read`. Without the column `seed`,
      all seeds count as 0 and nothing is joined.

  Returns:
    One row per setting: its run with the most frequent seed of `runs`, or else its
    first run. The tuning seed is the most frequent seed, unless several seeds are
    equally frequent. `all_losses` has (seed, loss) of every seed. `losses` leaves out
    the tuning seed if other seeds repeat the setting. `loss` is the mean of `losses`.
    Runs with equal seeds differ in something else, so they are not joined.
  """
  runs = runs.assign(seed=runs.get("seed", 0))
  most = runs["seed"].mode()
  tuning = most[0] if len(most) == 1 else None  # In a tie, no seed is the tuning seed.
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
    runs: as `runs.read` returns them; without the column `choice`, `loss` chooses.
      The runs of `attrs["failed"]` count as neighbours that are worse.

  Returns:
    One row per cell, ordered by algorithm, M and N: the run with the least `choice`.
    Its `batch` is replaced by the result of `fit_best_batch` (Section 6.1), if this fit
    finds a minimum. Three columns are added:
      swept: the axes with two or more values in this cell.
      lone: how many batches, except that of the best run, were tried with one rate.
      problems: sentences about the cell's grid.

  Raises:
    ValueError: two runs of a cell have the same hyperparameters, or runs differ in
      something else, such as the vocabulary (see `_refuse_mixed`).
  """
  _refuse_mixed(runs)
  for _, alike in runs.groupby([*CELL, *AXES], sort=False):
    if len(alike) > 1:
      run, (first, second, *_) = alike.iloc[0], alike.index
      raise ValueError(
        f"two runs of {_name(run)} have {_values(run, AXES, ', ')} (lines {first} and"
        f" {second}); {_remedy(alike)}."
      )
  failed = runs.attrs.get("failed", runs[:0])
  runs = runs.assign(choice=runs.get("choice", runs["loss"]))
  swept = runs.groupby("algorithm")[AXES].nunique() > 1
  return pd.DataFrame(
    [
      _best(some, [axis for axis in AXES if swept.loc[algorithm, axis]], failed)
      for (algorithm, *_), some in runs.groupby(CELL)
    ]
  )


def missing_cells(cells: pd.DataFrame) -> dict[tuple[str, int], list[str]]:
  """Returns {(algorithm, M): one sentence for each N that only other pairs have}."""
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
  """Refuses runs that differ in vocabulary, text, seq_len, H, outer optimizer, tokens.

  The runs of a cell must also send alike: with equal tau, format and fragments.

  Losses of such runs follow no common law. The best run of a cell would just be the run
  with the smallest vocabulary, the least H or the most tokens.

  Raises:
    ValueError: runs differ; the message has two different values and the remedy.
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

  for _, some in runs[runs["algorithm"] != "data_parallel"].groupby(CELL):
    fields = some.get("config", pd.Series(dtype=str)).map(_sending)
    for line, sent in fields.items():
      first = fields.iloc[0]
      if differ := sorted(f for f in sent | first if sent.get(f) != first.get(f)):
        ends = some.loc[[some.index[0], line]]
        raise ValueError(
          f"two runs of {_name(some.iloc[0])} differ in {', '.join(differ)} (lines"
          f" {some.index[0]} and {line}), so none is the best by its rate;"
          f" {_remedy(ends)}."
        )


def _sending(config: str) -> dict:
  """Returns the fields of a run's `config` that say what is sent, and when."""
  try:
    fields = json.loads(config).items()
  except (ValueError, AttributeError, TypeError):  # A table that was written by hand.
    return {}
  return {f: x for f, x in fields if f.startswith(("overlap.", "wire.", "fragments."))}


def _remedy(runs: pd.DataFrame) -> str:
  """Says how to choose one of several runs: by the text columns that differ."""
  text = runs.loc[:, runs.map(lambda x: isinstance(x, str)).all()]
  differ = ", ".join(text.columns[text.nunique() > 1])
  return f"choose by --where; they differ in {differ}" if differ else "keep one"


def _best(runs: pd.DataFrame, axes: Sequence[str], failed: pd.DataFrame) -> dict:
  """Makes the row of one cell.

  Args:
    axes: the AXES that have two or more values in all runs of the algorithm together.
      The other axes are fixed, or do not exist: data-parallel has no outer rate.
    failed: failed runs of all cells.
  """
  best = runs.loc[runs["choice"].idxmin()]
  tried = pd.concat([runs, failed[(failed[CELL] == best[CELL]).all(axis=1)]])
  problems = [p for axis in axes if (p := _axis_problem(best, tried, axis, axes))]
  # The least loss at each batch, over all rates (Section 6.1).
  losses = runs.groupby("batch", sort=False)["choice"].min()
  batch = best["batch"]
  if len(losses) > 1:
    try:
      batch = fit_best_batch(losses.index, losses, _name(best))
    except ValueError as error:
      problems.append(str(error))
  rates = tried.groupby("batch")["learning_rate"].nunique()[losses.index]
  return best.to_dict() | {
    "batch": batch,
    "swept": [axis for axis in axes if runs[axis].nunique() > 1],
    "lone": (rates.drop(best["batch"]) == 1).sum(),
    "problems": problems,
  }


def _axis_problem(
  best: pd.Series, runs: pd.DataFrame, axis: str, axes: Sequence[str]
) -> str | None:
  """Says why the best run is not interior along an axis; None if it is interior.

  Only runs that equal the best run on all other axes count as its neighbours.
  """
  others = [other for other in axes if other != axis]
  neighbours = runs[(runs[others] == best[others]).all(axis=1)]
  line, value = sorted(neighbours[axis].unique()), best[axis]
  start = f"{_name(best)}: the best {axis}, {value:g}, is the"
  at = f" with {_values(best, others, ' and ')}" if others else ""
  if runs[axis].nunique() == 1:
    return (
      f"{_name(best)}: {axis} was not swept, all its runs have {value:g}; add runs with"
      " smaller and larger ones."
    )
  if len(line) == 1:
    return f"{start} only one tried{at}; add smaller and larger ones there."
  if line[0] < value < line[-1]:
    return None
  side, beyond = ("smallest", "smaller") if value == line[0] else ("largest", "larger")
  return (
    f"{start} {side} of {len(line)} tried{at}; extend the grid to {beyond} ones"
    " until the best is interior."
  )


def _values(run: pd.Series, axes: Sequence[str], separator: str) -> str:
  return separator.join(f"{axis} {run[axis]:g}" for axis in axes)


def _name(run: pd.Series) -> str:
  return f"{run['algorithm']} at N = {run['params']:g}, M = {run['replicas']}"
