"""Delayed Nesterov against float64 NumPy, alone and as an outer optimizer."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diloco
from diloco.contrib.delayed_nesterov import delayed_nesterov


def by_hand(theta, gradients, rates, every, mu, c):
  """The pseudo-code of arXiv 2401.09135, as its public implementations have it."""
  m, total = 0, 0
  for t, (g, rate) in enumerate(zip(gradients, rates)):
    total = total + g
    if (t + 1) % every == 0:
      m = mu * m + total / every
      theta = theta - rate * ((1 - c * every + c) * mu * m + g / every)
      total = 0
    else:
      theta = theta - rate * (c * mu * m + g / every)
  return theta


@pytest.mark.parametrize(
  ("every", "mu", "c"), [(1, 0.9, 0.0), (3, 0.8, 0.0), (4, 0.7, 0.25), (2, 0.9, 0.1)]
)
def test_updates_equal_the_pseudo_code(every, mu, c):
  rng = np.random.default_rng(every)
  gradients, theta = rng.normal(size=(11, 3, 2)), rng.normal(size=(3, 2))
  rates = np.linspace(0.5, 0.1, 11)
  optimizer = delayed_nesterov(lambda t: jnp.asarray(rates)[t], every, mu, c)
  x = {"a": jnp.asarray(theta, jnp.float32)}
  state = optimizer.init(x)
  for g in gradients:
    updates, state = optimizer.update({"a": jnp.asarray(g, jnp.float32)}, state, x)
    x = optax.apply_updates(x, updates)
  want = by_hand(theta, gradients, rates, every, mu, c)
  np.testing.assert_allclose(x["a"], want, rtol=1e-5, atol=1e-5)


def train(optimizer, rate=0.5):
  """Six syncs with this outer optimizer; returns the outer parameters."""
  params_M = diloco.replicate({"w": jnp.ones((4, 3))}, 2)
  outer = diloco.OuterConfig(optimizer, rate)
  method = diloco.streaming(params_M, sync_every=2, tau=1, outer=outer)
  state = method.init(params_M)
  for t in range(1, 13):
    move = np.random.default_rng(t).normal(size=(2, 4, 3)) / 8
    params_M = {"w": params_M["w"] + jnp.float32(move)}
    params_M, state, _ = method.step(t, params_M, state)
  return np.asarray(method.params(state)["w"])


def test_an_outer_optimizer_of_this_name_trains():
  nesterov = train("sgd(momentum=0.8, nesterov=True)")
  every_sync = train("delayed_nesterov(every=1, momentum=0.8)")
  np.testing.assert_allclose(every_sync, nesterov, rtol=1e-5)
  plain, delayed = (train(f"delayed_nesterov(every={n})") for n in (20, 3))
  # The momentum has not changed yet, so each step is that of SGD with a 20th rate.
  np.testing.assert_allclose(plain, train("sgd", 0.5 / 20), rtol=1e-5)
  assert np.abs(delayed - plain).max() > 1e-2


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("delayed_nesterov", "every"),
    ("delayed_nesterov(every=0)", "every is 0, but must be a whole number"),
    ("delayed_nesterov(every=4, activation=0.5)", "activation is 0.5"),
    ("delayed_nesterov(every=4, nesterov=True)", "takes no argument nesterov"),
  ],
)
def test_mistakes_are_named(text, message):
  with pytest.raises(diloco.ConfigError, match=message):
    train(text)
