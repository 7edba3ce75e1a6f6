"""Fits laws to your own runs: to the best run of every cell."""

import dataclasses
from itertools import chain

import pandas as pd

from diloco.scaling_laws.cells import BUDGET, best_of_cells, missing_cells
from diloco.scaling_laws.fits import Fit, fit_power_law


@dataclasses.dataclass(frozen=True)
class Laws:
  """The laws of one algorithm, and the runs that they were fitted to.

  Attributes:
    loss: law of the evaluation loss.
    learning_rate: law of the inner learning rate; None if the rate was swept at too few
      N (or M), or if all runs have one value.
    batch: law of the batch in tokens; None for the same reasons as `learning_rate`.
    sizes: all N, in rising order.
    replicas: all M, in rising order.
    tokens_per_param: least and greatest D / N; None if some D is unknown.
    outer_rates: {M: best outer rate at the largest N with a sweep of the outer rate}.
      Without such a sweep, the largest N counts. An M without known outer rates is left
      out.
    seq_len: tokens per sequence; None if unknown.
    one_batch: the batch that all cells share; None if they differ.
    problems: sentences about the cells, and about quantities without a law.
    notes: sentences about laws that may be biased, which is no reason to refuse them.
  """

  loss: Fit
  learning_rate: Fit | None
  batch: Fit | None
  sizes: tuple[float, ...]
  replicas: tuple[int, ...]
  tokens_per_param: tuple[float, float] | None
  outer_rates: dict[int, float]
  seq_len: int | None = None
  one_batch: float | None = None
  problems: tuple[str, ...] = ()
  notes: tuple[str, ...] = ()


def fit_runs(
  runs: pd.DataFrame, strict: bool = True
) -> tuple[dict[str, Laws], list[str]]:
  """Fits all laws of a table of runs.

  Args:
    runs: as `runs.read` returns them, of any algorithms.
    strict: whether a problem raises an error. Problems are, for example, a best point
      on the edge of its grid, a rate or batch that only other cells swept, batches
      without an interior minimum, and a missing cell. A rate or batch that all runs of
      an algorithm share is no problem.

  Returns:
    {name: laws}, and the problems, one sentence each (none if strict). Each algorithm
    and M with two or more sizes has laws: `data_parallel`, `diloco_M2`, ... An
    algorithm with several M also has laws over all of them, such as `diloco_joint`.

  Raises:
    ValueError: the runs are bad, there is a problem and `strict`, or no law can be
      fitted because there are too few sizes.
  """
  cells = best_of_cells(runs)
  missing = missing_cells(cells)
  problems = [*chain(*cells["problems"], *missing.values())]
  groups = {
    algorithm if algorithm == "data_parallel" else f"{algorithm}_M{m}": some
    for (algorithm, m), some in cells.groupby(["algorithm", "replicas"])
  }
  for algorithm, some in cells.groupby("algorithm"):
    if some["replicas"].nunique() > 1 < some["params"].nunique():
      groups[f"{algorithm}_joint"] = some
  laws = {}
  for name, group in groups.items():
    try:
      laws[name] = _laws(name, group, missing)
    except ValueError as error:  # Too few cells.
      problems.append(str(error))
  # Several laws share a cell and report its problems again: lists each problem once.
  every = chain(problems, *(law.problems for law in laws.values()))
  problems = list(dict.fromkeys(every))
  if strict and problems:
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    raise ValueError(f"{problems[0]} To fit despite this{more}: --any.")
  if not laws:
    raise ValueError(problems[-1])
  return laws, problems


def _laws(
  name: str, cells: pd.DataFrame, missing: dict[tuple[str, int], list[str]]
) -> Laws:
  """Fits the laws of cells that have one algorithm, and one or several M."""
  algorithm, replicas = cells["algorithm"].iloc[0], sorted(set(cells["replicas"]))
  problems = [*chain(*cells["problems"], *(missing[algorithm, m] for m in replicas))]

  def fit(quantity: str, some: pd.DataFrame) -> Fit:
    m = some["replicas"] if name.endswith("_joint") else None
    return fit_power_law(some["params"], some[quantity], m, f"the {quantity} of {name}")

  def fit_swept(axis: str) -> Fit | None:
    some = cells[[axis in swept for swept in cells["swept"]]]
    if some.empty and cells[axis].nunique() == 1:
      return None  # The user fixed the value, which is no problem.
    try:
      return fit(axis, some)
    except ValueError as error:
      problems.append(f"{name} has no law of the {axis}: {error}")
      return None

  loss = fit("loss", cells)
  if loss.law.alpha >= 0:
    problems.append(
      f"the loss of {name} does not fall with N (alpha is {loss.law.alpha:.3g}), so its"
      " law predicts nothing: tune larger sizes, or give each N its share of tokens."
    )
  ratios = cells["tokens"] / cells["params"]
  least, most = min(ratios), max(ratios)
  if most > BUDGET * least > 0:
    problems.append(
      f"the runs of {name} had {least:.3g} to {most:.3g} tokens per parameter, which"
      " the law of the loss mixes: choose rows of one budget by --where."
    )
  rate, batch = fit_swept("learning_rate"), fit_swept("batch")
  lone = cells["lone"].sum()
  # A sweep that ends at an interior best run leaves a cross. The loss at another batch
  # is then too high, because its best rate differs from that of the best run.
  note = (
    f"{name}: at {lone} of the batches beside the best ones only one rate was tried, so"
    " its law of the batch may be too near to the best runs' batches: tune the rate at"
    " the other batches, too."
  )
  # dict() keeps the last rate of each M, so the sort puts swept rates and large N last.
  outer = cells[cells["outer_learning_rate"] > 0]
  outer = outer.assign(swept=["outer_learning_rate" in s for s in outer["swept"]])
  outer = outer.sort_values(["swept", "params"])
  lengths = pd.to_numeric(cells.get("seq_len", pd.Series()), errors="coerce").dropna()
  return Laws(
    loss,
    rate,
    batch,
    tuple(sorted(set(cells["params"]))),
    tuple(replicas),
    (least, most) if least else None,
    dict(zip(outer["replicas"], outer["outer_learning_rate"])),
    int(lengths.iloc[0]) if len(lengths) else None,
    cells["batch"].iloc[0] if cells["batch"].nunique() == 1 else None,
    tuple(problems),
    (note,) if batch and lone else (),
  )
