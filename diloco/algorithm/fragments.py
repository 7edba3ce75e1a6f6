"""A fragment's part of the parameters: taken out, put back, put together.

Parameters are {'blocks': leaves (N, ...), 'embed': leaves (...)}; a fragment has the
leaves (n, ...) of its n layers, or `embed`, or both.
"""

from collections.abc import Collection, Iterable
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
  """The part of the replicas' parameters that a fragment holds.

  Args:
    params_M: parameters of all replicas, leaves (M, N, ...) and (M, ...).
    keys: `blocks` and/or `embed`, or a tree with these keys.
    layers: int32 (n,), its layers.

  Returns:
    Leaves (M, n, ...) under `blocks` and (M, ...) under `embed`.
  """
  part = {}
  if "blocks" in keys:
    part["blocks"] = jax.tree.map(lambda x: x[:, layers], params_M["blocks"])
  if "embed" in keys:
    part["embed"] = params_M["embed"]
  return part


def put(params_M: Tree, part_M: Tree, layers: Layers) -> Tree:
  """The inverse of `take`: parameters with the fragment's part replaced."""
  params_M = dict(params_M)
  if "blocks" in part_M:
    params_M["blocks"] = jax.tree.map(
      lambda x, y: x.at[:, layers].set(y), params_M["blocks"], part_M["blocks"]
    )
  if "embed" in part_M:
    params_M["embed"] = part_M["embed"]
  return params_M


def join(
  thetas: Iterable[Tree], layers: Iterable[Layers], parameters: Shapes, mesh: Mesh
) -> Tree:
  """The whole parameters, from those of all fragments.

  Args:
    thetas: parameters of each fragment, on the devices.
    layers: int32 (n,) per fragment.
    parameters: shapes of one replica's parameters.
    mesh: the device mesh.

  Returns:
    One replica's tree, float32; at no moment is more than a shard on a device.
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
