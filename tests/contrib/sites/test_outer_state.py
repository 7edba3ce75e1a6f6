"""The outer step of sites: outer gradients are weighted by tokens."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.algorithm.optimizers import make_outer
from diloco.algorithm.streaming import make_streaming
from diloco.config import resolve
from diloco.contrib.sites import outer_state
from diloco.contrib.sites.group.journal import Closed
from diloco.mesh.devices import make_mesh
from diloco.mesh.sharding import abstract
from diloco.wire import exchange


@pytest.mark.parametrize(
  ("tokens", "per_step"),
  [
    ({0: 3, 1: 1, 2: 2}, {}),
    ({0: 3, 2: 1}, {0: 7, 2: 7}),
    ({0: 5, 1: 5, 2: 5}, {0: 5, 1: 5, 2: 5}),
    ({0: 12, 1: 4, 2: 12}, {0: 2, 1: 4, 2: 6}),
  ],
)
def test_the_mean_is_weighted_by_tokens_and_tokens_per_step(tiny, tokens, per_step):
  """As in Decoupled DiLoCo (arXiv 2604.21428); here each site has two replicas."""
  tiny.wire.format = "fp32"
  tiny.outer.optimizer, tiny.outer.learning_rate = "sgd", 0.5
  c = resolve(tiny)
  mesh = make_mesh(c, jax.devices()[:1])
  sync = make_streaming(c, mesh)
  rng = np.random.default_rng(0)
  draw = lambda *lead: jax.tree.map(
    lambda x: jnp.float32(rng.normal(size=(*lead, *x.shape))),
    abstract(sync.shapes[0], "float32"),
  )
  theta, deltas = draw(), {site: draw(2) for site in tokens}
  keys_M = jax.random.split(jax.random.key(0), 2)
  state_M = exchange.init_state(sync.wire, deltas[0])
  encode = jax.jit(lambda x_M: exchange.encode(sync.wire, mesh, x_M, state_M, keys_M))
  payloads = {k: np.asarray(encode(x_M)[0]).tobytes() for k, x_M in deltas.items()}
  start = jax.tree.map(np.asarray, theta)
  opt_state = make_outer(c.outer).init(theta)
  calendar = types.SimpleNamespace(sites=3)
  closed = Closed(0, 0, 1, tokens, payloads, per_step)
  found, _, _ = outer_state.apply(sync, calendar, closed, theta, opt_state)
  weights = np.repeat([n * per_step.get(site, 1) for site, n in tokens.items()], 2)
  mean = lambda *deltas_M: np.average(np.concatenate(deltas_M), axis=0, weights=weights)
  wanted = jax.tree.map(lambda x, *d: x - 0.5 * mean(*d), start, *deltas.values())
  compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  jax.tree.map(compare, found, wanted)
  if len({*per_step.values()}) == 1:  # Equal batches: the bits of tokens alone.
    theta, opt_state = jax.tree.map(jnp.array, start), make_outer(c.outer).init(start)
    closed = closed._replace(per_step={})
    alone, _, _ = outer_state.apply(sync, calendar, closed, theta, opt_state)
    jax.tree.map(np.testing.assert_array_equal, alone, found)
