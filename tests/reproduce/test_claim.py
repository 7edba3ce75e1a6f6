"""diloco/reproduce/claim.py: differences over seeds, intervals, verdicts."""

import math

import numpy as np
import pandas as pd
import pytest

from diloco.reproduce import claim
from diloco.sweep.grid import Grid
from diloco.sweep.search import Search


def claim_of(column="loss", **bounds):
  points = {"m": 2}, {"m": 1}
  return claim.Claim("x", "t", "s", "p", *points, column=column, **bounds)


@pytest.mark.parametrize(
  ("values", "low", "high", "verdict"),
  [
    ([-1.0, -1.1, -1.2], 0, math.inf, "contradicted"),
    ([-1.0, 0.1, 1.2], 0, math.inf, "undecided"),
    ([0.1, 0.11, 0.12], -math.inf, 0.2, "shown"),
    ([0.1, 5.0, 0.1], 0, math.inf, "undecided"),
    ([0.5, 0.51, 0.52], -math.inf, 0.2, "contradicted"),
    ([0.0, 0.0, 0.0], 0, math.inf, "undecided"),
    ([0.0, 0.0, 0.0], -1, 1, "shown"),
    ([5.0], 0, math.inf, "undecided"),
    ([], 0, math.inf, "no runs yet"),
  ],
)
@pytest.mark.parametrize("column", ["loss", "accuracy"])
def test_a_verdict_needs_the_whole_interval(column, values, low, high, verdict):
  assert claim.verdict(claim_of(column, low=low, high=high), values) == verdict


@pytest.mark.parametrize(
  ("values", "verdict"),
  [
    ([100.0, 0.0, 100.0], "undecided"),
    ([100.0, 10.0, 100.0], "shown"),
    ([0.0, 0.0, 0.0], "undecided"),
    ([-50.0, -75.0, -50.0], "contradicted"),
    ([100.0], "undecided"),
  ],
)
def test_for_a_best_rate_all_seeds_must_agree(values, verdict):
  assert claim.verdict(claim_of("outer_lr", low=0), values) == verdict


def test_the_interval_contains_the_true_mean_in_nine_of_ten_cases():
  draws = np.random.default_rng(0).normal(3.0, 2.0, (4000, 3))
  pairs = [claim.interval(values.tolist()) for values in draws]
  inside = np.mean([low < 3.0 < high for low, high in pairs])
  assert inside == pytest.approx(0.9, abs=0.015)


def test_differences_are_taken_seed_by_seed_at_the_chosen_point():
  rows = [
    # m, seed, rate, loss for choosing, reported loss
    (1, 0, 0.2, 3.0, 2.0),
    (1, 0, 0.4, 3.5, 1.0),  # Reported lower, but not chosen.
    (2, 0, 0.4, 3.0, 2.2),
    (1, 1, 0.2, 3.0, 4.0),
    (2, 1, 0.6, 3.0, 5.0),
    (2, 2, 0.6, 3.0, 5.0),  # Seed 2 has no m=1.
  ]
  found = pd.DataFrame(rows, columns=["m", "seed", "rate", "choice", "loss"])
  assert claim.differences(claim_of(), found) == pytest.approx([10, 25])
  assert claim.differences(claim_of("rate"), found) == pytest.approx([100, 200])
  assert claim.differences(claim_of(), found[:0]) == []
  # 2.2 and 5.0 to 2.0 and 4.0, less those at the rate 0.4 (2.2 to 1.0, only seed 0).
  than = {"m": 2}, {"m": 1, "rate": 0.4}
  assert claim.differences(claim_of(than=than), found) == pytest.approx([10 - 120])


@pytest.mark.parametrize(
  ("cell", "state", "verdict", "without"),
  [
    ({"m": 2, "seed": 1}, "searching", "runs are missing", "no runs yet"),
    ({"m": 2, "seed": 1}, "waiting", "runs are missing", "no runs yet"),
    # Its m is tuned, and may become 1.
    ({"seed": 1}, "searching", "runs are missing", "no runs yet"),
    ({"m": 2, "seed": 1}, "failed", "runs have failed", "runs have failed"),
    ({"m": 3, "seed": 1}, "searching", "shown", "no runs yet"),
    ({"m": 2, "seed": 1}, "edge", "shown", "no runs yet"),
  ],
)
def test_a_claim_waits_for_the_runs_that_it_asks_for(cell, state, verdict, without):
  rows = [(m, s, 5.0 + m + s / 100) for m in (1, 2) for s in (0, 1, 2)]
  found = pd.DataFrame(rows, columns=["m", "seed", "loss"]).assign(choice=1.0)
  cells = {"x": [Search(Grid("g", [cell]), cell, state)]}
  for table, told in ((found, verdict), (found[:0], without)):
    [row] = claim.rows([claim_of(low=0)], {"x": table}, cells, len)
    assert row["verdict"] == told
    asked = cell.get("m", 1) in (1, 2)
    assert row["cost"] == ("1.00 h" if asked else "0.00 h")


def test_a_difference_of_differences_is_told_in_points():
  rows = [(m, s, 5.0 * (1 + m / 100)) for m in (1, 2, 3, 4) for s in (0, 1)]
  found = pd.DataFrame(rows, columns=["m", "seed", "loss"]).assign(choice=1.0)
  plain = claim_of(low=0)
  gap = claim_of(high=0, than=({"m": 4}, {"m": 3}))
  claims = [plain, gap, claim.Claim("y", *"tsp", {}, {})]
  *_, first, second = claim.lines(claim.rows(claims, {"x": found}, {"x": []}, len))
  command = "| `reproduce --only=x --out=OUT` | 0.00 h |"
  assert first.endswith(
    f"| +0.99% [+0.99, +0.99], 2 seeds; shown if above 0% {command} shown |"
  )
  assert second.endswith(f"2 seeds; shown if below 0 points {command} contradicted |")
  assert "| +0.02 points [+0.02, +0.02]," in second
