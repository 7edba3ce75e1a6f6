"""The reference has to be right before anything is compared with it.

Closed forms, and the mistakes seen in public implementations: each test names the
mistake that it would catch.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import reference as ref

FIXTURES = Path(__file__).parents[1] / "fixtures"


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


def test_split_and_join_are_inverse_beyond_ten_layers():
  theta = params(layers=12)
  assert flat_equal(ref.join(ref.split(theta)), theta)
  np.testing.assert_array_equal(
    ref.join(ref.split(theta))["blocks"]["b"], theta["blocks"]["b"]
  )


def test_fragments_of_figure_2():
  sequential = ref.make_fragments(6, 3, "sequential")
  strided = ref.make_fragments(6, 3, "strided")
  assert sequential == [((0, 1, 2), False), ((3, 4, 5), False), ((), True)]
  assert strided == [((0, 2, 4), False), ((1, 3, 5), False), ((), True)]
  assert ref.make_fragments(3, 2, "whole") == [((0, 1, 2), True)]


def test_ragged_last_fragment():
  sequential = ref.make_fragments(7, 3, "sequential")
  strided = ref.make_fragments(7, 3, "strided")
  assert [f[0] for f in sequential] == [(0, 1, 2), (3, 4, 5), (6,), ()]
  assert [f[0] for f in strided] == [(0, 3, 6), (1, 4), (2, 5), ()]


@pytest.mark.parametrize("pattern", ["sequential", "strided", "whole"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_parameter_belongs_to_exactly_one_fragment(pattern, size):
  """Mistakes: dropping the remainder; going by the length of a leading axis."""
  flat = ref.split(params(layers=4))
  fragments = ref.make_fragments(4, size, pattern)
  owned = [key for f in fragments for key in ref.keys_of(f, flat)]
  assert sorted(owned, key=str) == sorted(flat, key=str)
  for fragment in fragments[:-1]:
    assert all(key[0] == "blocks" for key in ref.keys_of(fragment, flat))
  assert {("embed", "out"), ("embed", "twin")} <= set(ref.keys_of(fragments[-1], flat))


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


def test_the_first_round_has_H_steps_not_H_plus_one():
  whole = ref.make_fragments(4, 1, "whole")
  run = ref.simulate(
    params(), table(), whole, T=5, H=5, M=1, outer=ref.sgd(1.0), drain=False
  )
  assert run.log == [("send", 5, 0), ("update", 5, 0), ("merge", 5, 0, 0)]


# --- Outer optimizers -----------------------------------------------------------


def test_nesterov_by_hand():
  """theta 1, gradients 1 and 1, lr 0.5, mu 0.5: momenta 1, 1.5; steps 1.5, 1.75."""
  state = {}
  step = ref.nesterov(0.5, 0.5)
  theta = step(np.array([1.0]), np.array([1.0]), state, 1)
  assert theta == 1 - 0.5 * 1.5
  theta = step(theta, np.array([1.0]), state, 2)
  assert state["m"] == 1.5
  assert theta == 1 - 0.5 * 1.5 - 0.5 * 1.75


def test_momentum_equals_pytorch():
  """Against torch.optim.SGD in float32, see tests/fixtures/make_torch_nesterov.py."""
  fixture = json.loads((FIXTURES / "torch_nesterov.json").read_text())
  for case in fixture["cases"]:
    step = ref.nesterov(case["lr"], case["momentum"])
    theta, state = np.array(fixture["theta"]), {}
    for count, g in enumerate(np.array(fixture["gradients"]), 1):
      theta = step(theta, g, state, count)
      expected = case["trajectory"][count - 1]
      np.testing.assert_allclose(theta, expected, rtol=1e-6, atol=1e-6)


def test_heavy_ball_by_hand():
  state = {}
  step = ref.heavy_ball(0.5, 0.5)
  theta = step(
    step(np.array([1.0]), np.array([1.0]), state, 1), np.array([1.0]), state, 2
  )
  assert theta == 1 - 0.5 - 0.5 * 1.5


def test_adams_first_step_is_the_learning_rate():
  theta = ref.adam(0.25)(np.zeros(2), np.array([3.0, -1e-3]), {}, 1)
  np.testing.assert_allclose(theta, [-0.25, 0.25], rtol=1e-4)


# --- Quantisation ---------------------------------------------------------------


def test_values_of_e3m0_and_of_float4_e2m1():
  assert ref.float_values(3, 0).tolist() == [0, 1, 2, 4, 8, 16, 32, 64, 128]
  assert ref.float_values(2, 1).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 8]


def test_ties_go_to_the_even_code():
  """0.5 lies between codes 0 and 1, 1.5 between 1 and 2, 3 between 2 and 3, ..."""
  x = np.array([64, 0.5, 1.5, 3, 6, 12, 24, 48, -0.5, -3])
  decoded = ref.block_quantise(x, None)
  assert decoded.tolist() == [64, 0, 2, 2, 8, 8, 32, 32, 0, -2]


@pytest.mark.parametrize(
  ("largest", "decoded", "scale"),
  [
    (47, 32, 0.5),
    (48, 32, 1),
    (64, 64, 1),
    (95.75, 64, 1),
    (96, 64, 2),
    (97, 128, 2),
    (128, 128, 2),
  ],
)
def test_the_scale_is_the_smallest_that_does_not_saturate(largest, decoded, scale):
  """96 lies halfway to the imagined code 8, which is even: saturation, so scale up.

  The second value, the scale itself, tells which was taken: half of it is lost.
  """
  x = np.array([largest, scale, scale / 2])
  assert ref.block_quantise(x, None).tolist() == [decoded, scale, 0]


@pytest.mark.parametrize(("exponent_bits", "mantissa_bits"), [(3, 0), (2, 1), (4, 3)])
def test_quantisation_commutes_with_powers_of_two_and_signs(
  exponent_bits, mantissa_bits
):
  x = np.random.default_rng(0).normal(size=40)
  q = lambda x: ref.block_quantise(x, 8, exponent_bits, mantissa_bits)
  np.testing.assert_array_equal(q(x * 2.0**-13), q(x) * 2.0**-13)
  np.testing.assert_array_equal(q(-x), -q(x))
  np.testing.assert_array_equal(q(q(x)), q(x))


def test_blocks_have_their_own_scales_and_zeros_stay_zero():
  x = np.array([1.0, 1 / 64, 1000.0, 1.0, 0.0, 0.0, 2.0**-40])
  decoded = ref.block_quantise(x, 2)
  assert decoded.tolist() == [1, 1 / 64, 1024, 0, 0, 0, 2.0**-40]


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 5)])
def test_four_bits_never_cost_more_than_float32(shape):
  """Mistake: small tensors costing more on the wire than float32."""
  x = np.ones(shape).ravel()
  for block in (None, 2, 32):
    assert ref.quantised(block)(x, 1)[1] < ref.uncompressed(x, 1)[1]


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


def test_lookahead_on_a_quadratic():
  """Inner gradient descent on theta^2 / 2: each round multiplies by a constant.

  (1 - eta)^H inside, so 1 + lr * ((1 - eta)^H - 1) per round. Mistake: the sign of
  the outer gradient, with which it grows.
  """
  scale = lambda params, factor: ref.join(
    {k: v * factor for k, v in ref.split(params).items()}
  )
  run = ref.simulate(
    params(),
    lambda theta, m, t: scale(theta, 1 - 0.1),
    ref.make_fragments(4, 1, "whole"),
    T=12,
    H=4,
    M=1,
    outer=ref.sgd(0.7),
  )
  assert_close(run.outer, scale(params(), (1 + 0.7 * (0.9**4 - 1)) ** 3))


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


def test_rate_one_without_momentum_averages_the_replicas():
  """Mistake: a divisor other than the number of replicas."""
  run = ref.simulate(
    params(),
    table(),
    ref.make_fragments(4, 1, "whole"),
    T=4,
    H=4,
    M=4,
    outer=ref.sgd(1.0),
  )
  alone = [
    ref.split(
      ref.data_parallel(params(), lambda theta, _, t, m=m: table()(theta, m, t), T=4)
    )
    for m in range(4)
  ]
  mean = ref.join({k: sum(a[k] for a in alone) / 4 for k in alone[0]})
  assert flat_equal(run.outer, mean)


def test_alpha_one_leaves_the_replicas_alone():
  run = ref.simulate(
    params(),
    table(),
    ref.make_fragments(4, 2, "strided"),
    T=17,
    H=6,
    M=2,
    tau=4,
    alpha=1.0,
    outer=ref.nesterov(0.4, 0.9),
  )
  for m in range(2):
    alone = ref.data_parallel(
      params(), lambda theta, _, t, m=m: table()(theta, m, t), T=17
    )
    assert flat_equal(run.replicas[m], alone)
  assert not flat_equal(run.outer, params())


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


def test_a_fragments_update_leaves_the_others_alone():
  """Mistake: a fragment's optimizer stepping parameters of other fragments."""
  fragments = ref.make_fragments(4, 2, "strided")
  args = {"M": 2, "H": 6, "alpha": 0.5, "outer": ref.nesterov(0.4, 0.9), "drain": False}
  flat = ref.split(params())
  for T in range(6, 20):
    before = ref.simulate(params(), table(), fragments, T=T - 1, **args)
    after = ref.simulate(params(), table(), fragments, T=T, **args)
    updated = {e[2] for e in after.log[len(before.log) :] if e[0] == "update"}
    for p, fragment in enumerate(fragments):
      for a, b in [(before.outer, after.outer), (before.moment(), after.moment())]:
        changed = [
          not np.array_equal(ref.split(a)[key], ref.split(b)[key])
          for key in ref.keys_of(fragment, flat)
        ]
        assert all(changed) if p in updated else not any(changed)


def test_outer_parameters_are_those_of_each_fragments_last_sync():
  """Mistake: evaluating one replica's local parameters in the middle of a round."""
  fragments = ref.make_fragments(4, 2, "strided")
  args = {"M": 2, "H": 6, "outer": ref.sgd(1.0), "drain": False}
  mid = ref.simulate(params(), table(), fragments, T=9, **args)
  flat = ref.split(mid.outer)
  # T = 9: fragments 0 (at 6) and 1 (at 8) are in, the embedding (at 10) is not.
  for p, synced_at in enumerate((6, 8, 0)):
    then = ref.simulate(params(), table(), fragments, T=synced_at, **args)
    for key in ref.keys_of(fragments[p], flat):
      np.testing.assert_array_equal(flat[key], ref.split(then.outer)[key])
      assert not np.array_equal(flat[key], ref.split(mid.replicas[0])[key])


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


def test_several_fragments_in_flight():
  """tau > H / P: fragment 0 of the next round leaves before the last one is in."""
  fragments = ref.make_fragments(4, 1, "sequential")
  run = ref.simulate(
    params(), table(), fragments, T=24, H=6, M=2, tau=5, outer=ref.sgd(0.5)
  )
  in_flight = most = 0
  for event in run.log:
    in_flight += {"send": 1, "update": -1}.get(event[0], 0)
    most = max(most, in_flight)
  assert most > 3
  assert in_flight == 0
  sent = {(t, p) for what, t, p, *_ in run.log if what == "send"}
  arrived = {(t - 5, p) for what, t, p, *_ in run.log if what == "update" and t < 24}
  assert arrived <= sent


def test_all_replicas_merge_the_same_outer_parameters():
  """tau = (1, 3): one outer update at 5, merges at 5 and 7."""
  run = ref.simulate(
    params(),
    table(),
    ref.make_fragments(4, 1, "whole"),
    T=7,
    H=4,
    M=2,
    tau=(1, 3),
    alpha=0.0,
    outer=ref.nesterov(0.4, 0.9),
  )
  assert run.log == [
    ("send", 4, 0),
    ("update", 5, 0),
    ("merge", 5, 0, 0),
    ("merge", 7, 0, 1),
  ]
  assert flat_equal(run.replicas[1], run.outer)
  assert not flat_equal(run.replicas[0], run.outer)  # two steps further


def test_equal_taus_equal_one_tau():
  args = {"T": 20, "H": 6, "M": 3, "alpha": 0.5, "outer": ref.nesterov(0.4, 0.9)}
  fragments = ref.make_fragments(4, 2, "strided")
  a = ref.simulate(params(), table(), fragments, tau=2, **args)
  b = ref.simulate(params(), table(), fragments, tau=(2, 2, 2), **args)
  assert flat_equal(a.outer, b.outer)
  assert a.log == b.log


def test_sent_gradients_are_quantised_and_their_mean_is_not():
  """Decode first, then average: the mean of two codes is mostly no code."""
  u = {m: params((9, m)) for m in range(2)}
  start = params()
  run = ref.simulate(
    start,
    ref.increments(lambda m, t: u[m]),
    ref.make_fragments(4, 1, "whole"),
    T=1,
    H=1,
    M=2,
    outer=ref.sgd(1.0),
    compress=ref.quantised(3),
  )
  for key, value in ref.split(run.outer).items():
    decoded = [
      ref.block_quantise(-ref.split(u[m])[key].ravel(), 3).reshape(value.shape)
      for m in range(2)
    ]
    np.testing.assert_array_equal(
      value, ref.split(start)[key] - (decoded[0] + decoded[1]) / 2
    )
  # w: 4 layers of 6 values, b: 4 of 3, out: 4, twin: 8; blocks of 3.
  assert run.payload == [4 * (3 + 2) + 4 * (2 + 1) + (2 + 2) + (4 + 3)]
