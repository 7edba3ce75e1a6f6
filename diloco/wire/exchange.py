"""A fragment's outer gradients to packed codes and back, on the device mesh.

Every device encodes its own fsdp shard of its own replicas, so exactly the packed bytes
of a fragment have to cross the replica axis. What the codes lose therefore depends on
the fsdp axis: blocks, subsets and largest values are those of a shard.

A payload is uint8 [M, fsdp, bytes]: the codes of every replica and shard. In it the
tensors follow each other in the order of the flattened tree; under `blocks` each layer
is coded by itself. A payload from a checkpoint may come from a mesh with another fsdp
axis. It is decoded by its own layout, to exactly the values that were sent.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.config.fields import WireConfig
from diloco.model import shapes
from diloco.model.sharding import FSDP, REPLICA, Lead, key, shardings, specs
from diloco.wire import sizes
from diloco.wire.codecs import COMPRESSORS

Tree = Any


def encoded(mesh: Mesh) -> NamedSharding:
  """Where an encoded payload lies: with the replicas that send it."""
  return NamedSharding(mesh, P(REPLICA, FSDP))


def transmitted(mesh: Mesh) -> NamedSharding:
  """Where a transmitted payload lies: all of it on every replica."""
  return NamedSharding(mesh, P(None, FSDP))


def init_state(wire: WireConfig, delta_M: Tree) -> Tree:
  """The compressor's first state for every tensor of a fragment.

  Args:
    wire: what is sent.
    delta_M: arrays shaped like the fragment's outer gradients.

  Returns:
    A tree like delta_M whose leaves are the compressor's states, () without state.
  """
  return jax.tree.map(COMPRESSORS[wire.compressor].init, delta_M)


def encode(
  wire: WireConfig, mesh: Mesh, delta_M: Tree, state_M: Tree, keys_M: jax.Array
) -> tuple[jax.Array, Tree]:
  """Every replica's packed codes.

  Args:
    wire: what is sent.
    mesh: the device mesh.
    delta_M: outer gradients of a fragment, float32 leaves (M, n, ...) under `blocks`
      and (M, ...) under `embed`, sharded as `sharding.specs` says.
    state_M: the compressor's state, see `init_state`; sharded like delta_M.
    keys_M: PRNG keys [M], one per replica, for stochastic compressors.

  Returns:
    The payload, uint8 [M, fsdp, bytes], as `encoded`; the new state.
  """
  compressor = COMPRESSORS[wire.compressor]
  places = specs(delta_M, mesh, (REPLICA,))

  def one(delta: Tree, state: Tree, replica_key: jax.Array):
    """Codes and new state of this device's shard of one replica."""
    leaves, treedef = _flatten(delta)
    codes, states = [], []
    for i, ((path, x), old, place) in enumerate(
      zip(leaves, treedef.flatten_up_to(state), treedef.flatten_up_to(places))
    ):
      n, s, row = _layout(path, x.shape)
      leaf_key = jax.random.fold_in(replica_key, i)
      # Devices that hold the same tensor draw the same numbers, shards others.
      if FSDP in place:
        leaf_key = jax.random.fold_in(leaf_key, jax.lax.axis_index(FSDP))
      old = jax.tree.map(lambda a, n=n, s=s: a.reshape(n, s), old)
      code, new = compressor.encode(wire, x.reshape(n, s), old, row, leaf_key)
      codes.append(code)
      states.append(jax.tree.map(lambda a, x=x: a.reshape(x.shape), new))
    return jnp.concatenate(codes), treedef.unflatten(states)

  def local(delta_M, state_M, keys_M):
    payload_MxB, state_M = jax.vmap(one)(delta_M, state_M, keys_M)
    return payload_MxB[:, None], state_M

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(places, places, P(REPLICA)),
    out_specs=(P(REPLICA, FSDP), places),
  )(delta_M, state_M, keys_M)


def decode(
  wire: WireConfig, mesh: Mesh, payload: jax.Array, like: Tree, lead: Lead
) -> Tree:
  """Outer gradients from a payload; nothing is exchanged.

  Args:
    wire: what was sent.
    mesh: the device mesh.
    payload: uint8 [M, F, bytes]; F is the fsdp axis of the mesh that encoded it.
    like: the fragment's outer parameters, or their shapes.
    lead: (REPLICA,) if each replica has its own payload (`encoded`), (None,) if it has
      all payloads (`transmitted`).

  Returns:
    Like `like`, leaves float32 (M, ...) that lead with `lead`, sharded over fsdp.
  """
  spread = payload.shape[1]

  def shard(path, x) -> jax.ShapeDtypeStruct:
    shape = shapes.shard(_names(path), x.shape, spread)
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  shards = jax.tree_util.tree_map_with_path(shard, like)
  one = lambda code: _decode_one(wire, code, shards)
  if spread == mesh.shape[FSDP]:
    places = jax.tree.map(
      lambda place: P(*lead, *place), specs(like, mesh), is_leaf=_is_spec
    )
    return jax.shard_map(
      lambda payload: jax.vmap(one)(payload[:, 0]),
      mesh=mesh,
      in_specs=P(*lead, FSDP),
      out_specs=places,
      check_vma=False,
    )(payload)

  def join(path, x_MxF: jax.Array, x) -> jax.Array:
    axis = shapes.sharded_axis(_names(path), x.shape, spread)
    if axis is None:
      return x_MxF[:, 0]  # Every shard holds the whole tensor.
    return jnp.concatenate([x_MxF[:, i] for i in range(spread)], axis=1 + axis)

  by_shard = jax.vmap(jax.vmap(one))(payload)
  whole_M = jax.tree_util.tree_map_with_path(join, by_shard, like)
  return jax.lax.with_sharding_constraint(whole_M, shardings(whole_M, mesh, lead))


def all_reduce(mesh: Mesh, delta_M: Tree) -> Tree:
  """The mean over the replicas of what each of them decoded (wire.exchange=psum).

  Args:
    mesh: the device mesh.
    delta_M: float32 leaves (M, ...) that lead with REPLICA.

  Returns:
    float32 leaves (...), sharded over fsdp and the same on every replica.
  """
  places = specs(delta_M, mesh, (REPLICA,))
  mean = lambda x_M: jax.lax.pmean(x_M.mean(axis=0), REPLICA)
  return jax.shard_map(
    lambda delta_M: jax.tree.map(mean, delta_M),
    mesh=mesh,
    in_specs=(places,),
    out_specs=jax.tree.map(lambda place: P(*place[1:]), places, is_leaf=_is_spec),
    check_vma=False,
  )(delta_M)


def _decode_one(wire: WireConfig, payload: jax.Array, shards: Tree) -> Tree:
  """Unpacks the codes of one shard, uint8 [bytes], to float32 leaves like `shards`."""
  compressor = COMPRESSORS[wire.compressor]
  leaves, treedef = _flatten(shards)
  out, start = [], 0
  for path, x in leaves:
    n, s, row = _layout(path, x.shape)
    stop = start + compressor.size(wire, n, s, row)
    values = compressor.decode(wire, payload[start:stop], n, s, row)
    out.append(values.reshape(x.shape))
    start = stop
  return treedef.unflatten(out)


def _flatten(tree: Tree) -> tuple[list[tuple[Any, Any]], Any]:
  """Pairs (path, leaf), and the structure."""
  return jax.tree_util.tree_flatten_with_path(tree)


def _is_spec(x) -> bool:
  return isinstance(x, P)


def _names(path) -> tuple[str, ...]:
  return tuple(map(key, path))


def _layout(path, shape: tuple[int, ...]) -> tuple[int, int, int]:
  return sizes.layout(_names(path), shape)
