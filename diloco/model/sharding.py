"""The device mesh and the one table that says how every array lies on it.

Two axes: `replica` (the placement that DrJAX maps over; slow links between its
members) and `fsdp` (inside one replica; fast links). A parameter with weight axes
(a, b) is sharded as (fsdp, None) where fsdp divides a, else kept whole; a leading
layer axis is never sharded; a leading replica axis lies on `replica`. Data-parallel
trains one model: along `replica` lie copies of it, each with its part of the batch.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

REPLICA, FSDP = "replica", "fsdp"
AXIS_TYPES = (AxisType.Auto,) * 2
BOTH = (REPLICA, FSDP)


def weight_spec(path, shape: tuple[int, ...], fsdp: int) -> P:
  """Partition of one parameter without a replica axis.

  Args:
    path: key path of the leaf; under `blocks` the first axis is the layer.
    shape: its shape.
    fsdp: size of the fsdp axis.
  """
  layer_axes = (None,) if _key(path[0]) == "blocks" else ()
  weight = shape[len(layer_axes) :]
  sharded = len(weight) > 0 and fsdp > 1 and weight[0] % fsdp == 0
  return P(*layer_axes, FSDP) if sharded else P()


def specs(tree, mesh: Mesh, replicated: bool = False, data_parallel: bool = False):
  """Partition specs of a parameter-shaped tree.

  Args:
    tree: arrays or shapes under `blocks` and/or `embed`.
    mesh: the device mesh.
    replicated: whether the leaves lead with the replica axis M.
    data_parallel: whether that axis is the 1 of data-parallel, whose model is whole
      at every coordinate of the mesh's replica axis.
  """
  lead = _lead(replicated, data_parallel)

  def spec(path, leaf):
    shape = leaf.shape[len(lead) :]
    return P(*lead, *weight_spec(path, shape, mesh.shape[FSDP]))

  return jax.tree_util.tree_map_with_path(spec, tree)


def shardings(tree, mesh: Mesh, replicated: bool = False, data_parallel: bool = False):
  """NamedShardings of a parameter-shaped tree, see `specs`."""
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, spec),
    specs(tree, mesh, replicated, data_parallel),
    is_leaf=lambda x: isinstance(x, P),
  )


def optimizer_shardings(
  opt_state, params, mesh: Mesh, replicated: bool = False, data_parallel: bool = False
):
  """NamedShardings of an optimizer state, see `specs`.

  Subtrees shaped like the parameters (moments) lie like them; everything else
  (step counts) is whole, apart from the replica axis.
  """
  lead = _lead(replicated, data_parallel)
  structure: Any = jax.tree.structure(params)

  def like_params(x) -> bool:
    return jax.tree.structure(x) == structure

  def place(x):
    if like_params(x):
      return shardings(x, mesh, replicated, data_parallel)
    return NamedSharding(mesh, P(*lead))

  return jax.tree.map(place, opt_state, is_leaf=like_params)


def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """An array that every process has puts its parts on the devices.

  Unlike device_put on several processes, nothing is compared or exchanged: a process
  may leave out what belongs on the devices of others.
  """
  return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def local_replicas(c, mesh: Mesh) -> list[int]:
  """The replicas of whose batches this process's devices take a part."""
  batch_M = np.zeros((c.replicas, c.train.batch_size // c.replicas), np.int32)
  batch_M += np.arange(c.replicas, dtype=np.int32)[:, None]
  batch = by_replica(c, batch_M)
  sharding = batch_sharding(mesh, c.algorithm == "data_parallel")
  indices = sharding.addressable_devices_indices_map(batch.shape)
  return sorted({int(r) for index in indices.values() for r in np.unique(batch[index])})


def by_replica(c, tokens_MxB: np.ndarray) -> np.ndarray:
  """Data-parallel's one replica takes the batches of all M: [1, M B, ...]."""
  if c.algorithm != "data_parallel":
    return tokens_MxB
  return tokens_MxB.reshape(1, -1, *tokens_MxB.shape[2:])


def state_shardings(
  params, opt_state, mesh: Mesh, replicated: bool = False, data_parallel: bool = False
):
  """NamedShardings of parameters and of their optimizer's state, as a pair."""
  return (
    shardings(params, mesh, replicated, data_parallel),
    optimizer_shardings(opt_state, params, mesh, replicated, data_parallel),
  )


def batch_sharding(mesh: Mesh, data_parallel: bool = False) -> NamedSharding:
  """Tokens [M, B, L]: replicas over `replica`, their sequences over `fsdp`.

  Data-parallel's [1, M B, L]: sequences over both.
  """
  return NamedSharding(mesh, P(None, BOTH) if data_parallel else P(REPLICA, FSDP))


def eval_sharding(mesh: Mesh) -> NamedSharding:
  """Evaluation tokens [B, L]: sequences over all devices."""
  return NamedSharding(mesh, P(BOTH))


def table(params, mesh: Mesh) -> str:
  """One line per parameter: name, shape and partition, without replica axis."""
  rows = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = "/".join(_key(k) for k in path)
    spec = weight_spec(path, leaf.shape, mesh.shape[FSDP])
    rows.append(f"{name:<24} {leaf.shape!s:<20} {spec}")
  return "\n".join(rows)


def _lead(replicated: bool, data_parallel: bool) -> tuple[str | None, ...]:
  """Where a leading replica axis lies, if there is one."""
  return (None if data_parallel else REPLICA,) if replicated else ()


def _key(entry) -> str:
  return str(getattr(entry, "key", getattr(entry, "name", entry)))
