"""Measures a sync layer by layer, at the syncs that log.diagnostics_every chooses.

These programs run beside `send` and `update` of `diloco.algorithm.outer` and change
nothing. They compare the outer gradients of all replicas in float32, since codes of few
bits would change cosines and distances. So each replica sends 4 bytes per parameter to
every other replica; the ledger does not count these bytes.

A part of a fragment is a layer; the last part is all parameters without a layer axis,
if the fragment has some. In the trainer's models these are the embedding, the
positions, the final norm and the head.

Letters: M replicas, J parts; a matrix has R rows and C columns.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.algorithm.fragments import outer_gradient
from diloco.algorithm.norms import mean_cosine, norms, products
from diloco.config.fields import WireConfig
from diloco.model import sharding
from diloco.model.sharding import REPLICA
from diloco.wire import exchange

Tree = Any
Metrics = dict[str, jax.Array]
# Steps of the power iteration, see `stable_rank`.
_ITERATIONS = 16
_TINY = 1e-30


@partial(jax.jit, static_argnames=("wire", "mesh"))
def of_send(
  params_M: Tree,
  theta: Tree,
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
    float32 metrics of all parts, see `_of_part`; the first axis is M if there is one.
    `stable_rank.NAME` has the shape [n], or [1] for a matrix without a layer axis.
  """
  sent_M, found = exchange.decode(wire, mesh, payload, theta, (REPLICA,)), []

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
    # One layer at a time: a device holds the outer gradients of all replicas.
    found.append(jax.lax.map(layer, jnp.arange(len(layers))))
  rest = sorted(theta.keys() - {"blocks"})
  if rest:
    own = lambda tree: {name: tree[name] for name in rest}
    part = _of_part(own(params_M), own(theta), own(sent_M), mesh)
    found.append(jax.tree.map(lambda x: x[None], part))
  names = dict.fromkeys(name for part in found for name in part)
  metrics = {
    n: jnp.concatenate([part[n] for part in found if n in part]) for n in names
  }
  metrics = {name: x.T for name, x in metrics.items()}
  return jax.lax.with_sharding_constraint(metrics, NamedSharding(mesh, P()))


def _of_part(x_M: Tree, theta: Tree, sent_M: Tree, mesh: Mesh) -> Metrics:
  """Measures one part.

  Args:
    x_M: parameters of all replicas, leaves (M, ...).
    theta: outer parameters.
    sent_M: decoded outer gradients of all replicas.

  Returns:
    L2 norm of each replica's outer gradient [M]; L2 norm of the error of its codes,
    divided by that norm [M]; mean cosine similarity of the outer gradients of each two
    replicas [] (2501.18512, figures 17(b) and 18); root mean square of the replicas'
    distances from their mean []; L2 norm of theta []; stable rank of each matrix in the
    mean outer gradient [].
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
  return {
    "outer_grad_norm_by_layer": norm_M,
    "quantization_error_by_layer": error_M / jnp.maximum(norm_M, _TINY),
    "outer_grad_cosine_by_layer": mean_cosine(products(delta_M)),
    "replica_drift_by_layer": jnp.sqrt(jnp.square(apart_M).mean()),
    "outer_norm_by_layer": optax.tree.norm(theta),
    **_stable_ranks(mean),
  }


def _stable_ranks(mean: Tree) -> Metrics:
  """Returns {"stable_rank.attention.q": float32 [], ...} for all matrices of a part."""
  found = {}
  for path, x in jax.tree_util.tree_leaves_with_path(mean):
    if x.ndim == 2:
      name = ".".join(map(sharding.key, path[1:]))
      found[f"stable_rank.{name}"] = stable_rank(x)
  return found


def stable_rank(x_RxC: jax.Array) -> jax.Array:
  """Computes |A|_F^2 / |A|_2^2; NaN for a matrix of zeros.

  This is the sum of the squared singular values divided by the largest one: 1 for a
  matrix of rank one, at most min(R, C). The power iteration finds the largest singular
  value, or a smaller one if several are close: then the result is too large by some
  percent.
  """
  norm = jnp.sqrt(jnp.square(x_RxC).sum())
  unit = lambda v: v / jnp.maximum(jnp.linalg.norm(v), _TINY)
  # By default, TPUs multiply in bfloat16.
  dot = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  x_RxC /= jnp.maximum(norm, _TINY)
  start_C = jax.random.normal(jax.random.key(0), x_RxC.shape[1:])
  step = lambda _, v_C: unit(dot(dot(x_RxC, v_C), x_RxC))
  v_C = jax.lax.fori_loop(0, _ITERATIONS, step, unit(start_C))
  largest = jnp.square(dot(x_RxC, v_C)).sum()
  return jnp.where(norm > 0, 1 / jnp.maximum(largest, _TINY), jnp.nan)


@jax.jit
def of_update(before: Tree, theta: Tree) -> Metrics:
  """Measures an outer step: L2 norms of the update, float32 [J].

  Args:
    before: outer parameters of the fragment before the outer step.
    theta: those after the outer step.
  """
  updates, found = jax.tree.map(jnp.subtract, theta, before), []
  if "blocks" in updates:
    found.append(jax.vmap(optax.tree.norm)(updates.pop("blocks")))
  if updates:
    found.append(optax.tree.norm(updates)[None])
  return {"outer_update_norm_by_layer": jnp.concatenate(found)}
