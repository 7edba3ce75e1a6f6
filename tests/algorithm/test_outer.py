"""The outer step's limits, bit for bit; test_outer_reference.py has the rest."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.algorithm.method import Method
from diloco.algorithm.outer import merge, outer_step, send, update
from diloco.algorithm.state import InFlight
from diloco.algorithm.streaming import Streaming, make_streaming
from diloco.config import Config, default_config, resolve
from diloco.mesh import sharding
from diloco.mesh.devices import make_mesh
from diloco.wire import exchange

LAYERS, WIDTH, ROWS = 5, 6, 7


def make_config(**fields) -> Config:
  c = default_config()
  c.model.num_layers, c.model.dim, c.model.num_heads = LAYERS, 8, 1
  c.train.steps, c.train.batch_size = 1000, 12
  c.wire.format = "fp32"
  c.update_from_flattened_dict(fields)
  return resolve(c)


def random_tree(rng) -> dict:
  draw = lambda *shape: rng.normal(size=shape) * 0.1
  return {
    "embed": {"tokens": draw(ROWS, 4)},
    "blocks": {"w": draw(LAYERS, WIDTH, 3), "norm": draw(LAYERS, WIDTH)},
  }


def drawn(seed: int, steps: int) -> tuple[dict, list]:
  """Outer parameters, and what two replicas add to them at each step."""
  rng = np.random.default_rng(seed)
  theta = random_tree(rng)
  return theta, [[random_tree(rng) for _ in range(2)] for _ in range(steps)]


def make_sync(c: Config, theta) -> Streaming:
  shapes = jax.tree.map(np.shape, theta)
  return make_streaming(c, make_mesh(c, jax.devices()[:1]), shapes)


def run(c: Config, theta, increments, final_sync=False):
  """The package's outer step with inner steps replaced by increments."""
  sync = make_sync(c, theta)
  as_jax = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
  with jax.set_mesh(sync.mesh):
    params_M = jax.tree.map(lambda x: jnp.stack([x] * c.replicas), as_jax(theta))
    places = sharding.shardings(params_M, sync.mesh, (sharding.REPLICA,))
    params_M = jax.device_put(params_M, places)
    state = sync.init(params_M)
    events = []
    for t, step in enumerate(increments, start=1):
      step_M = jax.tree.map(lambda *x: jnp.stack(x), *[as_jax(u) for u in step])
      params_M = jax.tree.map(jnp.add, params_M, step_M)
      params_M, state, new = outer_step(sync, t, params_M, state)
      events += new
    last = len(increments)
    params_M, state, new = sync.drain(last, params_M, state, final_sync)
    events += new
    theta = sync.params(state)
  get = lambda tree: jax.tree.map(np.asarray, tree)
  return get(params_M), get(theta), [(e.kind, e.step, e.fragment) for e in events]


def test_the_final_sync_is_a_step_of_its_own_and_leaves_all_equal():
  c = make_config(**{"sync_every": 3, "overlap.tau": 1})
  params_M, outer, events = run(c, *drawn(seed=5, steps=6), final_sync=True)
  for m in range(2):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[m], y), params_M, outer)  # noqa: B023
  assert ("send", 6, 0) in events
  assert len(set(events)) == len(events)
  fragments = range(len(c.make_fragments()))
  final = [(kind, 8, p) for kind in ("send", "receive") for p in fragments]
  assert events[-len(final) :] == final


def test_bfloat16_replicas_that_did_not_train_send_zeros():
  c = make_config(**{"fragments.pattern": "whole"})
  theta = jax.tree.map(jnp.float32, random_tree(np.random.default_rng(7)))
  sync = make_sync(c, theta)
  merged_M = jax.tree.map(lambda x: jnp.bfloat16(jnp.stack([x, x])), theta)

  def norm_M(params_M):
    codec_state = sync.init(params_M).codec_state[0]
    args = (params_M, theta, codec_state, sync.layers[0], jax.random.key(0))
    return send(*args, wire=sync.wire, mesh=sync.mesh)[2]["outer_grad_norm"]

  with jax.set_mesh(sync.mesh):
    np.testing.assert_array_equal(norm_M(merged_M), 0)
    trained_M = jax.tree.map(lambda x: x * 2, merged_M)
    assert (norm_M(trained_M) > 0.1).all()


def test_no_two_sends_share_a_key():
  c = make_config()
  sync = make_streaming(c, make_mesh(c, jax.devices()[:1]))
  sends = itertools.product((0, 1), range(1, 9), range(5))  # Seed, step, fragment.
  keys = {
    tuple(jax.random.key_data(dataclasses.replace(sync, seed=seed).key(t, p)).tolist())
    for seed, t, p in sends
  }
  assert len(keys) == 2 * 8 * 5


def test_each_replica_and_step_draws_numbers_of_its_own():
  wire = {"wire.format": "e3m0", "wire.compressor": "random"}
  c = make_config(**{"replicas": 4, "fragments.pattern": "whole", **wire})
  theta = jax.tree.map(jnp.float32, random_tree(np.random.default_rng(8)))
  sync = make_sync(c, theta)
  same_M = jax.tree.map(lambda x: jnp.stack([1.1 * x] * 4), theta)

  def sent(t: int, some: slice, first: int):
    """Payloads of some replicas, all of which have the same outer gradient."""
    params_M, state_M = jax.tree.map(lambda x: x[some], (same_M, codec_state_M))
    return np.asarray(sync.encode(t, 0, params_M, theta, state_M, first)[0])

  with jax.set_mesh(sync.mesh):
    [codec_state_M] = sync.init(same_M).codec_state
    whole, own = sent(2, slice(4), 0), sent(2, slice(2), 2)
    later = sent(4, slice(4), 0)
  # A site has some of the replicas, and draws their numbers.
  np.testing.assert_array_equal(own, whole[2:])
  assert len({x.tobytes() for x in (*whole, *later)}) == 8


@pytest.mark.parametrize(("dtype", "alpha"), [("bfloat16", 0.3), ("float32", 1.0)])
def test_a_merge_mixes_replicas_in_float32(dtype, alpha):
  rng = np.random.default_rng(3)
  replica, outer = rng.normal(size=(2, LAYERS, WIDTH)).astype(dtype)
  outer = outer.astype(np.float32) * 1.001
  trees = [{"blocks": {"w": jnp.asarray(x)}} for x in (replica[None], outer)]
  merged = merge(*trees, np.arange(LAYERS), np.array([True]), alpha=alpha)
  exact = alpha * replica.astype(np.float64) + (1 - alpha) * outer
  expected = exact.astype(np.float32).astype(dtype)
  np.testing.assert_array_equal(np.asarray(merged["blocks"]["w"])[0], expected)


def test_the_metrics_of_a_sync_equal_numpy():
  fields = {"fragments.pattern": "whole", "wire.format": "e3m0", "wire.block_size": 4}
  c = make_config(replicas=3, sync_every=2, **fields)
  rng = np.random.default_rng(9)
  theta = jax.tree.map(jnp.float32, random_tree(rng))
  sync = make_sync(c, theta)
  moves = [random_tree(rng) for _ in range(3)]
  params_M = jax.tree.map(lambda t, *x: t + 0.01 * jnp.float32(x), theta, *moves)
  rows = lambda tree_M: np.concatenate(
    [np.float64(x).reshape(len(x), -1) for x in jax.tree.leaves(tree_M)], axis=1
  )
  norm = lambda x: np.sqrt(np.sum(x**2, axis=-1))
  with jax.set_mesh(sync.mesh):
    start_M = jax.tree.map(lambda x: jnp.stack([x] * 3), theta)
    state = sync.init(start_M)
    args = (params_M, theta, state.codec_state[0], sync.layers[0], jax.random.key(0))
    payload, _, sent = send(*args, wire=sync.wire, mesh=sync.mesh)
    decoded_M = exchange.decode(
      sync.wire, sync.mesh, payload, theta, (sharding.REPLICA,)
    )
    old = jax.tree.map(np.array, theta)  # `receive` donates theta.
    stepped, _, received = sync.update(theta, state.opt_state[0], InFlight(payload))
  delta_M, coded_M = rows(start_M) - rows(params_M), rows(decoded_M)
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4)
  assert (norm(delta_M) < 0.1).all()
  close(sent["outer_grad_norm"], norm(delta_M))
  close(sent["quantization_error"], norm(coded_M - delta_M) / norm(delta_M))
  assert (sent["quantization_error"] > 0.01).all()
  close(received["outer_grad_mean_norm"], norm(coded_M.mean(axis=0)))
  one_M = lambda tree: jax.tree.map(lambda x: x[None], tree)
  close(received["outer_update_norm"], norm(rows(one_M(stepped)) - rows(one_M(old))))
  units_M = coded_M / norm(coded_M)[:, None]
  pairs = (units_M @ units_M.T)[np.triu_indices(3, k=1)]
  close(received["outer_grad_cosine"], pairs.mean())


def lowered_update(rate: float, optimizer: str) -> str:
  """The update's program; its payload and outer state consist of shapes."""
  c = make_config(**{"outer.learning_rate": rate, "outer.optimizer": optimizer})
  mesh = make_mesh(c, jax.devices()[:1])
  with jax.set_mesh(mesh):
    sync = make_streaming(c, mesh)
    outer = Method(c, sync).abstract().outer
    args = (outer.theta[0], outer.opt_state[0], sync.payload(0), sync.tuned)
    return update.lower(*args, wire=c.wire, outer=c.outer, mesh=mesh).as_text()


def test_runs_with_different_outer_rates_and_momenta_share_one_program():
  own = lowered_update(0.4, "sgd(momentum=0.9, nesterov=True)")
  assert own == lowered_update(0.7, "sgd(momentum=0.5, nesterov=True)")
  assert own != lowered_update(0.4, "sgd(momentum=0.9)")
