"""The reference has to be right before anything is compared with it.

Closed forms, and the mistakes seen in public implementations: each test names the
mistake that it would catch.
"""

import math

import numpy as np
import pytest
import reference as ref


def params(seed=0, layers=4, grid=64.0):
  """Small parameters on a dyadic grid, so that sums of them are exact.

  `twin` and `out` have as many rows as there are layers: a fragmentation that goes
  by the length of the leading axis puts them into the wrong fragment.
  """
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.integers(-64, 65, shape) / grid
  return {
    "embed": {"out": draw(layers), "twin": draw(layers, 2)},
    "blocks": {"w": draw(layers, 2, 3), "b": draw(layers, 3)},
  }


def table(seed=1, **kwargs):
  """Increments u(m, t) that differ between replicas and steps."""
  return ref.increments(lambda m, t: params((seed, m, t), **kwargs))


def flat_equal(a, b):
  a, b = ref.split(a), ref.split(b)
  assert a.keys() == b.keys()
  return all(np.array_equal(a[key], b[key]) for key in a)


def assert_close(a, b, tol=1e-12):
  a, b = ref.split(a), ref.split(b)
  assert a.keys() == b.keys()
  for key in a:
    np.testing.assert_allclose(a[key], b[key], rtol=tol, atol=tol)


# --- Fragments ------------------------------------------------------------------


def test_fragments_of_figure_2():
  sequential = ref.make_fragments(6, 3, "sequential")
  strided = ref.make_fragments(6, 3, "strided")
  assert sequential == [((0, 1, 2), False), ((3, 4, 5), False), ((), True)]
  assert strided == [((0, 2, 4), False), ((1, 3, 5), False), ((), True)]
  assert ref.make_fragments(3, 2, "whole") == [((0, 1, 2), True)]
  # The last of the layers' fragments may be smaller.
  strided = ref.make_fragments(7, 3, "strided")
  assert [f[0] for f in strided] == [(0, 3, 6), (1, 4), (2, 5), ()]


# --- Schedule -------------------------------------------------------------------


def sends(P, H, T):
  return [(t, p) for t in range(1, T + 1) for p in ref.sent_at(t, P, H)]


def test_the_schedule_matches_the_papers_example():
  """H=100, P=2. Mistakes: t + t_p for t - t_p; a first send before a full H."""
  assert sends(2, 100, 300) == [(100, 0), (150, 1), (200, 0), (250, 1), (300, 0)]


@pytest.mark.parametrize(("P", "H"), [(1, 5), (3, 100), (4, 10), (5, 3), (7, 7)])
def test_every_fragment_is_sent_every_H_steps(P, H):
  """Mistakes: H rounded to a multiple of P; a first round of H+1 steps; P > H."""
  for p in range(P):
    times = [t for t, q in sends(P, H, 6 * H) if q == p]
    assert times[0] == H + math.floor(p * H / P)
    assert set(np.diff(times)) == {H}


# --- Outer optimizers -----------------------------------------------------------


# --- Quantisation ---------------------------------------------------------------


def test_values_of_e3m0_and_of_float4_e2m1():
  assert ref.float_values(3, 0).tolist() == [0, 1, 2, 4, 8, 16, 32, 64, 128]
  assert ref.float_values(2, 1).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 8]


def test_ties_go_to_the_even_code():
  """0.5 lies between codes 0 and 1, 1.5 between 1 and 2, 3 between 2 and 3, ..."""
  x = np.array([64, 0.5, 1.5, 3, 6, 12, 24, 48, -0.5, -3])
  decoded = ref.block_quantise(x, None)
  assert decoded.tolist() == [64, 0, 2, 2, 8, 8, 32, 32, 0, -2]


def test_blocks_have_their_own_scales_and_zeros_stay_zero():
  x = np.array([1.0, 1 / 64, 1000.0, 1.0, 0.0, 0.0, 2.0**-40])
  decoded = ref.block_quantise(x, 2)
  assert decoded.tolist() == [1, 1 / 64, 1024, 0, 0, 0, 2.0**-40]


def test_payload_counts_codes_and_scales():
  """15 codes of 4 bits fill 8 bytes; blocks of 4 need 4 scales."""
  assert ref.quantised(4)(np.ones(15), 5)[1] == 8 + 4


# --- Algorithms 1 and 2 ---------------------------------------------------------


@pytest.mark.parametrize("T", [12, 14])
@pytest.mark.parametrize("M", [1, 3])
def test_one_fragment_without_overlap_is_algorithm_1(M, T):
  outer = ref.nesterov(0.4, 0.9)
  whole = ref.make_fragments(4, 3, "whole")
  streaming = ref.simulate(params(), table(), whole, T=T, H=4, M=M, outer=outer)
  theta, replicas = ref.diloco(params(), table(), T=T, H=4, M=M, outer=outer)
  assert_close(streaming.outer, theta)
  for m in range(M):
    assert_close(streaming.replicas[m], replicas[m])


def test_one_replica_is_lookahead():
  """theta <- theta + lr * (theta_H - theta): closed form with constant increments.

  Without momentum k rounds of H increments u move theta by k * lr * H * u.
  """
  u = params(7)
  run = ref.simulate(
    params(),
    ref.increments(lambda m, t: u),
    ref.make_fragments(4, 1, "whole"),
    T=15,
    H=5,
    M=1,
    outer=ref.sgd(0.25),
  )
  start, step = ref.split(params()), ref.split(u)
  expected = ref.join({k: start[k] + 3 * 0.25 * 5 * step[k] for k in start})
  assert_close(run.outer, expected)
  assert_close(run.replicas[0], expected)


def test_momentum_over_three_rounds():
  """Constant increments u: outer gradients -(H + t_p) u, then -H u each round.

  m_3 = mu^2 g_1 + mu g_2 + g_3. Mistake: momentum that is reset, or shared between
  fragments of different ages.
  """
  u = params(7)
  H, mu = 6, 0.5
  fragments = ref.make_fragments(4, 2, "strided")
  run = ref.simulate(
    params(),
    ref.increments(lambda m, t: u),
    fragments,
    T=4 * H - 1,
    H=H,
    M=2,
    outer=ref.nesterov(0.5, mu),
  )
  step, momentum = ref.split(u), ref.split(run.moment())
  for p, fragment in enumerate(fragments):
    assert len([e for e in run.log if e[0] == "update" and e[2] == p]) == 3
    for key in ref.keys_of(fragment, step):
      steps = mu**2 * (H + (0, 2, 4)[p]) + mu * H + H
      np.testing.assert_array_equal(momentum[key], -steps * step[key])


def test_every_step_with_rate_one_is_data_parallel():
  run = ref.simulate(
    params(),
    table(),
    ref.make_fragments(4, 1, "whole"),
    T=6,
    H=1,
    M=1,
    outer=ref.sgd(1.0),
  )
  assert flat_equal(run.outer, ref.data_parallel(params(), table(), T=6))


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5])
def test_merge_by_hand(alpha):
  """One send at H=4, tau=2: theta~ + alpha * (local - theta~), two steps later."""
  u = {m: params((9, m)) for m in range(2)}
  run = ref.simulate(
    params(),
    ref.increments(lambda m, t: u[m]),
    ref.make_fragments(4, 1, "whole"),
    T=6,
    H=4,
    M=2,
    tau=2,
    alpha=alpha,
    outer=ref.sgd(0.5),
  )
  start, u0, u1 = ref.split(params()), ref.split(u[0]), ref.split(u[1])
  for key in start:
    updated = start[key] + 0.5 * 4 * (u0[key] + u1[key]) / 2
    np.testing.assert_array_equal(ref.split(run.outer)[key], updated)
    for m, step in enumerate((u0, u1)):
      merged = alpha * (start[key] + 6 * step[key]) + (1 - alpha) * updated
      np.testing.assert_allclose(ref.split(run.replicas[m])[key], merged, rtol=1e-14)


def test_fragments_in_flight_at_the_end_are_received():
  """Mistake: trailing steps that are never merged."""
  fragments = ref.make_fragments(4, 2, "strided")
  args = {"M": 2, "H": 6, "tau": 5, "alpha": 0.5, "outer": ref.sgd(0.5)}
  drained = ref.simulate(params(), table(), fragments, T=8, **args)
  left = ref.simulate(params(), table(), fragments, T=8, drain=False, **args)
  assert [e for e in left.log if e[0] != "send"] == []
  assert flat_equal(left.outer, params())
  assert drained.log == [
    ("send", 6, 0),
    ("send", 8, 1),
    *[(what, 8, p, *m) for p in (0, 1) for what, *m in
      (("update",), ("merge", 0), ("merge", 1))],
  ]  # fmt: skip
  # The outer update does not depend on when it is received.
  at_once = ref.simulate(
    params(), table(), fragments, T=8, **{**args, "tau": 0, "alpha": 1.0}
  )
  assert flat_equal(drained.outer, at_once.outer)
