"""Compares the claims of both papers about learning with what our runs show.

Each claim of paper_claims.toml gets one difference per seed, and a verdict.
"""

import dataclasses
import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence

import pandas as pd
import scipy.special

from diloco.reproduce.comparison import markdown
from diloco.sweep.search import Search
from diloco.util.shipped import PACKAGE

# The columns of the page of claims; `here` is our number.
COLUMNS = ("claim", "source", "kind", "paper", "here", "command", "cost", "verdict")
Row = dict[str, str]

LADDER = "ladder"  # The ladder's name among the names of the ablations.

SHOWN, NOT_SHOWN, CONTRADICTED = "shown", "undecided", "contradicted"
NO_RUNS, MISSING, FAILED = "no runs yet", "runs are missing", "runs have failed"
# A confidence interval contains the true mean with this probability.
CONFIDENCE = 0.9


@dataclasses.dataclass(frozen=True)
class Claim:
  """A claim of a paper: by how many per cent `a` lies above `b`.

  Attributes:
    ablation: name of the ablation whose runs decide, or `ladder`.
    text: the claim in words.
    source: paper, table or figure.
    paper: the paper's number.
    a, b: {key: value} that the points to compare must have. If a seed has several such
      points, the point with the least `choice` counts.
    low, high: bounds that the claim sets for 100 * (a / b - 1).
    column: the number to compare: `loss`, `accuracy` or a key of the points.
    than: a second pair (a, b), whose difference is subtracted.
  """

  ablation: str
  text: str
  source: str
  paper: str
  a: Mapping
  b: Mapping
  low: float = -math.inf
  high: float = math.inf
  column: str = "loss"
  than: Sequence[Mapping] | None = None


_FILE = PACKAGE / "reproduce" / "paper_claims.toml"
CLAIMS = tuple(Claim(**claim) for claim in tomllib.loads(_FILE.read_text())["claims"])


def differences(claim: Claim, found: pd.DataFrame) -> list[float]:
  """Returns 100 * (a / b - 1) per seed with both points, minus `than`'s difference.

  Args:
    claim: the claim.
    found: the table of `comparison.frame`: a row per run, with the keys of its point,
      seed, loss, and choice, which is the loss that chooses the best run.
  """

  def by_seed(keys: Mapping) -> pd.Series:
    some = found
    for key, value in keys.items():
      some = some[some[key] == value]
    best = some.loc[some.groupby("seed")["choice"].idxmin()]
    return best.set_index("seed")[claim.column]

  def more(a: Mapping, b: Mapping) -> pd.Series:  # NaN where a seed is missing.
    return 100 * (by_seed(a) / by_seed(b) - 1)

  if found.empty:
    return []
  values = more(claim.a, claim.b)
  if claim.than:
    values = values - more(*claim.than)
  return values.dropna().tolist()


def interval(values: Sequence[float]) -> tuple[float, float]:
  """Returns Student's interval of the mean; one value has an unbounded interval."""
  if len(values) < 2:
    return -math.inf, math.inf
  quantile = scipy.special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)
  half = quantile * statistics.stdev(values) / math.sqrt(len(values))
  mean = statistics.mean(values)
  return mean - half, mean + half


def span(claim: Claim, values: Sequence[float]) -> tuple[float, float]:
  """Returns the bounds that decide a claim: the mean's interval, or the values' range.

  Best rates and batches are points of a grid, and may be equal for all seeds. Student's
  interval does not fit them, so their range decides: all seeds must agree.
  """
  if claim.column not in ("loss", "accuracy") and len(values) > 1:
    return min(values), max(values)
  return interval(values)


def verdict(claim: Claim, values: Sequence[float]) -> str:
  """Compares the span of the values with the range that a claim allows.

  Returns:
    NO_RUNS without values, SHOWN if the span lies in the range, CONTRADICTED if the
    whole span lies outside, else NOT_SHOWN.
  """
  if not values:
    return NO_RUNS
  least, most = span(claim, values)
  if claim.low < least and most < claim.high:
    return SHOWN
  return CONTRADICTED if most < claim.low or least > claim.high else NOT_SHOWN


def rows(
  claims: Sequence[Claim],
  tables: Mapping[str, pd.DataFrame],
  cells: Mapping[str, Sequence[Search]],
  hours: Callable[[Sequence[Search]], float],
) -> list[Row]:
  """Makes the rows of claims that runs decide; docs/claims.md explains the numbers.

  A claim has no verdict before all runs that it asks for have ended: the best of some
  rates may not be the best of all.

  Args:
    claims: the claims; claims of ablations that `tables` lacks are left out.
    tables: {ablation: the table of its runs, as `found` in `differences`}.
    cells: {ablation: its cells}.
    hours: returns the core-hours that the runs of some cells have taken.
  """
  decided_rows = []
  for claim in claims:
    if claim.ablation not in tables:
      continue
    values = differences(claim, tables[claim.ablation])
    asked = [one for one in cells[claim.ablation] if _asks_for(claim, one.cell)]
    if not all(one.ended for one in asked):
      decided = MISSING if values else NO_RUNS
    else:
      failed = any(one.state == "failed" for one in asked)
      decided = FAILED if failed else verdict(claim, values)
    here = f"{_formatted(claim, values)}; shown if {_range(claim)}"
    command, cost = f"reproduce --only={claim.ablation} --out=OUT", hours(asked)
    words = (claim.text, claim.source, "trained", claim.paper, here, command)
    decided_rows.append(dict(zip(COLUMNS, (*words, f"{cost:.2f} h", decided))))
  return decided_rows


def table(found: Sequence[Row]) -> pd.DataFrame:
  """Returns the claims as docs/claims.csv has them: contradicted claims first."""
  claims = pd.DataFrame(found, columns=["verdict", *COLUMNS[:-1], "choice"]).fillna("")
  last = {SHOWN: 3, NOT_SHOWN: 2, CONTRADICTED: 0}  # All other verdicts have rank 1.
  rank = claims["verdict"].map(lambda verdict: last.get(verdict, 1))
  return claims.loc[rank.sort_values(kind="stable").index]


def lines(found: Sequence[Row]) -> list[str]:
  """Formats rows as a Markdown table, with the commands as code."""
  code = [f"`{row['command']}`" if row["command"] != "-" else "-" for row in found]
  columns = {key: [row[key] for row in found] for key in COLUMNS}
  return markdown(columns | {"command": code})


def counts(found: Sequence[Row]) -> list[str]:
  """Counts the verdicts by kind, as a Markdown table."""
  table = pd.crosstab(
    *(pd.Series([r[k] for r in found], name=k) for k in ("kind", "verdict"))
  )
  return markdown({"kind": table.index, **table.to_dict("list")})


def _asks_for(claim: Claim, cell: Mapping) -> bool:
  points = [claim.a, claim.b, *(claim.than or ())]
  return any(all(cell.get(k, v) == v for k, v in keys.items()) for keys in points)


def _range(claim: Claim) -> str:
  """Formats the range that a claim allows; every claim has exactly one bound."""
  above = claim.low > -math.inf
  bound = f"above {claim.low:g}" if above else f"below {claim.high:g}"
  return bound + _unit(claim)


def _unit(claim: Claim) -> str:
  return " points" if claim.than else "%"


def _formatted(claim: Claim, values: Sequence[float]) -> str:
  if not values:
    return "-"
  least, most = span(claim, values)
  text = f"{statistics.mean(values):+.2f}{_unit(claim)}"
  if len(values) > 1:
    text += f" [{least:+.2f}, {most:+.2f}]"
  return f"{text}, {len(values)} seed{'s' * (len(values) > 1)}"
