"""Rows of docs/claims.csv, computed again from docs/reproduced.csv by other code."""

import json
import re
import statistics

import pytest
from running import ROOT, read_csv

DONE = [r for r in read_csv(ROOT / "docs/reproduced.csv") if r["status"] == "done"]
# Those of configs/accuracies.py have a text of another day.
RUNS = [row for row in DONE if not row["point_scored"]]
SCORED = [row for row in DONE if row["point_scored"] and not row["point_texts"]]
SCORED = [row for row in SCORED if row["point_weights"] != "bfloat16"]
# 95% quantiles of Student's t by number of seeds.
STUDENT = {3: 2.919986, 8: 1.894579}
BASE = {"fragments.size": 1, "overlap.taus": [1, 1], "wire.format": "e3m0"}
NINE = {"algorithm": "streaming", "momentum": "0.9", "outer_lr": "0.4"}
GROUPS = ("fedpart", "fragments", "outer", "overlap", "wire")


def losses(**points: str) -> dict[str, float]:
  """{seed: loss} of the runs with these columns `point_...`."""
  return {
    run["seed"]: float(run["test_loss"])
    for run in RUNS
    if all(run[f"point_{name}"] == value for name, value in points.items())
  }


def of_config(some=RUNS, column: str = "test_loss", **own) -> dict[str, float]:
  """{seed: loss} of Streaming DiLoCo's small runs that differ from BASE in `own`.

  None is the default of a field, which a recorded config leaves out.
  """
  wanted = BASE | {name.replace("__", "."): value for name, value in own.items()}
  wanted = {name: value for name, value in wanted.items() if value is not None}
  shared = {"algorithm": "streaming", "replicas": "2", "sync_every": "30"}
  shared |= {"batch_sequences": "8", "tokens": "921600", "dim": "32"}
  shared |= {"learning_rate": "0.0220971", "outer_learning_rate": "0.8"}
  shared["outer_optimizer"] = "sgd(momentum=0.5, nesterov=True)"
  found = {}
  for run in some:
    config = json.loads(run["config"])
    fields = {k: v for k, v in config.items() if k.split(".")[0] in GROUPS}
    fields.pop("overlap.tau", None)  # `taus` has it.
    if fields == wanted and all(run[k] == v for k, v in shared.items()):
      found[run["seed"]] = float(run[column])
  return found


def tau(steps: int, alpha: float = 0.0, some=RUNS) -> dict[str, float]:
  mixing = {"overlap__alpha": alpha} if alpha else {}
  return of_config(some, overlap__taus=[steps, steps], **mixing)


def eight(**own) -> dict[str, float]:
  return of_config(SCORED, **own)


def chosen(rounds: str, rate: str, **points: str) -> dict[str, float]:
  """{seed: loss} of DiLoCo with M = 2, without the seed that chose the rate."""
  points |= {"algorithm": "diloco", "replicas": "2"}
  found = losses(**points, sync_every=rounds, outer_lr=rate)
  return {seed: loss for seed, loss in found.items() if seed != "0"}


CLAIMS = {
  "With alpha = 0, tau = 5 costs": lambda: (tau(5, some=SCORED), eight()),
  "With alpha = 0, tau = 10 .* 0.5$": lambda: (tau(10), tau(1)),
  "With alpha = 0.5, tau = 10 .* 0.5$": lambda: (tau(10, 0.5), tau(1, 0.5)),
  "For M=2, H=1 is worse than H=10, with outer momentum 0.9": lambda: (
    chosen("1", "0.1", momentum="0.9"),
    chosen("10", "0.4", momentum="0.9"),
  ),
  "For M=2, H=1 is worse than H=100, with the best": lambda: (
    chosen("1", "1.4", tuned_momentum="0.0"),
    chosen("100", "1.0", tuned_momentum="0.5"),
  ),
  "Freezing the other fragments": lambda: (
    losses(**NINE, fedpart="True"),
    losses(**NINE, fedpart="", sync_every="", tau=""),
  ),
  "At the bytes of 4 bits, top-k is": lambda: (
    losses(compressor="topk", bits="4"),
    of_config(),
  ),
  "4 bits are as good as 32": lambda: (eight(), eight(wire__format="fp32")),
  "Outer parameters are better than the first replica": lambda: (
    eight(),
    eight(column="test_loss_first"),
  ),
  "The strided pattern is better": lambda: (
    eight(fragments__size=None),
    eight(fragments__size=None, fragments__pattern="sequential"),
  ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_row_follows_from_the_recorded_runs(claim):
  claims = [r for r in read_csv(ROOT / "docs/claims.csv") if r["kind"] == "trained"]
  [row] = [row for row in claims if re.match(claim, row["claim"])]
  a, b = CLAIMS[claim]()
  more = [100 * (a[seed] / b[seed] - 1) for seed in a.keys() & b.keys()]
  n, mean = len(more), statistics.mean(more)
  half = STUDENT[n] * statistics.stdev(more) / n**0.5
  here = f"{mean:+.2f}% [{mean - half:+.2f}, {mean + half:+.2f}], {n} seeds"
  assert row["here"].startswith(f"{here}; shown if")
