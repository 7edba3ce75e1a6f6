"""Checks configs/ladder.py: the sizes, the budgets and the cells."""

import math

import pytest

from diloco.cli import sweep as cli
from diloco.config import resolve
from diloco.spec.shapes import num_params
from diloco.sweep.search import search_all
from diloco.util.command import load_module

LADDER = load_module("ladder", "get_sweep", "")


def test_sizes_rise_from_100_000_and_budgets_are_6_tokens_per_parameter():
  sizes = []
  for size in LADDER.SIZES:
    point = {"size": size, "algorithm": "diloco", "replicas": 4, "lr": 0.01, "batch": 8}
    c = resolve(LADDER.get_config(point))
    n = num_params(c.model)
    assert 5.8 < c.train.tokens / n < 6.2
    sizes.append(n)
  assert sizes == sorted(sizes)
  assert len(sizes) >= 5
  assert 0.1e6 < sizes[0] < sizes[-1] < 3e6


def test_the_last_sync_follows_the_last_step_and_all_m_see_the_same_text():
  for batch, shards in ((2, 2), (8, 4)):
    point = {"size": 105, "algorithm": "diloco", "replicas": 2, "lr": 0.01}
    c = resolve(LADDER.get_config({**point, "seed": 1, "batch": batch}))
    assert c.train.steps % c.sync_every == 0
    assert (c.data.shards, c.seed) == (shards, 1)


def test_every_size_has_all_algorithms_and_three_seeds_beside_the_tuning_one():
  cells = [cell for grid in LADDER.get_sweep().grids for cell in grid.cells]
  wanted = {("data_parallel", 1), ("diloco", 1), ("diloco", 2), ("diloco", 4)}
  for size in LADDER.SIZES:
    here = [c for c in cells if c["size"] == size]
    for seed in (0, 1, 2, 3):
      some = [c for c in here if c.get("seed", 0) == seed]
      assert {(c["algorithm"], c["replicas"]) for c in some} == wanted


def test_the_papers_sweep_starts_at_its_laws_and_walks_to_an_interior_best():
  sweep = LADDER.get_sweep("size=35M")
  first = [search.points for search in search_all(sweep.grids, lambda point: None)]
  kinds = [(p["algorithm"], p["replicas"]) for (p,) in first]
  assert kinds == [("data_parallel", 1), *(("diloco", m) for m in (1, 2, 4, 8))]
  laws = [(p["batch"], p.get("outer_lr")) for (p,) in first]
  # Table 10's law gives 25, 31, 40 and 50 sequences; powers of 2 are swept.
  assert laws == [(32, None), (32, 0.4), (32, 0.4), (32, 0.6), (64, 0.8)]
  for (point,) in first:
    assert resolve(sweep.config(dict(point))).train.batch_size == point["batch"]

  def loss(point):  # The best point is some steps from the laws on each axis.
    batch, rate = point["batch"] / 256, point["lr"] / 0.03
    near = abs(math.log2(batch)) + abs(math.log2(rate))
    return near + abs(point.get("outer_lr", 1.0) - 1.0)

  for search in search_all(sweep.grids, loss):
    assert search.state == "interior"
    assert search.best["batch"] == 256
    assert search.best.get("outer_lr", 1.0) == 1.0


def test_the_momentum_is_tuned_with_all_other_values():
  """The search crosses the values of momentum at the outer step, not at the rate."""
  sweep = LADDER.get_sweep("momentum=tuned")

  def loss(point):
    c = resolve(sweep.config(dict(point)))
    if point["algorithm"] == "diloco":
      momentum = float(c.outer.optimizer.split("=")[1].split(",")[0])
      assert c.outer.learning_rate == point["outer_step"] * (1 - momentum)
      return abs(momentum - 0.9) + abs(c.outer.learning_rate - 0.2) + point["batch"]
    return point["batch"] + abs(math.log2(point["lr"] / 0.01))

  searches = search_all(sweep.grids, loss)
  four = [s for s in searches if s.best["replicas"] == 4 and "seed" not in s.cell]
  assert len(four) == 3
  for s in four:
    best = [s.best[name] for name in ("batch", "momentum", "outer_step")]
    assert best == [4, 0.9, 2.0]


def test_the_dry_run_counts_the_least_runs_and_starts_none(capsys):
  # Data-parallel has two axes, M = 1, 2, 4, 8 have three: 5 + 4 * 7 runs.
  assert cli.main(["--sweep=ladder:size=35M", "--dry_run"]) == 0
  _, one, total, note = capsys.readouterr().out.splitlines()
  assert one.split()[:2] == ["35M", "33"]
  assert total.split()[1] == "33"
  # 33 runs of 1.5e17 FLOPs (configs/chinchilla.py).
  assert float(total.split()[2]) == pytest.approx(33 * 1.5e17, rel=0.05)
  assert note.startswith("These are the fewest runs")
