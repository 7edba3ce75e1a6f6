"""The reference itself, against the papers' statements and closed forms."""

import numpy as np
import pytest
import reference


def tree(rng, layers=3, width=2):
  return {
    "embed": {"tokens": rng.normal(size=(width, 2))},
    "blocks": {"w": rng.normal(size=(layers, width))},
  }


def increments(rng, steps, replicas, layers=3):
  return [[tree(rng, layers) for _ in range(replicas)] for _ in range(steps)]


def test_the_papers_schedule():
  rng = np.random.default_rng(0)
  result = reference.simulate(
    tree(rng, 1),
    increments(rng, 310, 1, 1),
    fragments=[([0], False), ([], True)],
    sync_every=100,
    taus=[0],
    alpha=0.0,
    make_optimizer=lambda: reference.Sgd(1.0),
  )
  sends = {
    p: [t for kind, t, q in result["log"] if kind == "send" and q == p] for p in (0, 1)
  }
  assert sends == {0: [100, 200, 300], 1: [150, 250]}


@pytest.mark.parametrize("replicas", [1, 3])
def test_one_fragment_is_algorithm_1(replicas):
  rng = np.random.default_rng(1)
  theta, steps = tree(rng), increments(rng, 12, replicas)
  make = lambda: reference.Sgd(0.7, 0.9, nesterov=True)
  streaming = reference.simulate(
    theta,
    steps,
    fragments=reference.make_fragments(3, 1, "whole"),
    sync_every=4,
    taus=[0] * replicas,
    alpha=0.0,
    make_optimizer=make,
  )
  outer, locals_ = reference.diloco(theta, steps, sync_every=4, make_optimizer=make)
  flat = lambda p: np.concatenate([np.ravel(v) for g in p.values() for v in g.values()])
  np.testing.assert_allclose(flat(streaming["theta"]), outer, rtol=1e-13)
  for mine, theirs in zip(streaming["replicas"], locals_):
    np.testing.assert_allclose(flat(mine), theirs, rtol=1e-13)


def test_lookahead_in_closed_form():
  # M = 1, plain SGD of rate r: after each round theta moves r times the drift.
  theta = {"embed": {"x": np.array([1.0])}, "blocks": {"w": np.zeros((1, 1))}}
  step = {"embed": {"x": np.array([0.5])}, "blocks": {"w": np.zeros((1, 1))}}
  result = reference.simulate(
    theta,
    [[step]] * 6,
    fragments=[([0], True)],
    sync_every=3,
    taus=[0],
    alpha=0.0,
    make_optimizer=lambda: reference.Sgd(0.5),
  )
  assert result["theta"]["embed"]["x"] == pytest.approx(1.0 + 2 * 0.5 * 1.5)


def test_alpha_one_never_listens():
  rng = np.random.default_rng(2)
  theta, steps = tree(rng), increments(rng, 9, 2)
  result = reference.simulate(
    theta,
    steps,
    fragments=reference.make_fragments(3, 2, "strided"),
    sync_every=3,
    taus=[1, 1],
    alpha=1.0,
    make_optimizer=lambda: reference.Sgd(0.4),
  )
  for m, replica in enumerate(result["replicas"]):
    total = theta["blocks"]["w"] + sum(s[m]["blocks"]["w"] for s in steps)
    np.testing.assert_allclose(replica["blocks"]["w"], total, rtol=1e-13)


def test_e3m0_by_hand():
  x = np.array([16.0, 23.9, 0.0, -3.0, 6.0, 0.3, 0.12, 0.125])
  # 3 lies between 2 (code 4) and 4 (code 5), 6 between 4 (5) and 8 (6): even wins.
  # 0.125 lies between 0 (code 0) and 0.25 (code 1).
  expected = np.array([16.0, 16.0, 0.0, -2.0, 8.0, 0.25, 0.0, 0.0])
  np.testing.assert_array_equal(reference.quantize_e3m0(x, 8), expected)
  # 24 ties with the 32 that the format lacks, so the scale doubles, under which 24
  # lies between 16 (now code 6) and 32 (code 7): even wins again.
  np.testing.assert_array_equal(
    reference.quantize_e3m0(np.array([24.0, 16.0, 0.3]), 3), [16.0, 16.0, 0.5]
  )
