"""The outer step's limits, bit for bit; test_outer_reference.py has the rest."""

import functools
import json

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from diloco import config as config_lib
from diloco.algorithm import outer as outer_lib
from diloco.algorithm import sync as sync_lib
from diloco.config import fields
from diloco.model import sharding as mesh_lib
from diloco.run import mesh as run_mesh

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
  mesh = run_mesh.make_mesh(c, jax.devices()[:1])
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
      params_M, state, new = sync_lib.outer_step(outer, t, params_M, state)
      events += new
    params_M, state, new = sync_lib.drain(outer, len(increments), params_M, state)
    events += new
    if final_sync:
      params_M, state, new = sync_lib.sync_all(outer, len(increments), params_M, state)
      events += new
    theta = outer_lib.assemble(outer, state, as_jax(theta))
  get = lambda tree: jax.tree.map(np.asarray, tree)
  return (
    get(params_M),
    get(theta),
    state,
    [(e.kind, e.step, e.fragment) for e in events],
  )


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


def test_final_sync_is_none_of_the_scheduled_ones():
  rng = np.random.default_rng(5)
  increments = [[random_tree(rng) for _ in range(2)] for _ in range(6)]
  c = make_config(**{"sync_every": 3, "overlap.tau": 1})
  *_, events = run(c, random_tree(rng), increments, final_sync=True)
  assert ("send", 6, 0) in events
  assert len(set(events)) == len(events)
  fragments = range(len(config_lib.make_fragments(config_lib.resolve(c))))
  final = [(kind, 8, p) for p in fragments for kind in ("send", "receive")]
  assert events[-len(final) :] == final


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


def test_psum_reference_agrees_bit_for_bit_for_two_replicas():
  rng = np.random.default_rng(7)
  theta = random_tree(rng)
  increments = [[random_tree(rng) for _ in range(2)] for _ in range(9)]
  fields = {"sync_every": 4, "wire.format": "e3m0", "wire.block_size": 8}
  gather = run(make_config(**fields), theta, increments)
  psum = run(make_config(**fields, **{"wire.exchange": "psum"}), theta, increments)
  jax.tree.map(np.testing.assert_array_equal, gather[:2], psum[:2])


@pytest.mark.parametrize("name", ["nope", "clip", "ema", "scale", "masked", "lbfgs"])
def test_what_is_no_outer_optimizer(name):
  with pytest.raises(config_lib.ConfigError, match=f"outer.optimizer is '{name}'; ch"):
    make_config(**{"outer.optimizer": name})


@pytest.mark.parametrize("name", fields.OUTER_OPTIMIZERS)
def test_every_outer_optimizer_descends(name):
  c = make_config(**{"outer.optimizer": name, "outer.learning_rate": 0.1})
  start = theta = jnp.asarray([[3.0, -2.0]])
  optimizer = outer_lib.make_optimizer(c)
  opt_state = optimizer.init(theta)
  for _ in range(3):  # Of |theta|^2 / 2, whose gradient is theta.
    updates, opt_state = optimizer.update(theta, opt_state, theta)
    theta = theta + updates
  assert (abs(theta) < abs(start)).all()
