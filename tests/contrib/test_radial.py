"""Radial-directional averaging against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diloco
from diloco.algorithm import outer
from diloco.config import changed, resolve
from diloco.contrib.radial import average
from diloco.errors import ConfigError

RADIAL = diloco.OuterConfig("sgd", 1.0, average="radial")


def radial(tensors, weights):
  """The mean norm times the normalised mean direction of one tensor per replica."""
  pairs = [(w, np.asarray(x, float)) for w, x in zip(weights, tensors) if w]
  total = sum(w for w, _ in pairs)
  unit = lambda x: x / np.linalg.norm(x) if x.any() else x
  length = sum(w * np.linalg.norm(x) for w, x in pairs) / total
  return length * unit(sum(w * unit(x) for w, x in pairs) / total)


@pytest.mark.parametrize("weights", [None, (3.0, 0.0, 1.0)])
def test_each_tensor_of_each_layer_is_averaged_by_itself(weights):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  delta_M = {
    "blocks": {"w": draw(3, 2, 4, 5), "b": draw(3, 2, 4)},
    "embed": {"t": draw(3, 6, 4)},
    "rest": {"z": draw(3, 7)},
  }
  delta_M["blocks"]["w"][:, 1] = 0  # A layer that did not move.
  if weights:  # What an absent site sends may decode to anything.
    delta_M["blocks"]["b"][1], delta_M["rest"]["z"][1] = np.nan, np.inf
  weights_M = jnp.asarray(weights) if weights else None
  found = average(jax.tree.map(jnp.asarray, delta_M), weights_M)
  each = weights or (1, 1, 1)
  for name in ("w", "b"):
    for layer in range(2):
      want = radial([x[layer] for x in delta_M["blocks"][name]], each)
      np.testing.assert_allclose(
        found["blocks"][name][layer], want, rtol=1e-5, atol=1e-6
      )
  np.testing.assert_allclose(
    found["rest"]["z"], radial(delta_M["rest"]["z"], each), rtol=1e-5, atol=1e-6
  )
  plain = np.average(delta_M["embed"]["t"], axis=0, weights=each)
  np.testing.assert_allclose(found["embed"]["t"], plain, rtol=1e-5, atol=1e-6)


def test_orthogonal_outer_gradients_keep_their_length():
  x_M = 2 * jnp.eye(8)
  for config, length in ((RADIAL, 2), (diloco.OuterConfig(), 2 / np.sqrt(8))):
    found = outer.average({"rest": x_M}, None, config)["rest"]
    np.testing.assert_allclose(jnp.linalg.norm(found), length, rtol=1e-6)


def test_a_sync_steps_along_the_radial_mean():
  rng = np.random.default_rng(1)
  moves = np.sign(rng.normal(size=(3, 5, 4))) / 2
  moves *= 2.0 ** np.arange(3)[:, None, None]  # Exact in every format.
  params_M = diloco.replicate(jnp.zeros((5, 4)), 3)
  method = diloco.streaming(params_M, sync_every=1, wire="e3m0", outer=RADIAL)
  state = method.init(params_M)
  params_M, state, _ = method.step(1, params_M + jnp.float32(moves), state)
  want = -radial(-moves, (1, 1, 1))
  np.testing.assert_allclose(method.params(state), want, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(params_M[2], want, rtol=1e-5, atol=1e-6)


def test_a_reduction_of_values_is_refused(tiny):
  tiny.outer.average = "radial"
  with pytest.raises(ConfigError, match=r"but outer.average is radial; choose mean"):
    changed(resolve(tiny), {"wire.exchange": "psum"})
