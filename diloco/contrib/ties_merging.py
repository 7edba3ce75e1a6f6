"""Ties-Merging (arXiv 2306.01708) of outer gradients, instead of their mean.

  wire.compressor = "topk"; outer.average = "ties_merging"

It replaces the mean of line 10 of Algorithm 2, and has three steps. It trims: of each
update, it keeps the largest values. Here `topk` does this for each layer; the paper
does it for the whole model. It elects the sign of each value: the sign of the sum over
the updates. It merges: it takes the mean of the kept values that have this sign. The
authors of Streaming DiLoCo tried it, and report without a number that it was worse than
low precision (arXiv 2501.18512, section 3.3.3).
"""

from functools import partial

import jax
import jax.numpy as jnp

from diloco.algorithm.outer import present
from diloco.spec import plugins
from diloco.util.types import PyTree


def average(delta_M: PyTree, weights_M: jax.Array | None) -> PyTree:
  """Merges the outer gradients of a fragment.

  Args:
    delta_M: float32 leaves (M, ...).
    weights_M: the replicas' weights in sum and mean, float32 [M]; None: equal weights.

  Returns:
    Leaves without the axis M, float32.
  """
  return jax.tree.map(partial(_merge, weights_M), delta_M)


def _merge(weights_M: jax.Array | None, x_M: jax.Array) -> jax.Array:
  """Takes the mean of the values with the elected sign; 0 if the values sum to 0."""
  if weights_M is None:
    weights_M = jnp.ones(len(x_M))
  x_M = present(x_M, weights_M)
  elected = jnp.sign(jnp.tensordot(weights_M, x_M, axes=1))
  agrees_M = (x_M * elected > 0).astype(x_M.dtype)
  weight = jnp.tensordot(weights_M, agrees_M, axes=1)
  total = jnp.tensordot(weights_M, x_M * agrees_M, axes=1)
  return total / jnp.where(weight > 0, weight, 1)


plugins.register("outer.average", "ties_merging", average)
