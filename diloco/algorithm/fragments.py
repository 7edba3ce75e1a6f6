"""Takes a fragment out of the parameters, puts it back, and joins all fragments.

Parameters are {'blocks': leaves (N, ...), 'embed': leaves (...)}. A fragment is such a
tree with `blocks`, leaves (n, ...) for the fragment's n layers, or `embed`, or both.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from diloco.model import sharding
from diloco.model.shapes import Shapes

Tree = Any
Layers = jax.Array | np.ndarray


def take(params_M: Tree, keys: Collection[str], layers: Layers) -> Tree:
  """Takes a fragment out of the parameters of all replicas.

  Args:
    params_M: parameters of all replicas, leaves (M, N, ...) and (M, ...).
    keys: `blocks` and/or `embed`, or a tree with these keys.
    layers: int32 (n,), the fragment's layers.

  Returns:
    Leaves (M, n, ...) under `blocks` and (M, ...) under `embed`.
  """
  part = {}
  if "blocks" in keys:
    part["blocks"] = jax.tree.map(lambda x: x[:, layers], params_M["blocks"])
  if "embed" in keys:
    part["embed"] = params_M["embed"]
  return part


def put(
  params_M: Tree,
  part_M: Tree,
  layers: Layers,
  mix: Callable[[jax.Array, jax.Array], jax.Array] = lambda old_M, new_M: new_M,
) -> Tree:
  """Puts a fragment back: the inverse of `take`.

  Args:
    mix: called with the old and the new tensor of a layer, or of `embed`; returns the
      tensor to put.
  """

  def put_layers(x_M, y_M):
    def one(i, x_M):
      mixed = mix(x_M[:, layers[i]], y_M[:, i])
      return jax.lax.dynamic_update_index_in_dim(x_M, mixed, layers[i], axis=1)

    # Layer by layer, so that a donated x_M changes in place.
    return jax.lax.fori_loop(0, len(layers), one, x_M)

  params_M, layers = dict(params_M), jnp.asarray(layers)
  if "blocks" in part_M:
    params_M["blocks"] = jax.tree.map(put_layers, params_M["blocks"], part_M["blocks"])
  if "embed" in part_M:
    params_M["embed"] = jax.tree.map(mix, params_M["embed"], part_M["embed"])
  return params_M


def join(
  thetas: Iterable[Tree], layers: Iterable[Layers], parameters: Shapes, mesh: Mesh
) -> Tree:
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


def _place(full: Tree, theta: Tree, layers: Layers) -> Tree:
  one_M = lambda tree: jax.tree.map(lambda x: x[None], tree)
  return jax.tree.map(lambda x_M: x_M[0], put(one_M(full), one_M(theta), layers))
