"""Writes Markdown tables of a sweep: losses, best points, laws, spread over seeds."""

import math
import statistics
from collections.abc import Iterable, Mapping

import pandas as pd

from diloco.reproduce.runs import PLAIN, above_plain, best, curves, main_grid
from diloco.scaling_laws import results
from diloco.scaling_laws.fits import Fit
from diloco.scaling_laws.uncertainty import show

# The number of problems that are printed below the laws.
MOST_PROBLEMS = 5


def losses(table: pd.DataFrame) -> list[str]:
  """Lists the best loss of every cell and the difference from data-parallel.

  Numbers are means over seeds; differences of several seeds have a standard deviation.
  """
  cells = best(main_grid(table), "params", "curve")
  text = cells["loss"].map("{:.4f}".format)
  for i, row in above_plain(cells).iterrows():
    spread = "" if math.isnan(row["more_std"]) else f" ± {row['more_std']:.2f}"
    text[i] += f" ({row['more']:+.2f}{spread}%)"
  wide = cells.assign(text=text).pivot(index="params", columns="curve", values="text")
  columns = {"N": wide.index.map("{:,.0f}".format)}
  return markdown(columns | {name: wide[name].fillna("-") for name in curves(cells)})


def best_points(table: pd.DataFrame) -> list[str]:
  """Lists the hyperparameters of the best run of every cell."""
  main = main_grid(table)
  cells = best(main, "params", "curve")
  outer = cells["outer_learning_rate"].map("{:g}".format)
  return markdown(
    {
      "N": cells["params"].map("{:,.0f}".format),
      "algorithm": cells["curve"],
      "settings tried": main.groupby(["params", "curve"]).size(),
      "learning rate": cells["learning_rate"].map("{:.4g}".format),
      "batch (tokens)": cells["batch"].map("{:,.0f}".format),
      "outer rate": outer.where(cells["curve"] != PLAIN, "-"),
      "loss": cells["loss"].map("{:.4f}".format),
    }
  )


def laws(table: pd.DataFrame) -> list[str]:
  """Fits power laws A N^alpha (M^beta) to the best runs; lists the cells' problems."""
  try:
    by_runs, problems = results.fit_runs(main_grid(table), strict=False)
  except ValueError as error:
    return [f"no laws: {error}"]
  columns = {
    "runs": by_runs,
    "loss": [_law(law.loss) for law in by_runs.values()],
    "learning rate": [_law(law.learning_rate) for law in by_runs.values()],
    "batch (tokens)": [_law(law.batch) for law in by_runs.values()],
  }
  listed = [f"- {problem}" for problem in problems[:MOST_PROBLEMS]]
  if more := problems[MOST_PROBLEMS:]:
    listed.append(
      f"- {len(more)} more like these: python -m diloco scaling_laws fit TABLE --any"
    )
  return [*markdown(columns), "", *listed]


def seeds(table: pd.DataFrame) -> list[str]:
  """Lists the spread of the loss over runs that differ only in the seed."""
  lines = [
    f"{row['curve']}, N={row['params']:,.0f}: {len(row['losses'])} seeds,"
    f" {row['loss']:.4f} ± {statistics.stdev(dict(row['losses']).values()):.4f}"
    " (standard deviation)"
    for row in table.to_dict("records")
    if len(row["losses"]) > 1
  ]
  return lines or ["no run was repeated with another seed"]


def _law(fit: Fit | None) -> str:
  """Formats A N^alpha (M^beta) with the intervals of the exponents."""
  if fit is None:
    return "-"
  text = f"{fit.law.A:.4g}"
  for base, name in zip("NM", fit.names[1:]):
    exponent = show(getattr(fit.law, name), fit.interval()[name], ".3f")
    text += f" {base}^{exponent}"
  return text


def markdown(columns: Mapping[str, Iterable]) -> list[str]:
  """Formats columns of texts or numbers as lines of a Markdown table."""
  rows = [list(columns), ["---"] * len(columns), *zip(*columns.values())]
  head, rule, *body = [f"| {' | '.join(map(str, row))} |" for row in rows]
  return [head, rule.replace(" ", ""), *body]
