"""Norms and cosine similarities of the replicas' outer gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any


def norms(tree_M: Tree) -> jax.Array:
  """Computes the global L2 norm of each replica's tree, float32[M]."""
  return jax.vmap(optax.tree.norm)(tree_M)


def mean_cosine(delta_M: Tree) -> jax.Array:
  """Averages the cosine similarity of all pairs of replicas; NaN for M = 1.

  For unit vectors u_m: |sum u_m|^2 = M + sum over i != j of cos_ij. A zero vector has
  the cosine 0 with all others.
  """
  lengths_M = norms(delta_M)
  norms_M, nonzero = jnp.maximum(lengths_M, 1e-30), (lengths_M > 0).sum()
  m = norms_M.shape[0]
  if m == 1:
    return jnp.float32(jnp.nan)
  total = jax.tree.map(lambda x_M: jnp.tensordot(1 / norms_M, x_M, axes=1), delta_M)
  return (optax.tree.norm(total) ** 2 - nonzero) / (m * (m - 1))
