"""The outer step of sites: outer gradients are weighted by tokens."""

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
  encode = jax.jit(lambda x_M: exchange.encode(sync.wire, mesh, x_M, state_M, keys_M))
  payloads, state_M = {}, exchange.init_state(sync.wire, deltas[0])
  for site, delta_M in deltas.items():
    code, _ = encode(delta_M)
    payloads[site] = np.asarray(code).tobytes()
  start = jax.tree.map(np.asarray, theta)
  opt_state = make_outer(c.outer).init(theta)
  calendar = types.SimpleNamespace(sites=3)
  closed = Closed(0, 0, 1, tokens, payloads, per_step)
  found, _, _ = outer_state.apply(sync, calendar, closed, theta, opt_state)
  replicas = [
    (n, jax.tree.map(lambda x, m=m: x[m], deltas[site]))
    for site, n in tokens.items()
    for m in range(2)
  ]
  weights = [n * per_step.get(site, 1) for site, n in tokens.items() for _ in range(2)]
  mean = jax.tree.map(
    lambda *x: np.average(x, axis=0, weights=weights), *(d for _, d in replicas)
  )
  for new, old, delta in zip(*map(jax.tree.leaves, (found, start, mean)), strict=True):
    np.testing.assert_allclose(new, old - 0.5 * delta, rtol=1e-5, atol=1e-6)
  if len({*per_step.values()}) == 1:  # Equal batches: the bits of tokens alone.
    closed, theta = Closed(0, 0, 1, tokens, payloads), jax.tree.map(jnp.array, start)
    args = (closed, theta, make_outer(c.outer).init(theta))
    alone, _, _ = outer_state.apply(sync, calendar, *args)
    jax.tree.map(np.testing.assert_array_equal, alone, found)
