"""The outer step of sites: outer gradients are weighted by tokens."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.algorithm.make import make_plan
from diloco.algorithm.optimizers import make_outer
from diloco.config import resolve
from diloco.contrib.sites import outer_state
from diloco.contrib.sites.link import Closed
from diloco.mesh.devices import make_mesh
from diloco.mesh.sharding import abstract
from diloco.wire import exchange


@pytest.mark.parametrize(
  "tokens", [{0: 3, 1: 1, 2: 2}, {0: 3, 2: 1}, {0: 5, 1: 5, 2: 5}]
)
def test_the_mean_is_weighted_by_tokens(tiny, tokens):
  """As in Decoupled DiLoCo (arXiv 2604.21428); here each site has two replicas."""
  tiny.wire.format = "fp32"
  tiny.outer.optimizer, tiny.outer.learning_rate = "sgd", 0.5
  c = resolve(tiny)
  mesh = make_mesh(c, jax.devices()[:1])
  plan = make_plan(c, mesh)
  rng = np.random.default_rng(0)
  draw = lambda *lead: jax.tree.map(
    lambda x: jnp.float32(rng.normal(size=(*lead, *x.shape))),
    abstract(plan.shapes[0], "float32"),
  )
  theta, deltas = draw(), {site: draw(2) for site in tokens}
  keys_M = jax.random.split(jax.random.key(0), 2)
  encode = jax.jit(lambda x_M: exchange.encode(plan.wire, mesh, x_M, state_M, keys_M))
  payloads, state_M = {}, exchange.init_state(plan.wire, deltas[0])
  for site, delta_M in deltas.items():
    code, _ = encode(delta_M)
    payloads[site] = np.asarray(code).tobytes()
  start = jax.tree.map(np.asarray, theta)
  opt_state = make_outer(c.outer).init(theta)
  calendar = types.SimpleNamespace(sites=3)
  closed = Closed(0, 0, tokens, payloads)
  found, _, _ = outer_state.apply(plan, calendar, closed, theta, opt_state)
  replicas = [
    (n, jax.tree.map(lambda x, m=m: x[m], deltas[site]))
    for site, n in tokens.items()
    for m in range(2)
  ]
  weights = [n for n, _ in replicas]
  mean = jax.tree.map(
    lambda *x: np.average(x, axis=0, weights=weights), *(d for _, d in replicas)
  )
  for new, old, delta in zip(*map(jax.tree.leaves, (found, start, mean)), strict=True):
    np.testing.assert_allclose(new, old - 0.5 * delta, rtol=1e-5, atol=1e-6)
