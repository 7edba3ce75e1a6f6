"""Laws of one's own runs, from the best of every cell."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping

from diloco.scaling_laws.cells import AXES, Best, Run, best_of_cells, missing_cells
from diloco.scaling_laws.fits import Fit, fit_power_law


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


def _refuse(problems: list[str]) -> None:
  if problems:
    more = f" ({len(problems) - 1} more of the kind.)" if len(problems) > 1 else ""
    raise ValueError(problems[0] + more)


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

  loss = fit("loss", group, lambda b: b.run.loss)
  if loss.law.alpha >= 0:
    problems.append(
      f"the loss of {name} does not fall with N (alpha is {loss.law.alpha:.3g}), so its"
      " law predicts nothing: tune larger sizes, or give each N its share of tokens."
    )
  ratios = [b.run.tokens / b.run.params for b in group]
  # The last one of an M stays: swept before not swept, then large before small.
  order = sorted(group, key=lambda b: (AXES[2] in b.swept, b.run.params))
  return Laws(
    loss,
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
