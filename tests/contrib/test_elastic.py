"""The elastic pull against float64 NumPy, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.algorithm.optimizers import learning_rate, make_inner
from diloco.algorithm.streaming import make_streaming
from diloco.config import add_plugins, resolve
from diloco.errors import ConfigError
from diloco.mesh.devices import make_mesh

M, STEPS = 2, 14


def make(tiny, **fields):
  add_plugins(tiny, "elastic")
  own = {"elastic.pull": 0.3, "sync_every": 4, "train.steps": STEPS}
  tiny.update_from_flattened_dict(own | fields)
  return resolve(tiny)


@pytest.mark.parametrize("tau", [0, 2])
def test_the_pull_by_hand(tiny, tau):
  """SGD inside and outside, in float32 payloads: each layer of 'w', and 'e'."""
  fields = {"inner.optimizer": "sgd", "inner.weight_decay": 0.0, "inner.clip_norm": 0.0}
  fields |= {"inner.learning_rate": 0.1, "outer.optimizer": "sgd(momentum=0.5)"}
  c = make(tiny, **fields, **{"overlap.tau": tau, "wire.format": "fp32"})
  draw = np.random.default_rng(0).normal
  one = {"blocks": {"w": draw(size=(3, 4))}, "embed": {"e": draw(size=(5,))}}
  of_all = lambda x: draw(size=(M, *x.shape))
  grads = [jax.tree.map(of_all, one) for _ in range(STEPS + 1)]
  sync = make_streaming(c, make_mesh(c, jax.devices()[:1]), jax.tree.map(np.shape, one))
  params = jax.tree.map(lambda x: jnp.stack([jnp.float32(x)] * M), one)
  inner, outer = make_inner(c), sync.init(params)
  opt_state, step = jax.vmap(inner.init)(params), jax.jit(jax.vmap(inner.update))
  with jax.set_mesh(sync.mesh):
    for t in range(1, STEPS + 1):
      updates, opt_state = step(jax.tree.map(jnp.float32, grads[t]), opt_state, params)
      params = optax.apply_updates(params, updates)
      params, outer, _ = sync.step(t, params, outer)

  def layers(tree):
    """The tensors of each layer and of the rest, with replicas in front if it has."""
    return [*np.moveaxis(tree["blocks"]["w"], -2, 0), tree["embed"]["e"]]

  theta, rate = layers(one), learning_rate(c)
  x_M, v = [np.stack([x] * M) for x in theta], [0 * x for x in theta]
  sent, schedule, fragments = {}, c.make_schedule(), c.make_fragments()
  of = lambda p: [*fragments[p].layers, *[3] * bool(fragments[p].rest)]
  for t in range(1, STEPS + 1):
    eta = float(rate(t - 1))
    for n, g in enumerate(layers(grads[t])):
      x_M[n] = x_M[n] - eta * g
      x_M[n] = x_M[n] - 0.3 * (eta / 0.1) * (x_M[n] - theta[n])
    for n in [n for p in schedule.sends(t) for n in of(p)]:
      sent[n] = theta[n] - x_M[n].mean(axis=0)
    for n in [n for p, _ in schedule.arrivals(t) for n in of(p)]:
      v[n] = 0.5 * v[n] + sent[n]
      theta[n] = theta[n] - c.outer.learning_rate * v[n]
      x_M[n] = np.stack([theta[n]] * M)
  for mine, by_hand in zip(layers(jax.tree.map(np.asarray, params)), x_M):
    np.testing.assert_allclose(mine, by_hand, rtol=2e-5, atol=2e-6)


def test_two_plugins_that_change_the_inner_optimizer_are_refused(tiny):
  add_plugins(tiny, "fedpart")
  with pytest.raises(ConfigError, match="of which 2 change the inner optimizer"):
    make_inner(make(tiny, **{"fedpart.on": True}))
