"""Rows of docs/reproduced.md, computed again from docs/reproduced.csv by other code."""

import csv
import json
import pathlib
import statistics

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
with (DOCS / "reproduced.csv").open() as file:
  # Those of configs/accuracies.py have a text of another day.
  RUNS = [
    row
    for row in csv.DictReader(file)
    if row["status"] == "done" and not row["point_scored"]
  ]
STUDENT = 2.919986  # 95% quantile of Student's t with two degrees of freedom.
BASE = {"fragments.size": 1, "overlap.taus": [1, 1], "wire.format": "e3m0"}
GROUPS = ("fedpart", "fragments", "outer", "overlap", "wire")


def losses(**points: str) -> dict[str, float]:
  """{seed: loss} of the runs with these columns `point_...`."""
  return {
    run["seed"]: float(run["test_loss"])
    for run in RUNS
    if all(run[f"point_{name}"] == value for name, value in points.items())
  }


def of_config(**own) -> dict[str, float]:
  """{seed: loss} of Streaming DiLoCo's small runs that differ from BASE in `own`."""
  wanted = BASE | {name.replace("__", "."): value for name, value in own.items()}
  shared = {"algorithm": "streaming", "replicas": "2", "sync_every": "30"}
  shared |= {"batch_sequences": "8", "tokens": "921600", "dim": "32"}
  shared |= {"learning_rate": "0.0220971", "outer_learning_rate": "0.8"}
  shared["outer_optimizer"] = "sgd(momentum=0.5, nesterov=True)"
  found = {}
  for run in RUNS:
    config = json.loads(run["config"])
    fields = {k: v for k, v in config.items() if k.split(".")[0] in GROUPS}
    fields.pop("overlap.tau", None)  # `taus` has it.
    if fields == wanted and all(run[k] == v for k, v in shared.items()):
      found[run["seed"]] = float(run["test_loss"])
  return found


def tau(steps: int, alpha: float = 0.0, second: int | None = None) -> dict[str, float]:
  mixing = {"overlap__alpha": alpha} if alpha else {}
  return of_config(overlap__taus=[steps, second or steps], **mixing)


def sparse(name: str) -> dict[str, float]:
  return losses(compressor=name, bits="4")


CLAIMS = {
  "With alpha = 0, tau = 5 costs": lambda: (tau(5), tau(1)),
  "With alpha = 0, tau = 10 costs": lambda: (tau(10), tau(1)),
  "With alpha = 0.5, tau = 5 costs": lambda: (tau(5, 0.5), tau(1, 0.5)),
  "With alpha = 0.5, tau = 10 costs": lambda: (tau(10, 0.5), tau(1, 0.5)),
  "A second replica with tau = 5 costs": lambda: (tau(1, 0.5, 5), tau(1, 0.5)),
  "Freezing the other fragments": lambda: (of_config(fedpart__on=True), of_config()),
  "At the bytes of 4 bits, top-k is": lambda: (sparse("topk"), of_config()),
  "At the bytes of 4 bits, DARE is": lambda: (sparse("dare"), of_config()),
  "FedDropout is worse than top-k": lambda: (sparse("random"), sparse("topk")),
  "4 bits are as good as 32": lambda: (of_config(), of_config(wire__format="fp32")),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_row_follows_from_the_recorded_runs(claim):
  [row] = [
    line
    for line in (DOCS / "reproduced.md").read_text().splitlines()
    if line.startswith(f"| {claim}") and "| trained |" in line
  ]
  a, b = CLAIMS[claim]()
  more = [100 * (a[seed] / b[seed] - 1) for seed in ("0", "1", "2")]
  mean, half = statistics.mean(more), STUDENT * statistics.stdev(more) / 3**0.5
  here = f"{mean:+.2f}% [{mean - half:+.2f}, {mean + half:+.2f}], 3 seeds"
  assert f"| {here}; shown if" in row
