"""FedPart: what is trained when, and its steps by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from diloco.algorithm import optimizers
from diloco.config import Config, add_plugins, changed, resolve
from diloco.contrib import fedpart


def make(tiny, **fields) -> Config:
  add_plugins(tiny, "fedpart")
  tiny.update_from_flattened_dict({"fedpart.on": True, **fields})
  return resolve(tiny)


@pytest.mark.parametrize("sync_every", [2, 30])  # With 4 fragments.
def test_what_is_sent_next_is_trained(tiny, sync_every):
  c = make(tiny, sync_every=sync_every, **{"train.steps": 99})
  fragments, schedule = c.make_fragments(), c.make_schedule()
  for t in range(1, 3 * sync_every):
    sends = next(s for s in map(schedule.sends, range(t, t + 99)) if s)
    layers = sorted(n for p in sends for n in fragments[p].layers)
    trained = fedpart.trained_next(c, jnp.int32(t))
    assert list(np.flatnonzero(trained["blocks"])) == layers, t
    assert trained["embed"] == any(fragments[p].rest for p in sends)


def draw(rng):
  """Three layers, each with a matrix and a scale, and an embedding."""
  one = lambda *shape: jnp.float32(rng.normal(size=shape))
  blocks = {"w": one(3, 8, 4), "norm": {"scale": one(3, 8)}}
  return {"blocks": blocks, "embed": {"e": one(5, 4)}}


def test_fedpart_by_hand(tiny, monkeypatch):
  """As torch does without a gradient: no moments, no count, no share in the norm."""
  rates = {"inner.warmup_steps": 0, "inner.learning_rate": 0.02}
  c = make(tiny, **rates, **{"inner.clip_norm": 0.5, "train.steps": 10})
  rate, rng = optimizers.learning_rate(c), np.random.default_rng(0)

  def tensors(tree):
    """{name: [layer 0, ...]}, with the embedding as one more layer."""
    blocks = tree["blocks"]
    layers = [*zip(blocks["w"], blocks["norm"]["scale"]), [tree["embed"]["e"]]]
    return [[np.asarray(x, np.float64) for x in layer] for layer in layers]

  def layer(state, n):
    """All arrays of a layer's optimizer state but the count of the schedule."""
    part = state[1]["embed"]
    if n < 3:
      part = jax.tree.map(lambda x: x[n], state[1]["blocks"])
    return [np.asarray(x) for x in jax.tree.leaves(part[0])]

  mine = x = draw(rng)
  rounds = [{0}, {1, 3}, {1, 3}, {0}, {2}, {0, 3}]
  trained_TxN = jnp.array([[n in trained for n in range(4)] for trained in rounds])
  mask = lambda c, t: {"blocks": trained_TxN[t - 1, :3], "embed": trained_TxN[t - 1, 3]}
  monkeypatch.setattr(fedpart, "trained_next", mask)
  inner = optimizers.make_inner(c)
  state, x, step = inner.init(mine), tensors(x), jax.jit(inner.update)
  m, v, count = [[[0.0] * 2 for _ in range(4)] for _ in range(2)] + [[0] * 4]
  for t, trained in enumerate(rounds):
    g = draw(rng)
    # Nothing of a frozen layer counts, not even infinity.
    frozen = jnp.array([n not in trained for n in range(3)])
    g["blocks"]["w"] = jnp.where(frozen[:, None, None], jnp.inf, g["blocks"]["w"])
    before, (updates, state) = state, step(g, state, mine)
    after, g = optax.apply_updates(mine, updates), tensors(g)
    norm = np.sqrt(sum(np.square(a, dtype=float).sum() for n in trained for a in g[n]))
    assert norm > 0.5
    for n in range(4):
      if n not in trained:
        for a, b in zip(layer(before, n), layer(state, n)):
          np.testing.assert_array_equal(a, b)
        for a, b in zip(tensors(mine)[n], tensors(after)[n]):
          np.testing.assert_array_equal(a, b)
        continue
      count[n] += 1
      for i, a in enumerate(g[n]):
        a = a * 0.5 / norm
        m[n][i] = 0.9 * m[n][i] + 0.1 * a
        v[n][i] = 0.99 * v[n][i] + 0.01 * a * a
        root = np.sqrt(v[n][i] / (1 - 0.99 ** count[n])) + 1e-8
        adam = m[n][i] / (1 - 0.9 ** count[n]) / root
        x[n][i] = x[n][i] - float(rate(t)) * (adam + x[n][i] / 10 / 0.02)
        np.testing.assert_allclose(tensors(after)[n][i], x[n][i], rtol=1e-5)
    mine = after


@pytest.mark.parametrize(
  "text", ["adamw(b1=0.9, b2=0.99)", "muon(consistent_rms=0.2, adam_b2=0.99)"]
)
def test_fedpart_that_trains_all_layers_steps_as_without_it(tiny, monkeypatch, text):
  part = make(tiny, **{"inner.optimizer": text, "inner.warmup_steps": 0})
  c = changed(part, {"fedpart.on": False})
  params, *grads = [draw(np.random.default_rng(i)) for i in range(3)]
  mask = {"blocks": np.ones(3, bool), "embed": np.bool_(True)}
  monkeypatch.setattr(fedpart, "trained_next", lambda c, t: mask)
  whole, parts = optimizers.make_inner(c), optimizers.make_inner(part)
  states = [whole.init(params), parts.init(params)]
  for g in grads:
    updates, states[0] = whole.update(g, states[0], params)
    by_part, states[1] = parts.update(g, states[1], params)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8),
      *(by_part, updates),
    )


@pytest.mark.parametrize("lead", [(), ("replica",)])
def test_the_state_of_each_layer_is_sharded_like_the_parameters(tiny, lead):
  mesh = AbstractMesh((1, 4), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
  shapes = {"blocks": {"w": (3, 256, 128)}, "embed": {"tokens": (512, 256)}}
  struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = jax.tree.map(struct, shapes, is_leaf=lambda x: isinstance(x, tuple))
  inner = optimizers.make_inner(make(tiny))
  places = optimizers.state_shardings("inner.optimizer", inner, params, mesh, lead)
  state, found = jax.eval_shape(inner.init, params), list[tuple]()
  for x, at in zip(jax.tree.leaves(state), jax.tree.leaves(places)):
    axes = {3: (None, "fsdp"), 2: ("fsdp",)}.get(x.ndim, ())
    assert at.spec == P(*lead, *axes)
    found.append(x.shape)
  found = sorted(x for x in found if len(x) > 1)
  assert found == [(3, 256, 128)] * 2 + [(512, 256)] * 2
