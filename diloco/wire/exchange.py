"""How payloads cross from replica to replica on the device mesh.

Every device encodes its own fsdp shard of its own replicas, so that exactly the
packed bytes of a fragment cross the replica axis, once. What the codes lose therefore
depends on the fsdp axis: blocks, subsets and the largest values are a shard's.

Payloads are uint8 [M, fsdp, bytes]: sharded by replica when encoded, whole on every
replica once transmitted. A payload in flight may come out of the checkpoint of a mesh
with another fsdp axis: its shards lie together then, and it is decoded by its own
layout, to exactly the values that were sent.

Each group of replicas sends its payload to every other one: a permutation by every
distance, the bytes of an all-gather. XLA for TPUs runs permutations beside other
work, but not the all-gather of one slice.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.model import sharding as mesh_lib
from diloco.model.sharding import FSDP, REPLICA
from diloco.wire import codecs
from diloco.wire import payload as payload_lib

Tree = Any


def encode(
  codec: codecs.MakeCodec, mesh: Mesh, delta_M: Tree, keys_M: jax.Array
) -> jax.Array:
  """Every replica's packed codes.

  Args:
    codec: from `payload.make_codec_from_config`.
    mesh: the device mesh.
    delta_M: outer gradients of a fragment, float32 leaves (M, n, ...) under `blocks`
      and (M, ...) under `embed`, sharded as `mesh.specs` says of replicated trees.
    keys_M: PRNG keys [M], one per replica, for stochastic compressors.

  Returns:
    uint8 [M, fsdp, bytes], as `encoded`.
  """
  specs = mesh_lib.specs(delta_M, mesh, replicated=True)
  sharded = [FSDP in s for s in jax.tree.leaves(specs, is_leaf=_is_spec)]

  def local(delta_M, keys_M):
    # A leaf that is not sharded must come out the same on every device: one key.
    shard = jax.lax.axis_index(FSDP)
    shards = [shard if s else None for s in sharded]
    encode_one = lambda delta, key: payload_lib.encode_tree(codec, delta, key, shards)
    return jax.vmap(encode_one)(delta_M, keys_M)[:, None]

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(specs, P(REPLICA)),
    out_specs=P(REPLICA, FSDP),
  )(delta_M, keys_M)


def encoded(mesh: Mesh) -> NamedSharding:
  """Where payloads [M, fsdp, bytes] lie once encoded: with the replica that sends."""
  return NamedSharding(mesh, P(REPLICA, FSDP))


def transmitted(mesh: Mesh, exchange: str) -> NamedSharding:
  """Where payloads lie once transmitted: with `gather` all of them on every replica.

  With `psum` they stay where they are: the reference reduces decoded values later.
  """
  return NamedSharding(mesh, P(None, FSDP)) if exchange == "gather" else encoded(mesh)


def start(mesh: Mesh, payload: jax.Array) -> tuple[jax.Array, ...]:
  """Sends an encoded payload to the groups of replicas at every distance.

  Args:
    mesh: the device mesh, with n groups along the replica axis.
    payload: uint8 [M, fsdp, bytes], as `encoded`.

  Returns:
    n - 1 arrays uint8 [payload.size], sharded like it: on group i, number s holds the
    payload of group i - s - 1 modulo n. They are flat since a TPU pads rows of bytes to
    four of them, and would send four times as much.
  """
  n = mesh.shape[REPLICA]

  def local(own):
    distances = ([(i, (i + s) % n) for i in range(n)] for s in range(1, n))
    flat = own.reshape(-1)
    return tuple(jax.lax.ppermute(flat, REPLICA, pairs) for pairs in distances)

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=_spec(mesh, payload, REPLICA),
    out_specs=(_flat_spec(mesh, payload),) * (n - 1),
  )(payload)


def finish(
  mesh: Mesh, payload: jax.Array, received: tuple[jax.Array, ...]
) -> jax.Array:
  """Puts what `start` returned into the order of the replicas; exchanges nothing.

  Args:
    mesh: the device mesh.
    payload: uint8 [M, fsdp, bytes], as `encoded`: what was given to `start`.
    received: what `start` returned, each flat and sharded like payload.

  Returns:
    uint8 [M, fsdp, bytes], as `transmitted`.
  """
  n = mesh.shape[REPLICA]

  def local(own, received):
    by_distance = jnp.stack([own, *(x.reshape(own.shape) for x in received)])
    order = (jax.lax.axis_index(REPLICA) - jnp.arange(n)) % n
    return by_distance[order].reshape(-1, *own.shape[1:])

  spec = _spec(mesh, payload, REPLICA)
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(spec, (_flat_spec(mesh, payload),) * (n - 1)),
    out_specs=_spec(mesh, payload, None),
    check_vma=False,
  )(payload, received)


def decode_all(
  codec: codecs.MakeCodec, mesh: Mesh, payload: jax.Array, like: Tree
) -> Tree:
  """Decodes transmitted payloads.

  Args:
    codec: from `payload.make_codec_from_config`.
    mesh: the device mesh.
    payload: uint8 [M, F, bytes], as `transmitted`; F is mesh's fsdp axis, or another
      if the payload comes out of a checkpoint.
    like: the fragment's outer parameters, or their shapes.

  Returns:
    Like `like`, leaves float32 (M, ...): sharded over fsdp, whole on every replica.
  """
  return _decode(codec, mesh, payload, like, replica=None)


def decode_own(
  codec: codecs.MakeCodec, mesh: Mesh, payload: jax.Array, like: Tree
) -> Tree:
  """Decodes payloads where they were encoded; nothing is exchanged.

  Args:
    codec, mesh, like: as of `decode_all`.
    payload: uint8 [M, F, bytes], as `encoded`.

  Returns:
    Like `like`, leaves float32 (M, ...): sharded by replica and over fsdp.
  """
  return _decode(codec, mesh, payload, like, replica=REPLICA)


def reduce_own(
  codec: codecs.MakeCodec, mesh: Mesh, payload: jax.Array, like: Tree, replicas: int
) -> tuple[Tree, jax.Array]:
  """Reference exchange: all-reduce of decoded float32 values over the replicas.

  Args:
    codec, mesh, like: as of `decode_all`.
    payload: uint8 [M, F, bytes], as `encoded`.
    replicas: M.

  Returns:
    (mean over the replicas: float32, shaped like `like`, sharded over fsdp and whole
    on every replica; NaN, float32 [], in place of the cosine similarity, which needs
    the unreduced values).
  """
  if _foreign(mesh, payload):
    own_M = decode_own(codec, mesh, payload, like)
    return jax.tree.map(lambda x_M: x_M.mean(axis=0), own_M), jnp.float32(jnp.nan)
  specs = mesh_lib.specs(like, mesh)

  def local(payload):
    own_M = _decode_local(codec, payload, like, specs, mesh)
    total = jax.tree.map(lambda x_M: jax.lax.psum(x_M.sum(axis=0), REPLICA), own_M)
    return jax.tree.map(lambda x: x / replicas, total)

  mean = jax.shard_map(
    local, mesh=mesh, in_specs=P(REPLICA, FSDP), out_specs=specs, check_vma=False
  )(payload)
  return mean, jnp.float32(jnp.nan)


def reduced_bytes(mesh: Mesh, like: Tree) -> int:
  """Bytes of float32 that a replica puts into `reduce_own`, over all its devices.

  Args:
    mesh: the device mesh.
    like: a fragment's outer parameters, or their shapes.
  """
  shard = _shards(like, mesh_lib.specs(like, mesh), mesh)
  values = sum(math.prod(x.shape) for x in jax.tree.leaves(shard))
  return mesh.shape[FSDP] * jnp.dtype(jnp.float32).itemsize * values


def warn_of_other_shards(c, before: int | None, now: int) -> None:
  """Says so if a run goes on with other shards, which its codes depend on.

  Args:
    c: resolved config.
    before: size of the fsdp axis in the checkpoint's run, None if not recorded.
    now: its size in this run.
  """
  plain = c.wire.compressor == "quantize" and c.wire.format in codecs.PLAIN
  if before in (None, now) or plain or c.algorithm == "data_parallel":
    return
  logging.warning(
    "mesh.fsdp was %d and is %d: each shard is coded by itself (wire.compressor %s,"
    " wire.format %s), so outer gradients lose other bits than before; set mesh.fsdp=%d"
    " if results have to be those of an uninterrupted run.",
    before,
    now,
    c.wire.compressor,
    c.wire.format,
    before,
  )


def _foreign(mesh: Mesh, payload: jax.Array) -> bool:
  return payload.shape[1] != mesh.shape[FSDP]


def _is_spec(x) -> bool:
  return isinstance(x, P)


def _spec(mesh: Mesh, payload: jax.Array, replica: str | None) -> P:
  return P(replica) if _foreign(mesh, payload) else P(replica, FSDP)


def _flat_spec(mesh: Mesh, payload: jax.Array) -> P:
  return P(REPLICA) if _foreign(mesh, payload) else P((REPLICA, FSDP))


def _decode(codec, mesh: Mesh, payload: jax.Array, like: Tree, replica) -> Tree:
  specs = mesh_lib.specs(like, mesh)
  if _foreign(mesh, payload):
    places = jax.tree.map(
      lambda spec: NamedSharding(mesh, P(replica, *spec)), specs, is_leaf=_is_spec
    )
    values = _decode_foreign(codec, payload, like)
    return jax.lax.with_sharding_constraint(values, places)
  return jax.shard_map(
    lambda payload: _decode_local(codec, payload, like, specs, mesh),
    mesh=mesh,
    in_specs=P(replica, FSDP),
    out_specs=jax.tree.map(lambda spec: P(replica, *spec), specs, is_leaf=_is_spec),
    check_vma=False,
  )(payload)


def _decode_foreign(codec, payload: jax.Array, like: Tree) -> Tree:
  """Decodes payloads of any layout [M, F, bytes], all F shards, to leaves (M, ...)."""
  shards = payload.shape[1]
  specs = jax.tree_util.tree_map_with_path(
    lambda path, x: mesh_lib.weight_spec(path, x.shape, shards), like
  )

  def shard(x, spec: P):
    axis = spec.index(FSDP) if FSDP in spec else None
    shape = [n // shards if i == axis else n for i, n in enumerate(x.shape)]
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  def join(x_MxF, spec: P):
    if FSDP not in spec:
      return x_MxF[:, 0]  # Every shard holds all of it.
    axis = 1 + spec.index(FSDP)
    return jnp.concatenate([x_MxF[:, i] for i in range(shards)], axis=axis)

  decode_one = lambda code: payload_lib.decode_tree(
    codec, code, jax.tree.map(shard, like, specs)
  )
  return jax.tree.map(join, jax.vmap(jax.vmap(decode_one))(payload), specs)


def _decode_local(codec, payload, like: Tree, specs: Tree, mesh: Mesh) -> Tree:
  """Decodes this device's shard, uint8 [m, 1, bytes] -> leaves (m, ...)."""
  shard = _shards(like, specs, mesh)
  decode_one = lambda code: payload_lib.decode_tree(codec, code, shard)
  return jax.vmap(decode_one)(payload[:, 0])


def _shards(like: Tree, specs: Tree, mesh: Mesh) -> Tree:
  """The shapes that one device holds of a fragment."""
  return jax.tree.map(
    lambda x, spec: jax.ShapeDtypeStruct(
      NamedSharding(mesh, spec).shard_shape(x.shape), jnp.float32
    ),
    like,
    specs,
  )
