"""How every array lies on the replica x fsdp mesh: one table.

`replica` is the axis that DrJAX maps over; the links between its members are slow.
`fsdp` divides a replica; its links are fast. fsdp shards the first axis of a parameter
after the layer, if it divides that axis; otherwise every device holds the whole tensor
(`diloco.model.shapes.sharded_axis`).

A tree may lead with one more axis:
  (REPLICA,)  the M replicas' parameters, one replica per coordinate
  (None,)     the one model of data-parallel, a copy at every coordinate of `replica`
  ()          outer parameters, a copy at every coordinate of `replica`
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.config import Config
from diloco.model import shapes

REPLICA, FSDP = "replica", "fsdp"
BOTH = (REPLICA, FSDP)
# Explicit axes would ignore `with_sharding_constraint` to a replicated spec, silently.
AXIS_TYPES = (AxisType.Auto,) * 2

Tree = Any
Lead = tuple[str | None, ...]


def lead(c: Config) -> Lead:
  """The leading axis of what is trained."""
  return (None if c.data_parallel else REPLICA,)


def weight_spec(path, shape: tuple[int, ...], fsdp: int) -> P:
  """Partition of one parameter without a leading axis.

  Args:
    path: JAX's key path of the parameter.
    shape: of the parameter.
    fsdp: size of the fsdp axis.
  """
  axis = shapes.sharded_axis(tuple(map(key, path)), shape, fsdp)
  return P() if axis is None else P(*[None] * axis, FSDP)


def specs(tree: Tree, mesh: Mesh, lead: Lead = ()) -> Tree:
  """Partition specs of a tree shaped like parameters.

  Args:
    tree: arrays or shapes under `blocks` and/or `embed`.
    mesh: the device mesh.
    lead: the leading axis, see the module's docstring.
  """

  def spec(path, leaf):
    return P(*lead, *weight_spec(path, leaf.shape[len(lead) :], mesh.shape[FSDP]))

  return jax.tree_util.tree_map_with_path(spec, tree)


def shardings(tree: Tree, mesh: Mesh, lead: Lead = ()) -> Tree:
  """NamedShardings of a tree shaped like parameters, see `specs`."""
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, spec),
    specs(tree, mesh, lead),
    is_leaf=lambda x: isinstance(x, P),
  )


def batch_sharding(mesh: Mesh, lead: Lead = (REPLICA,)) -> NamedSharding:
  """Tokens [M, B, L]: replicas over `replica`, their sequences over `fsdp`.

  Data-parallel's [1, M B, L]: sequences over both.
  """
  return NamedSharding(mesh, P(REPLICA, FSDP) if lead == (REPLICA,) else P(None, BOTH))


def eval_sharding(mesh: Mesh) -> NamedSharding:
  """Evaluation tokens [B, L]: sequences over all devices."""
  return NamedSharding(mesh, P(BOTH))


def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """Shards a host array that is present on every process.

  Unlike device_put on several processes, it compares and exchanges nothing: a process
  may leave out what belongs on the devices of others.
  """
  return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def structs(tree: Tree, places: Tree) -> Tree:
  """Shapes and types of arrays, with shardings."""
  return jax.tree.map(
    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, places
  )


def abstract(parameters: shapes.Shapes, dtype: str) -> Tree:
  """Parameters as shapes and types, from `diloco.model.shapes`."""
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, dtype),
    parameters,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def key(entry) -> str:
  """The name in one entry of JAX's key paths."""
  return str(getattr(entry, "key", getattr(entry, "name", entry)))
