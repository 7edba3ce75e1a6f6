"""Ties-Merging against float64 NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

import diloco
from diloco.contrib.ties_merging import average

TIES = diloco.OuterConfig("sgd", 1.0, average="ties_merging")


def ties(values, weights):
  """Merges one value per replica."""
  elected = np.sign(sum(w * x for w, x in zip(weights, values) if w))
  agree = [(w, x) for w, x in zip(weights, values) if w and x * elected > 0]
  return sum(w * x for w, x in agree) / sum(w for w, _ in agree) if agree else 0.0


@pytest.mark.parametrize("weights", [None, (3.0, 0.0, 1.0)])
def test_each_value_is_the_mean_of_those_with_the_elected_sign(weights):
  delta_M = np.random.default_rng(0).normal(size=(3, 6, 4)).astype(np.float32)
  delta_M[:2, 0] = 0  # Trimmed by two replicas.
  delta_M[:, 1] = 0  # By all.
  delta_M[0, 2], delta_M[1, 2], delta_M[2, 2] = 1, 3, -3  # The signs sum to 0 or 1.
  if weights:  # What an absent site sends may decode to anything.
    delta_M[1, 3:] = np.nan
  found = average({"rest": jnp.asarray(delta_M)}, weights and jnp.asarray(weights))
  for place in np.ndindex(6, 4):
    values = delta_M[(slice(None), *place)].astype(float)
    want = ties(values, weights or (1, 1, 1))
    np.testing.assert_allclose(found["rest"][place], want, rtol=1e-5, atol=1e-6)


def test_a_sync_steps_along_the_largest_values_that_agree():
  moves = jnp.array([[8.0, 1.0, 0.5, -4.0], [4.0, -0.5, 0.25, 2.0]])
  params_M = diloco.replicate(jnp.zeros((1, 4)), 2)
  wire = diloco.WireConfig("topk", "fp32", density=0.5)
  method = diloco.streaming(params_M, sync_every=1, wire=wire, outer=TIES)
  state = method.init(params_M)
  _, state, _ = method.step(1, params_M + moves[:, None], state)
  # Each replica keeps the first and the last value; of the last one, -4 wins.
  np.testing.assert_allclose(method.params(state), [[6, 0, 0, -4]])
