"""The gap at equal bytes: its page against its runs, and what its points train."""

import re
import statistics

import pytest
from running import ROOT, read_csv

from diloco.config import resolve
from diloco.contrib.des_loc import DesLoc
from diloco.contrib.simulate import plan
from diloco.errors import ConfigError
from diloco.util.command import load_module

FILE = load_module(str(ROOT / "configs" / "frontier.py"), "get_sweep", "frontier")
RATES = ("lr", "outer_lr", "momentum", "pull")
SEEDS = ("1", "2", "3")


def best_runs(size):
  """Reads the runs of a size with the rates of each case that have all seeds.

  Returns:
    {(case, seed): loss on the tokens that tell}, {case: bytes for each token}, and
    {(case, seed): per cent above data-parallel}.
  """
  file = "frontier_pull.csv" if size == "270k-pull" else "frontier.csv"
  rows = [r for r in read_csv(ROOT / "docs" / file) if r["point_size"] == size]
  rates = lambda row: [row["point_case"], *(row[f"point_{k}"] for k in RATES)]
  best = [rates(row) for row in rows if row["seed"] == SEEDS[-1]]
  losses, sent = dict[tuple[str, str], float](), dict[str, float]()
  for row in rows:
    if rates(row) in best and row["seed"] in SEEDS:
      case = row["point_case"].removeprefix(f"{size} ")
      losses[case, row["seed"]] = float(row["test_loss"])
      sent[case] = float(row["bytes_sent"]) / float(row["tokens"])
  plain = {seed: losses["data-parallel", seed] for seed in SEEDS}
  above = {key: 100 * (loss / plain[key[1]] - 1) for key, loss in losses.items()}
  return losses, sent, above


@pytest.mark.parametrize(
  ("size", "title", "cases"),
  [
    ("1M", "## At equal bytes", 6),
    ("270k", "### At 0.27M", 9),
    ("270k-Muon", "### Muon inside", 3),
    ("270k-pull", "### The elastic pull", 5),
  ],
)
def test_the_page_says_what_the_runs_say(size, title, cases):
  losses, sent, above = best_runs(size)
  page = (ROOT / "docs" / "gap.md").read_text()
  page = page.partition(title)[2].partition("\n##")[0]
  assert len(sent) == cases
  for case in sent.keys() - {"data-parallel"}:
    line = next(line for line in page.splitlines() if line.startswith(f"| {case}"))
    *_, loss, more, bytes_per_token, _ = line.replace("**", "").split("|")
    told = [above[case, seed] for seed in SEEDS]
    mean, deviation = map(float, re.findall(r"-?[\d.]+", more))
    assert mean == pytest.approx(statistics.mean(told), abs=0.006)
    assert deviation == pytest.approx(statistics.stdev(told), abs=0.006)
    mean, _ = map(float, re.findall(r"[\d.]+", loss))
    assert mean == pytest.approx(
      statistics.mean(losses[case, seed] for seed in SEEDS), abs=6e-4
    )
    assert float(bytes_per_token) == pytest.approx(sent[case], abs=0.5)


@pytest.mark.parametrize(
  ("size", "params", "rounds"),
  [("270k", 269_416, (10, 30, 100)), ("1M", 1_066_624, (10, 30))],
)
def test_the_planner_has_the_losses_of_these_runs(size, params, rounds):
  _, _, above = best_runs(size)
  found = [x for x in plan.cells() if x.params == params]
  assert [(x.replicas, x.sync_every) for x in found] == [(2, h) for h in rounds]
  for x in found:
    told = [above[f"streaming, H = {x.sync_every}", seed] for seed in SEEDS]
    assert x.percent == pytest.approx(statistics.mean(told), abs=0.006)
    half = 2.92 * statistics.stdev(told) / 3**0.5  # Student's t, 90%.
    assert x.half == pytest.approx(half, abs=0.006)


def test_a_method_averages_its_moments_at_every_round_in_four_bits():
  rates = {"lr": 0.004, "outer_lr": 0.7, "momentum": 0.7}
  for size in FILE.SIZES:
    point = {"size": size, "sync_every": 30, **rates}
    c = resolve(FILE.get_config(point | {"method": "both moments"}))
    own = c.of(DesLoc)
    assert (own.first_every, own.second_every, own.format) == (30, 30, "e3m0")
    assert (c.sync_every, c.wire.format, c.overlap.taus) == (30, "e3m0", (1, 1))
    assert c.outer.optimizer == "sgd(momentum=0.7, nesterov=True)"
    plain = resolve(FILE.get_config(point | {"method": FILE.PLAIN}))
    assert plain.algorithm == "data_parallel"
    assert plain.train == c.train


def test_a_size_that_does_not_exist_is_refused():
  with pytest.raises(
    ConfigError, match="the size is '2M'; write one of 1M, 1M-800, 270k"
  ):
    FILE.get_sweep("size=2M")
