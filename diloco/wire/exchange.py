"""Encodes the outer gradients of a fragment on the device mesh, and decodes them.

Every device encodes its own fsdp shard of its own replicas, so only the packed bytes of
a fragment have to cross the replica axis. The coding error therefore depends on the
size of the fsdp axis: blocks, subsets and largest values are chosen within a shard.

A payload is uint8 [M, fsdp, bytes]: the codes of every replica and shard. In a payload,
tensors have the order of the flattened tree; under `blocks` each layer is encoded
separately. A payload from a checkpoint may come from a mesh with an fsdp axis of
another size. It is decoded in the layout of that mesh, to exactly the values sent.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath, PyTreeDef

from diloco.mesh.sharding import FSDP, REPLICA, Leading, names, shardings, specs
from diloco.spec import shapes, sizes
from diloco.spec.fields import WireConfig
from diloco.util.types import PyTree
from diloco.wire import compressors

Leaf = jax.Array | jax.ShapeDtypeStruct


def encoded(mesh: Mesh) -> NamedSharding:
  """Returns a payload's sharding before the exchange: a replica holds its own part."""
  return NamedSharding(mesh, P(REPLICA, FSDP))


def transmitted(mesh: Mesh) -> NamedSharding:
  """Returns a payload's sharding after the exchange: every replica holds all parts."""
  return NamedSharding(mesh, P(None, FSDP))


def init_state(wire: WireConfig, delta_M: PyTree) -> PyTree:
  """Makes the first compressor state of every tensor of a fragment.

  Args:
    wire: compressor and number format.
    delta_M: arrays shaped like the outer gradients of the fragment.

  Returns:
    A tree like delta_M, with a compressor state for each leaf: () without state.
  """
  return jax.tree.map(compressors.get(wire.compressor).init, delta_M)


def encode(
  wire: WireConfig, mesh: Mesh, delta_M: PyTree, state_M: PyTree, keys_M: jax.Array
) -> tuple[jax.Array, PyTree]:
  """Encodes the outer gradients of all replicas; nothing is exchanged.

  Args:
    wire: compressor and number format.
    delta_M: outer gradients of a fragment, float32 leaves (M, n, ...) under `blocks`
      and (M, ...) under `embed`, sharded as `sharding.specs` says.
    state_M: compressor state from `init_state`, sharded like delta_M.
    keys_M: PRNG keys [M], one per replica, for stochastic compressors.

  Returns:
    The payload uint8 [M, fsdp, bytes], sharded as `encoded` says, and the new state.
  """
  places = specs(delta_M, mesh, (REPLICA,))
  compressor = compressors.get(wire.compressor)

  def one(
    delta: PyTree, state: PyTree, replica_key: jax.Array
  ) -> tuple[jax.Array, PyTree]:
    """Returns codes and new state of this device's shard of one replica."""
    leaves, treedef = _flatten(delta)
    codes, states = [], []
    for i, ((path, x), old, place) in enumerate(
      zip(leaves, treedef.flatten_up_to(state), treedef.flatten_up_to(places))
    ):
      n, s, row = sizes.layout(names(path), x.shape)
      leaf_key = jax.random.fold_in(replica_key, i)
      # Devices that hold copies of a tensor must draw equal random numbers. Devices
      # that hold different shards draw different numbers.
      if FSDP in place:
        leaf_key = jax.random.fold_in(leaf_key, jax.lax.axis_index(FSDP))
      old = jax.tree.map(lambda a, n=n, s=s: a.reshape(n, s), old)
      code, new = compressor.encode(wire, x.reshape(n, s), old, row, leaf_key)
      codes.append(code)
      states.append(jax.tree.map(lambda a, x=x: a.reshape(x.shape), new))
    return jnp.concatenate(codes)[None], treedef.unflatten(states)

  return jax.shard_map(
    jax.vmap(one),
    mesh=mesh,
    in_specs=(places, places, P(REPLICA)),
    out_specs=(P(REPLICA, FSDP), places),
  )(delta_M, state_M, keys_M)


def decode(
  wire: WireConfig, mesh: Mesh, payload: jax.Array, like: PyTree, leading: Leading
) -> PyTree:
  """Decodes a payload to outer gradients; nothing is exchanged.

  Args:
    wire: compressor and number format.
    payload: uint8 [M, F, bytes]; the mesh that encoded it had an fsdp axis of size F.
    like: outer parameters of the fragment, or their shapes.
    leading: (REPLICA,) if the payload is sharded as `encoded` says, (None,) if it is
      sharded as `transmitted` says.

  Returns:
    A tree like `like` with float32 leaves (M, ...), sharded over `leading` and fsdp.
  """
  spread = payload.shape[1]

  def shard(path: KeyPath, x: Leaf) -> jax.ShapeDtypeStruct:
    shape = shapes.shard(names(path), x.shape, spread)
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  shards = jax.tree.map_with_path(shard, like)
  one = lambda code: _decode_one(wire, code, shards)
  if spread == mesh.shape[FSDP]:
    places = jax.tree.map(lambda place: P(*leading, *place), specs(like, mesh))
    return jax.shard_map(
      lambda payload: jax.vmap(one)(payload[:, 0]),
      mesh=mesh,
      in_specs=P(*leading, FSDP),
      out_specs=places,
      check_vma=False,
    )(payload)

  def join(path: KeyPath, x_MxF: jax.Array, x: Leaf) -> jax.Array:
    axis = shapes.sharded_axis(names(path), x.shape, spread)
    if axis is None:
      return x_MxF[:, 0]  # Every shard holds the whole tensor.
    return jnp.concatenate([x_MxF[:, i] for i in range(spread)], axis=1 + axis)

  by_shard = jax.vmap(jax.vmap(one))(payload)
  whole_M = jax.tree.map_with_path(join, by_shard, like)
  return jax.lax.with_sharding_constraint(whole_M, shardings(whole_M, mesh, leading))


def all_reduce(mesh: Mesh, delta_M: PyTree) -> PyTree:
  """Averages decoded outer gradients over all replicas (wire.exchange=psum).

  Args:
    delta_M: float32 leaves (M, ...), sharded over REPLICA and fsdp.

  Returns:
    float32 leaves (...), sharded over fsdp and the same on every replica.
  """
  places = specs(delta_M, mesh, (REPLICA,))
  mean = lambda x_M: jax.lax.pmean(x_M.mean(axis=0), REPLICA)
  return jax.shard_map(
    lambda delta_M: jax.tree.map(mean, delta_M),
    mesh=mesh,
    in_specs=(places,),
    out_specs=jax.tree.map(lambda place: P(*place[1:]), places),
    check_vma=False,
  )(delta_M)


def _decode_one(wire: WireConfig, payload: jax.Array, shards: PyTree) -> PyTree:
  """Decodes the codes of one shard, uint8 [bytes], to float32 leaves like `shards`."""
  compressor = compressors.get(wire.compressor)
  leaves, treedef = _flatten(shards)
  out, start = [], 0
  for path, x in leaves:
    n, s, row = sizes.layout(names(path), x.shape)
    stop = start + compressor.size(wire, n, s, row)
    values = compressor.decode(wire, payload[start:stop], n, s, row)
    out.append(values.reshape(x.shape))
    start = stop
  return treedef.unflatten(out)


def _flatten(tree: PyTree) -> tuple[list[tuple[KeyPath, jax.Array]], PyTreeDef]:
  """Returns pairs (path, leaf), and the structure of the tree."""
  return jax.tree.flatten_with_path(tree)
