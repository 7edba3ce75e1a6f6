"""Norms and cosine similarities of the replicas' outer gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any


def norms(tree_M: Tree) -> jax.Array:
  """Computes the global L2 norm of each replica's tree, float32[M]."""
  return jax.vmap(optax.tree.norm)(tree_M)


def products(tree_M: Tree) -> jax.Array:
  """Computes the scalar products of each two replicas' trees, float32 [M, M]."""
  return sum(map(_products, jax.tree.leaves(tree_M)), jnp.float32(0))


def _products(x_M: jax.Array) -> jax.Array:
  m, rows_M = len(x_M), x_M.reshape(len(x_M), -1)
  if m > 4:
    # By default, TPUs multiply in bfloat16.
    return jnp.matmul(rows_M, rows_M.T, precision=jax.lax.Precision.HIGHEST)
  # XLA computes x_M, for example decodes codes, inside each of these sums. Before a
  # matmul, XLA for GPU writes x_M to the memory; on CPUs, so thin a matmul is slow.
  found = {
    (i, j): (rows_M[i] * rows_M[j]).sum() for j in range(m) for i in range(j + 1)
  }
  pairs = [found[min(i, j), max(i, j)] for i in range(m) for j in range(m)]
  return jnp.stack(pairs).reshape(m, m)


def mean_cosine(products_MxM: jax.Array) -> jax.Array:
  """Averages the cosine similarity of all pairs of replicas; NaN for M = 1.

  A zero vector has the cosine 0 with all others.
  """
  m = len(products_MxM)
  if m == 1:
    return jnp.float32(jnp.nan)
  norms_M = jnp.maximum(jnp.sqrt(jnp.diag(products_MxM)), 1e-30)
  cosines = products_MxM / norms_M / norms_M[:, None]
  return (cosines * (1 - jnp.eye(m))).sum() / (m * (m - 1))
