"""Measures a sync layer by layer.

These programs run in addition to `send` and `update` of `diloco.algorithm.outer` and
change nothing. They compare the outer gradients of all replicas in float32, since codes
of few bits would change cosines and distances. So each replica sends 4 bytes per
parameter to every other replica; the ledger does not count these bytes.

A fragment is measured part by part. Each layer is a part; one last part has all
parameters without a layer axis, if the fragment has such parameters (in the trainer's
models: embedding, positions, final norm and head).

Letters: M replicas, J parts; a matrix has R rows and C columns.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.algorithm.slices import outer_gradient
from diloco.algorithm.sync_metrics import Metrics, mean_cosine, norms, products
from diloco.mesh import sharding
from diloco.mesh.sharding import REPLICA
from diloco.spec.fields import WireConfig
from diloco.util.types import PyTree
from diloco.wire import exchange

# Number of logged singular values; columns and iterations of the subspace iteration.
_VALUES, _COLUMNS, _ITERATIONS = 8, 12, 8
_TINY = 1e-30


@partial(jax.jit, static_argnames=("wire", "mesh"))
def of_send(
  params_M: PyTree,
  theta: PyTree,
  payload: jax.Array,
  layers: np.ndarray,
  *,
  wire: WireConfig,
  mesh: Mesh,
) -> Metrics:
  """Measures the outer gradients of all replicas, and the error of their codes.

  Args:
    params_M: parameters of all replicas.
    theta: outer parameters of the fragment, on the devices.
    payload: uint8 [M, fsdp, bytes], from `send`.
    layers: int32 (n,), the fragment's layers.

  Returns:
    float32 metrics of J parts (each layer; all the rest), see `_of_part`: [M, J] for
    values of each replica, else [J]. `stable_rank.NAME` has the shape [n], or [1] for a
    matrix without a layer axis; `spectrum.NAME` has the shape [K, n] or [K, 1].
  """
  sent_M, parts = exchange.decode(wire, mesh, payload, theta, (REPLICA,)), []

  def layer(i: jax.Array) -> Metrics:
    at = lambda tree, *index: {"layer": jax.tree.map(lambda x: x[index], tree)}
    every = slice(None)
    return _of_part(
      at(params_M["blocks"], every, jnp.asarray(layers)[i]),
      at(theta["blocks"], i),
      at(sent_M["blocks"], every, i),
      mesh,
    )

  if "blocks" in theta:
    # One layer at a time, to save memory: each device then holds the outer gradients of
    # all replicas for one layer only.
    parts.append(jax.lax.map(layer, jnp.arange(len(layers))))
  rest = sorted(theta.keys() - {"blocks"})
  if rest:
    rest_of = lambda tree: {name: tree[name] for name in rest}
    part = _of_part(rest_of(params_M), rest_of(theta), rest_of(sent_M), mesh)
    parts.append(jax.tree.map(lambda x: x[None], part))
  names = dict.fromkeys(name for part in parts for name in part)
  of = lambda name: jnp.concatenate([part[name] for part in parts if name in part])
  metrics = {name: of(name).T for name in names}
  return jax.lax.with_sharding_constraint(metrics, NamedSharding(mesh, P()))


def _of_part(x_M: PyTree, theta: PyTree, sent_M: PyTree, mesh: Mesh) -> Metrics:
  """Measures one part.

  Args:
    x_M: parameters of all replicas, leaves (M, ...).
    theta: outer parameters.
    sent_M: decoded outer gradients of all replicas.

  Returns:
    L2 norm of each replica's outer gradient [M]; L2 norm of the error of its codes,
    divided by that norm [M]; mean cosine similarity of the outer gradients of each two
    replicas [] (2501.18512, figures 17(b) and 18); root mean square of the replicas'
    distances from their mean []; L2 norm of theta []; spectrum [K] and stable rank []
    of each matrix in the mean outer gradient.
  """
  delta_M = jax.tree.map(outer_gradient, theta, x_M)
  norm_M = norms(delta_M)
  error_M = norms(jax.tree.map(jnp.subtract, sent_M, delta_M))
  # From here on, each device has the outer gradients of all replicas.
  everywhere = sharding.shardings(delta_M, mesh, (None,))
  delta_M = jax.lax.with_sharding_constraint(delta_M, everywhere)
  mean = jax.tree.map(lambda x_M: x_M.mean(axis=0), delta_M)
  # Theta cancels: the outer gradients lie as far apart as the replicas' parameters.
  apart_M = norms(jax.tree.map(jnp.subtract, delta_M, mean))
  cosine = mean_cosine(products(delta_M))
  return {
    "outer_grad_norm_by_layer": norm_M,
    "quantization_error_by_layer": error_M / jnp.maximum(norm_M, _TINY),
    **({} if cosine is None else {"outer_grad_cosine_by_layer": cosine}),
    "replica_drift_by_layer": jnp.sqrt(jnp.square(apart_M).mean()),
    "outer_norm_by_layer": optax.tree.norm(theta),
    **_spectra(mean),
  }


def _spectra(mean: PyTree) -> Metrics:
  """Returns spectrum [K] and stable rank [] of each matrix in `mean`, by name."""
  metrics: Metrics = {}
  for path, x in jax.tree_util.tree_leaves_with_path(mean):
    if x.ndim == 2:
      name = ".".join(sharding.names(path)[1:])
      metrics[f"spectrum.{name}"] = values = spectrum(x)
      metrics[f"stable_rank.{name}"] = 1 / jnp.square(values[0])
  return metrics


def spectrum(x_RxC: jax.Array) -> jax.Array:
  """Computes the largest singular values, divided by the Frobenius norm |A|_F.

  After this division, the squares of all singular values add up to 1. The stable rank
  is |A|_F^2 / |A|_2^2: 1 for a matrix of rank one, at most min(R, C).

  Subspace iteration finds the values. If more than `_COLUMNS` values are close to each
  other, the results are some percent too small, and the stable rank is too large. The
  values are roots of the eigenvalues of a Gram matrix in float32. So values below 3e-4
  times the largest value are less accurate, and much smaller values are noise.

  Args:
    x_RxC: a matrix, float32.

  Returns:
    float32 [K], K = min(`_VALUES`, R, C), descending; NaN for a matrix of zeros.
  """
  norm = jnp.sqrt(jnp.square(x_RxC).sum())
  # By default, TPUs multiply in bfloat16.
  dot = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  x_RxC /= jnp.maximum(norm, _TINY)
  rank = min(x_RxC.shape)
  start_CxK = jax.random.normal(
    jax.random.key(0), (x_RxC.shape[1], min(_COLUMNS, rank))
  )
  base = lambda x_CxK: jnp.linalg.qr(x_CxK)[0]
  step = lambda _, q_CxK: base(dot(x_RxC.T, dot(x_RxC, q_CxK)))
  q_CxK = jax.lax.fori_loop(0, _ITERATIONS, step, base(start_CxK))
  image_RxK = dot(x_RxC, q_CxK)
  squares_K = jnp.linalg.eigvalsh(dot(image_RxK.T, image_RxK))[::-1]
  values_K = jnp.sqrt(jnp.maximum(squares_K, 0))[: min(_VALUES, rank)]
  return jnp.where(norm > 0, values_K, jnp.nan)


@jax.jit
def of_update(before: PyTree, theta: PyTree) -> Metrics:
  """Measures an outer step: returns the L2 norm of each part's update, float32 [J].

  Args:
    before: outer parameters of the fragment before the outer step.
    theta: outer parameters of the fragment after the outer step.
  """
  updates, norms_J = jax.tree.map(jnp.subtract, theta, before), []
  if "blocks" in updates:
    norms_J.append(jax.vmap(optax.tree.norm)(updates.pop("blocks")))
  if updates:
    norms_J.append(optax.tree.norm(updates)[None])
  return {"outer_update_norm_by_layer": jnp.concatenate(norms_J)}
