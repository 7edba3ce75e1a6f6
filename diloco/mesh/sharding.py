"""Defines how every array is sharded over the replica x fsdp mesh.

DrJAX maps over the axis `replica`, which has slow links. The axis `fsdp` has fast links
and shards each replica: it shards every parameter along the first axis after the layer
axis. If the size of fsdp does not divide this axis, every device of the replica holds
the whole tensor (`diloco.spec.shapes.sharded_axis`).

A tree of parameters may have one more axis in front, the leading axis:
  (REPLICA,)  parameters of M replicas, one replica per coordinate of `replica`
  (None,)     the one model of data-parallel, copied to every coordinate
  ()          no such axis: outer parameters, copied to every coordinate
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from diloco.spec import shapes
from diloco.util.types import PyTree

REPLICA, FSDP = "replica", "fsdp"
BOTH = (REPLICA, FSDP)

Result = TypeVar("Result")
# The mesh axis of the leading axis: one of the three tuples in this file's docstring.
Leading = tuple[str | None, ...]


def mesh_of(grid: np.ndarray) -> Mesh:
  """Makes the mesh of devices [replica, fsdp]."""
  # With explicit axes, `with_sharding_constraint` silently ignores a replicated spec.
  return Mesh(grid, BOTH, axis_types=(AxisType.Auto,) * 2)


def num_slices(mesh: Mesh) -> int:
  """Counts the TPU slices of a mesh; GPUs and CPUs count as one slice."""
  return len({getattr(d, "slice_index", 0) for d in mesh.devices.flat})


def on_each_device(
  f: Callable[..., Result], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Result]:
  """Makes a function that runs on each device's shards; XLA does not partition it.

  Every axis of the mesh is manual, because `vmap` adds the replica axis to the specs.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return jax.shard_map(
    f,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    check_vma=False,
  )


def weight_spec(path: KeyPath, shape: tuple[int, ...], fsdp: int) -> P:
  """Returns the partition spec of one parameter, without a leading axis.

  Args:
    path: JAX's key path of the parameter.
    shape: shape of the parameter.
    fsdp: size of the fsdp axis.
  """
  axis = shapes.sharded_axis(names(path), shape, fsdp)
  return P() if axis is None else P(*[None] * axis, FSDP)


def specs(tree: PyTree, mesh: Mesh, leading: Leading = ()) -> PyTree:
  """Returns the partition specs of a tree shaped like parameters.

  Args:
    tree: arrays or shapes under `blocks` and/or `embed`.
    leading: see the docstring of this file.
  """

  def spec(path: KeyPath, leaf: jax.Array) -> P:
    return P(*leading, *weight_spec(path, leaf.shape[len(leading) :], mesh.shape[FSDP]))

  return jax.tree_util.tree_map_with_path(spec, tree)


def shardings(tree: PyTree, mesh: Mesh, leading: Leading = ()) -> PyTree:
  """Returns `specs` as NamedShardings."""
  named = functools.partial(NamedSharding, mesh)
  return jax.tree.map(named, specs(tree, mesh, leading))


def batch_sharding(mesh: Mesh, one_model: bool = False) -> NamedSharding:
  """Shards training tokens [M, B, L]: M over `replica`, B over `fsdp`.

  Data-parallel has tokens [1, M B, L]; both mesh axes shard M B.
  """
  return NamedSharding(mesh, P(None, BOTH) if one_model else P(REPLICA, FSDP))


def eval_sharding(mesh: Mesh) -> NamedSharding:
  """Shards evaluation tokens [B, L]: sequences over all devices."""
  return NamedSharding(mesh, P(BOTH))


def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """Shards a host array that is present on every process.

  Unlike device_put, this does not compare the arrays of the processes. So each process
  needs the right values only in the parts that its own devices hold.
  """
  return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def local_parts(x: jax.Array) -> np.ndarray:
  """Copies the parts that this process holds to a host array; other values are zero."""
  whole = np.zeros(x.shape, x.dtype)
  for shard in x.addressable_shards:
    whole[shard.index] = np.asarray(shard.data)
  return whole


def with_leading(places: PyTree, leading: Leading) -> PyTree:
  """Adds the leading axis to the NamedShardings of tensors without it."""
  return jax.tree.map(lambda at: NamedSharding(at.mesh, P(*leading, *at.spec)), places)


def structs(tree: PyTree, places: PyTree) -> PyTree:
  """Describes arrays as ShapeDtypeStructs with the given shardings."""
  return jax.tree.map(
    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, places
  )


def abstract(parameters: shapes.Shapes, dtype: str) -> PyTree:
  """Describes parameters as ShapeDtypeStructs, from their shapes and dtype."""
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, dtype),
    parameters,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def names(path: KeyPath) -> tuple[str, ...]:
  """Returns the names in a JAX key path."""
  return tuple(str(getattr(x, "key", getattr(x, "name", x))) for x in path)
