"""The outer step against the float64 reference, and its limits bit for bit."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco import config as config_lib
from diloco import mesh as mesh_lib
from diloco import outer as outer_lib
from diloco.fragments import make_fragments

LAYERS, WIDTH, ROWS = 5, 6, 7


def make_config(**fields) -> ml_collections.FrozenConfigDict:
  c = config_lib.default_config()
  c.model.num_layers, c.model.dim, c.model.num_heads = LAYERS, 8, 1
  c.train.steps, c.train.batch_size = 1, 12
  c.wire.format = "fp32"
  c.update_from_flattened_dict(fields)
  return config_lib.resolve(c)


def random_tree(rng, exact=False) -> dict:
  def draw(*shape):
    if exact:  # Small multiples of a power of two: float32 sums are exact.
      return rng.integers(-8, 9, size=shape) / 64.0
    return rng.normal(size=shape) * 0.1

  return {
    "embed": {"tokens": draw(ROWS, 4)},
    "blocks": {"w": draw(LAYERS, WIDTH, 3), "norm": draw(LAYERS, WIDTH)},
  }


@functools.cache
def compiled(c_json: str):
  c = config_lib.resolve(ml_collections.ConfigDict(json.loads(c_json)))
  mesh = mesh_lib.make_mesh(c, jax.devices()[:1])
  return c, mesh, outer_lib.make_outer(c, mesh)


def run(c, theta, increments, final_sync=False):
  """The package's outer step with inner steps replaced by increments."""
  c, mesh, outer = compiled(json.dumps(c.to_dict()))
  replicas = config_lib.trained_replicas(c)
  as_jax = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
  with jax.set_mesh(mesh):
    params_M = jax.tree.map(lambda x: jnp.stack([x] * replicas), as_jax(theta))
    params_M = jax.device_put(params_M, mesh_lib.shardings(params_M, mesh, True))
    state = outer.init(params_M)
    events = []
    for t, step in enumerate(increments, start=1):
      step_M = jax.tree.map(lambda *x: jnp.stack(x), *[as_jax(u) for u in step])
      params_M = jax.tree.map(jnp.add, params_M, step_M)
      params_M, state, new = outer_lib.outer_step(outer, t, params_M, state)
      events += new
    params_M, state, new = outer_lib.drain(outer, len(increments), params_M, state)
    events += new
    if final_sync:
      params_M, state, new = outer_lib.sync_all(outer, len(increments), params_M, state)
      events += new
    theta = outer_lib.assemble(outer, state, as_jax(theta))
  get = lambda tree: jax.tree.map(np.asarray, tree)
  return (
    get(params_M),
    get(theta),
    state,
    [(e.kind, e.step, e.fragment) for e in events],
  )


def run_reference(c, theta, increments):
  nesterov = c.outer.optimizer == "nesterov"
  make = lambda: reference.Sgd(c.outer.learning_rate, c.outer.momentum, nesterov)
  if c.outer.optimizer == "adam":
    make = lambda: reference.Adam(c.outer.learning_rate)
  return reference.simulate(
    theta,
    increments,
    fragments=reference.make_fragments(LAYERS, c.fragments.size, c.fragments.pattern),
    sync_every=c.sync_every,
    taus=list(c.overlap.taus),
    alpha=c.overlap.alpha,
    make_optimizer=make,
    block=c.wire.block_size if c.wire.format == "e3m0" else None,
  )


def assert_same(c, theta, increments, **tolerance):
  params_M, outer, state, events = run(c, theta, increments)
  expected = run_reference(c, theta, increments)
  check = functools.partial(np.testing.assert_allclose, **tolerance)
  jax.tree.map(check, outer, expected["theta"])
  for m, replica in enumerate(expected["replicas"]):
    jax.tree.map(check, jax.tree.map(lambda x, m=m: x[m], params_M), replica)
  assert events == expected["log"]
  if c.outer.optimizer != "nesterov":
    return
  for p, optimizer in enumerate(expected["optimizers"]):
    if optimizer.trace is None:
      continue
    trace = optax.tree_utils.tree_get(state.opt_state[p], "trace")
    layers = make_fragments(LAYERS, c.fragments.size, c.fragments.pattern)[p].layers
    for (group, name, layer), value in optimizer.trace.items():
      mine = trace[group][name]
      check(np.asarray(mine if layer is None else mine[layers.index(layer)]), value)


settings_of_a_run = st.fixed_dictionaries(
  {
    "replicas": st.sampled_from([1, 2, 3]),
    "fragments.size": st.sampled_from([2, 3]),
    "fragments.pattern": st.sampled_from(["strided", "sequential", "whole"]),
    "sync_every": st.sampled_from([3, 4, 7]),
    "overlap.alpha": st.sampled_from([0.0, 0.5]),
  }
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(settings_of_a_run, st.data())
def test_agrees_with_the_reference(fields, data):
  tau = st.integers(0, fields["sync_every"] - 1)
  m = fields["replicas"]
  taus = tuple(data.draw(st.lists(tau, min_size=m, max_size=m)))
  c = make_config(**fields, **{"overlap.taus": taus})
  rng = np.random.default_rng(data.draw(st.integers(0, 99)))
  steps = data.draw(st.integers(2 * c.sync_every, 4 * c.sync_every))
  increments = [[random_tree(rng) for _ in range(m)] for _ in range(steps)]
  assert_same(c, random_tree(rng), increments, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
  ("taus", "block", "alpha"), [((1, 1), 4, 0.0), ((0, 2), 16, 0.5), ((3, 1), 8, 0.0)]
)
def test_agrees_exactly_through_four_bits(taus, block, alpha):
  # Codes are discontinuous, so only exact data can be compared through them:
  # multiples of powers of two, rates and a mean that keep them so.
  c = make_config(
    **{
      "overlap.taus": taus,
      "overlap.alpha": alpha,
      "sync_every": 4,
      "fragments.size": 2,
      "wire.format": "e3m0",
      "wire.block_size": block,
      "outer.learning_rate": 0.5,
      "outer.momentum": 0.5,
    }
  )
  rng = np.random.default_rng(8)
  increments = [[random_tree(rng, exact=True) for _ in range(2)] for _ in range(9)]
  assert_same(c, random_tree(rng, exact=True), increments, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_other_outer_optimizers_keep_their_state_per_fragment(optimizer):
  c = make_config(
    **{
      "outer.optimizer": optimizer,
      "outer.learning_rate": 0.05,
      "sync_every": 4,
      "fragments.size": 2,
      "overlap.tau": 2,
    }
  )
  rng = np.random.default_rng(0)
  increments = [[random_tree(rng) for _ in range(2)] for _ in range(14)]
  assert_same(c, random_tree(rng), increments, rtol=2e-4, atol=2e-5)


def test_several_fragments_in_flight_and_what_is_in_flight():
  c = make_config(**{"sync_every": 6, "fragments.size": 1, "overlap.tau": 5})
  schedule = config_lib.make_schedule(c)
  assert max(len(schedule.in_flight(t)) for t in range(1, 40)) >= 4
  rng = np.random.default_rng(1)
  increments = [[random_tree(rng) for _ in range(2)] for _ in range(20)]
  assert_same(c, random_tree(rng), increments, rtol=2e-5, atol=2e-5)


def test_streaming_with_one_fragment_is_diloco_bit_for_bit():
  rng = np.random.default_rng(2)
  theta = random_tree(rng)
  increments = [[random_tree(rng) for _ in range(2)] for _ in range(9)]
  streaming = make_config(
    **{"fragments.pattern": "whole", "overlap.tau": 0, "sync_every": 4}
  )
  diloco = make_config(
    algorithm="diloco", **{"overlap.tau": 3, "overlap.alpha": 0.5, "sync_every": 4}
  )
  a, b = run(streaming, theta, increments), run(diloco, theta, increments)
  jax.tree.map(np.testing.assert_array_equal, a[:2], b[:2])
  # And it is Algorithm 1.
  expected, _ = reference.diloco(
    theta,
    increments,
    sync_every=4,
    make_optimizer=lambda: reference.Sgd(0.4, 0.9, nesterov=True),
  )
  flat = lambda p: np.concatenate([np.ravel(p[g][n]) for g in theta for n in theta[g]])
  np.testing.assert_allclose(flat(b[1]), expected, rtol=1e-5, atol=1e-6)


def test_one_replica_one_step_rate_one_is_data_parallel():
  rng = np.random.default_rng(3)
  theta = random_tree(rng)
  increments = [[random_tree(rng)] for _ in range(7)]
  c = make_config(
    algorithm="diloco",
    replicas=1,
    sync_every=1,
    **{"outer.optimizer": "sgd", "outer.learning_rate": 1.0, "outer.momentum": 0.0},
  )
  params_M, outer, *_ = run(c, theta, increments)
  plain = jax.tree.map(lambda x: np.asarray(x, np.float32), theta)
  for (step,) in increments:
    plain = jax.tree.map(lambda a, b: a + np.asarray(b, np.float32), plain, step)
  # theta - (theta - x) is x up to one rounding.
  close = functools.partial(np.testing.assert_allclose, rtol=3e-7, atol=1e-7)
  jax.tree.map(close, outer, plain)
  jax.tree.map(lambda x, y: close(x[0], y), params_M, plain)


def test_alpha_one_leaves_replicas_untouched():
  rng = np.random.default_rng(4)
  theta = random_tree(rng)
  increments = [[random_tree(rng) for _ in range(2)] for _ in range(8)]
  c = make_config(**{"overlap.alpha": 1.0, "sync_every": 3, "overlap.tau": 1})
  params_M, *_ = run(c, theta, increments)
  plain_M = jax.tree.map(lambda x: np.stack([np.asarray(x, np.float32)] * 2), theta)
  for step in increments:
    plain_M = jax.tree.map(
      lambda p, a, b: p + np.stack([a, b]).astype(np.float32), plain_M, *step
    )
  jax.tree.map(np.testing.assert_array_equal, params_M, plain_M)


def test_final_sync_leaves_replicas_and_outer_parameters_equal():
  rng = np.random.default_rng(5)
  increments = [[random_tree(rng) for _ in range(2)] for _ in range(5)]
  c = make_config(**{"sync_every": 3, "overlap.tau": 1})
  params_M, outer, _, events = run(c, random_tree(rng), increments, final_sync=True)
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y), params_M, outer)
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y), params_M, outer)
  sent = [p for kind, _, p in events if kind == "send"]
  assert all(sent.count(p) >= 1 for p in range(len(config_lib.make_fragments(c))))


def test_an_update_touches_only_its_own_fragment():
  c = make_config(**{"sync_every": 4, "fragments.size": 2, "overlap.tau": 0})
  rng = np.random.default_rng(6)
  theta = random_tree(rng)
  increments = [[random_tree(rng) for _ in range(2)] for _ in range(4)]
  _, outer, _, events = run(c, theta, increments)
  assert [e for e in events if e[0] == "send"] == [("send", 4, 0)]
  first = config_lib.make_fragments(c)[0].layers
  moved = np.any(
    outer["blocks"]["w"] != theta["blocks"]["w"].astype(np.float32), (1, 2)
  )
  assert tuple(np.flatnonzero(moved)) == first
  np.testing.assert_array_equal(
    outer["embed"]["tokens"], theta["embed"]["tokens"].astype(np.float32)
  )


def test_the_outer_gradient_points_from_local_to_outer():
  # All replicas move by +1: with rate 1 and no momentum, theta follows them.
  c = make_config(
    algorithm="diloco",
    sync_every=2,
    **{"outer.optimizer": "sgd", "outer.learning_rate": 1.0, "outer.momentum": 0.0},
  )
  zero = jax.tree.map(np.zeros_like, random_tree(np.random.default_rng(0)))
  one = jax.tree.map(np.ones_like, zero)
  _, outer, *_ = run(c, zero, [[one, one]] * 2)
  jax.tree.map(lambda x: np.testing.assert_array_equal(x, 2.0), outer)


def test_pytorch_takes_the_same_outer_trajectory():
  path = pathlib.Path(__file__).parent / "fixtures" / "torch_nesterov.json"
  fixture = json.loads(path.read_text())
  for case in fixture["cases"]:
    c = make_config(
      **{"outer.learning_rate": case["lr"], "outer.momentum": case["momentum"]}
    )
    optimizer = outer_lib.make_optimizer(c)
    theta = jnp.asarray(fixture["theta"], jnp.float32)
    state = optimizer.init(theta)
    for grad, expected in zip(fixture["gradients"], case["trajectory"]):
      updates, state = optimizer.update(jnp.asarray(grad, jnp.float32), state, theta)
      theta = optax.apply_updates(theta, updates)
      np.testing.assert_allclose(theta, expected, rtol=1e-6)


def test_psum_reference_agrees_bit_for_bit_for_two_replicas():
  rng = np.random.default_rng(7)
  theta = random_tree(rng)
  increments = [[random_tree(rng) for _ in range(2)] for _ in range(9)]
  fields = {"sync_every": 4, "wire.format": "e3m0", "wire.block_size": 8}
  gather = run(make_config(**fields), theta, increments)
  psum = run(make_config(**fields, **{"wire.exchange": "psum"}), theta, increments)
  jax.tree.map(np.testing.assert_array_equal, gather[:2], psum[:2])


@pytest.mark.parametrize("name", ["nosuch", "_src", "adamw_typo", "global_norm"])
def test_unknown_outer_optimizer(name):
  with pytest.raises(config_lib.ConfigError, match=r"outer.optimizer is "):
    outer_lib.make_optimizer(make_config(**{"outer.optimizer": name}))
