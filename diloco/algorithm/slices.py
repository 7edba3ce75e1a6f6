"""Takes a fragment out of the parameters, puts it back, and joins all fragments.

Parameters are {'blocks': leaves (N, ...), 'embed': leaves (...)}. In a user's own
training loop they may have other names in place of `embed`, or no `blocks`. A fragment
is a tree with some of these names; for its n layers, its `blocks` have leaves (n, ...).
"""

from collections.abc import Callable, Collection, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from diloco.mesh import sharding
from diloco.spec.shapes import Shapes
from diloco.util.types import PyTree

Layers = jax.Array | np.ndarray


def take(params_M: PyTree, keys: Collection[str], layers: Layers) -> PyTree:
  """Takes a fragment out of the parameters of all replicas.

  Args:
    params_M: parameters of all replicas, leaves (M, N, ...) and (M, ...).
    keys: names such as `blocks` and `embed`, or a tree with these names.
    layers: int32 (n,), the fragment's layers.

  Returns:
    Leaves (M, n, ...) under `blocks` and (M, ...) under other names.
  """
  part = {name: params_M[name] for name in keys}
  if "blocks" in part:
    part["blocks"] = jax.tree.map(lambda x: x[:, layers], part["blocks"])
  return part


def put(
  params_M: PyTree,
  part_M: PyTree,
  layers: Layers,
  mix: Callable[[jax.Array, jax.Array], jax.Array] = lambda old_M, new_M: new_M,
) -> PyTree:
  """Puts a fragment back: the inverse of `take`, with its shapes.

  Args:
    params_M: parameters of all replicas; unless they are donated, they do not change.
    part_M: the fragment, leaves (M, n, ...) and (M, ...).
    layers: int32 (n,), the fragment's layers.
    mix: called with the old and the new tensor of a layer, or of a parameter without
      a layer axis; returns the tensor to put.

  Returns:
    The parameters of all replicas, with the fragment in them.
  """

  def put_layers(x_M: jax.Array, y_M: jax.Array) -> jax.Array:
    def one(i: jax.Array, x_M: jax.Array) -> jax.Array:
      mixed = mix(x_M[:, layers[i]], y_M[:, i])
      return jax.lax.dynamic_update_index_in_dim(x_M, mixed, layers[i], axis=1)

    # Puts one layer after the other, so that a donated x_M changes in place.
    return jax.lax.fori_loop(0, len(layers), one, x_M)

  params_M, layers = dict(params_M), jnp.asarray(layers)
  for name, new_M in part_M.items():
    one = put_layers if name == "blocks" else mix
    params_M[name] = jax.tree.map(one, params_M[name], new_M)
  return params_M


def one_of(tree_M: PyTree) -> PyTree:
  """Describes one replica's arrays, given a tree of all replicas, leaves (M, ...)."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree_M)


def as_merged(theta: jax.Array, x_M: jax.Array) -> jax.Array:
  """Rounds outer parameters to the replicas' dtype; returns float32.

  The papers do not specify this rounding. Replicas in bfloat16 start from rounded
  values. If theta were not rounded, the outer gradient would contain the rounding
  error, even if no replica trained.
  """
  info = jnp.finfo(x_M.dtype)
  # XLA may drop a cast to bfloat16 and back, but not `reduce_precision`.
  return jax.lax.reduce_precision(theta, info.nexp, info.nmant)


def outer_gradient(theta: jax.Array, x_M: jax.Array) -> jax.Array:
  """Returns outer minus inner parameters of all replicas, float32 (M, ...).

  Args:
    theta: outer parameters, (...).
    x_M: inner parameters, (M, ...).
  """
  return as_merged(theta, x_M) - x_M.astype(jnp.float32)


def join(
  thetas: Iterable[PyTree], layers: Iterable[Layers], parameters: Shapes, mesh: Mesh
) -> PyTree:
  """Joins the parameters of all fragments into one tree for the whole model.

  Args:
    thetas: parameters of each fragment, on the devices.
    layers: layer indices of each fragment, int32 (n,).
    parameters: shapes of one replica's parameters.

  Returns:
    One replica's tree, float32. Each device holds only its shard at any time.
  """
  like = sharding.abstract(parameters, "float32")
  places = sharding.shardings(like, mesh)
  zeros = lambda x, at: jnp.zeros(x.shape, jnp.float32, device=at)
  full = jax.tree.map(zeros, like, places)
  place = jax.jit(_place, donate_argnums=0, out_shardings=places)
  for theta, ids in zip(thetas, layers):
    full = place(full, theta, ids)
  return full


def _place(full: PyTree, theta: PyTree, layers: Layers) -> PyTree:
  one_M = lambda tree: jax.tree.map(lambda x: x[None], tree)
  return jax.tree.map(lambda x_M: x_M[0], put(one_M(full), one_M(theta), layers))
