"""Computes the metrics of every sync: norms, coding errors, cosine similarities."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from diloco.algorithm.slices import one_of
from diloco.mesh.sharding import REPLICA
from diloco.spec.fields import WireConfig
from diloco.util.types import PyTree
from diloco.wire import exchange

# Hosts compute some metrics of a sync with NumPy.
Metric = jax.Array | np.ndarray | np.generic
Metrics = dict[str, Metric]  # {name: metric}


def of_send(
  wire: WireConfig, mesh: Mesh, delta_M: PyTree, payload: jax.Array
) -> Metrics:
  """Computes norms and relative coding errors of outer gradients, float32 [M] each.

  Every replica decodes its own codes to find its coding error; nothing is exchanged.
  """
  sent_M = exchange.decode(wire, mesh, payload, one_of(delta_M), (REPLICA,))
  error_M = norms(jax.tree.map(jnp.subtract, sent_M, delta_M))
  return of_norms(norms(delta_M), error_M)


def of_norms(delta_norm_M: jax.Array, error_norm_M: jax.Array) -> Metrics:
  """Returns the norms and the relative coding errors of outer gradients, by name."""
  return {
    "outer_grad_norm": delta_norm_M,
    "quantization_error": error_norm_M / jnp.maximum(delta_norm_M, 1e-30),
  }


def of_update(delta: jax.Array, update: jax.Array, cosine: jax.Array | None) -> Metrics:
  """Returns the metrics of an update by name, float32 [] each.

  Args:
    delta: norm of the mean outer gradient.
    update: norm of the change of the outer parameters.
    cosine: mean cosine similarity of the replicas' outer gradients; None: left out.
  """
  norms: Metrics = {"outer_grad_mean_norm": delta, "outer_update_norm": update}
  return norms if cosine is None else {**norms, "outer_grad_cosine": cosine}


def norms(tree_M: PyTree) -> jax.Array:
  """Computes the global L2 norm of each replica's tree, float32[M]."""
  return jax.vmap(optax.tree.norm)(tree_M)


def products(tree_M: PyTree) -> jax.Array:
  """Computes the scalar product of each pair of replicas' trees, float32 [M, M]."""
  return sum(map(_products, jax.tree.leaves(tree_M)), jnp.float32(0))


def _products(x_M: jax.Array) -> jax.Array:
  m, rows_M = len(x_M), x_M.reshape(len(x_M), -1)
  if m > 4:
    # By default, TPUs multiply in bfloat16.
    return jnp.matmul(rows_M, rows_M.T, precision=jax.lax.Precision.HIGHEST)
  # XLA fuses the computation of x_M, such as the decoding of codes, into each of the
  # sums below. For a matmul, XLA for GPU would first write x_M to memory, and on CPUs a
  # matmul with so few rows is slow.
  product_of = {
    (i, j): (rows_M[i] * rows_M[j]).sum() for j in range(m) for i in range(j + 1)
  }
  pairs = [product_of[min(i, j), max(i, j)] for i in range(m) for j in range(m)]
  return jnp.stack(pairs).reshape(m, m)


def mean_cosine(products_MxM: jax.Array) -> jax.Array | None:
  """Averages the cosine similarity of all pairs of replicas; None for M = 1.

  A zero vector has the cosine 0 with every other vector.
  """
  m = len(products_MxM)
  if m == 1:
    return None
  norms_M = jnp.maximum(jnp.sqrt(jnp.diag(products_MxM)), 1e-30)
  cosines = products_MxM / norms_M / norms_M[:, None]
  return (cosines * (1 - jnp.eye(m))).sum() / (m * (m - 1))
