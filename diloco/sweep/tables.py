"""Tables of a sweep as Markdown: losses, best points, laws, spread over seeds."""

import collections
import dataclasses
import statistics
from collections.abc import Sequence

from diloco.scaling_laws import cells as cells_lib
from diloco.scaling_laws import results
from diloco.scaling_laws.fits import Fit
from diloco.sweep.runs import Run, best, by_curve, main_grid

# Sentences about the cells that are printed beside the laws.
MOST_PROBLEMS = 5


def losses(runs: Sequence[Run]) -> list[str]:
  """Best loss of every cell and its difference to data-parallel, as Markdown."""
  cells = best(main_grid(runs), lambda r: (r.params, r.curve))
  names = list(by_curve(cells.values()))
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


def best_points(runs: Sequence[Run]) -> list[str]:
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


def laws(runs: Sequence[Run]) -> list[str]:
  """Power laws A N^alpha (M^beta) of the best runs, as Markdown, and what ails them."""
  converted = [
    cells_lib.Run(
      r.algorithm,
      r.params,
      1 if r.algorithm == "data_parallel" else r.replicas,
      r.loss,
      r.rate,
      r.batch,
      0.0 if r.algorithm == "data_parallel" else r.outer_rate,
      r.tokens,
    )
    for r in main_grid(runs)
  ]
  try:
    found, problems = results.fit_runs(converted, strict=False)
  except ValueError as error:
    return [f"no laws: {error}"]
  lines = [
    "| runs | loss | learning rate | batch (tokens) |",
    "|---|---|---|---|",
  ]
  for name, law in found.items():
    fits = (law.loss, law.learning_rate, law.batch)
    row = [_law(fit) if fit else "-" for fit in fits]
    lines.append(f"| {name} | {' | '.join(row)} |")
  told = [f"- {problem}" for problem in problems[:MOST_PROBLEMS]]
  if more := problems[MOST_PROBLEMS:]:
    told.append(
      f"- {len(more)} more like these: python -m diloco.scaling_laws fit TABLE --any"
    )
  return [*lines, "", *told]


def seeds(runs: Sequence[Run]) -> list[str]:
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


def _law(fit: Fit) -> str:
  """A N^alpha with the interval of alpha; the same of M where it is joint."""
  spans = {
    k: f"[{i[0]:.3f}, {i[1]:.3f}]" if i else "[-]" for k, i in fit.interval().items()
  }
  text = f"{fit.law.A:.4g} N^{fit.law.alpha:.3f} {spans['alpha']}"
  if "beta" in spans:
    text += f" M^{fit.law.beta:.3f} {spans['beta']}"
  return text
