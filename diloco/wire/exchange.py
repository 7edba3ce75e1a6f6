"""How payloads cross from replica to replica on the device mesh.

Every device encodes its own fsdp shard of its own replicas, so that exactly the
packed bytes of a fragment cross the replica axis, once. Payloads are uint8
[M, fsdp, bytes]: sharded by replica when encoded, whole on every replica once
transmitted.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco import mesh as mesh_lib
from diloco.mesh import FSDP, REPLICA
from diloco.wire import payload as payload_lib

Tree = Any


def encode(codec, mesh: Mesh, delta_M: Tree, keys_M: jax.Array) -> jax.Array:
  """Every replica's packed codes.

  Args:
    codec: a compressor, see `diloco.wire.codecs`.
    mesh: the device mesh.
    delta_M: outer gradients of a fragment, float32, leading axis M.
    keys_M: one PRNG key per replica, for stochastic compressors.

  Returns:
    uint8 [M, fsdp, bytes], on the devices of the replica that sends it.
  """

  def local(delta_M, keys_M):
    # All fsdp shards use the replica's key: a leaf that is not sharded must come out
    # the same on each of them.
    encode_one = lambda delta, key: payload_lib.encode_tree(codec, delta, key)
    return jax.vmap(encode_one)(delta_M, keys_M)[:, None]

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(mesh_lib.specs(delta_M, mesh, replicated=True), P(REPLICA)),
    out_specs=P(REPLICA, FSDP),
  )(delta_M, keys_M)


def transmitted(mesh: Mesh, exchange: str) -> NamedSharding:
  """Where payloads lie once transmitted; going there is one all-gather of uint8.

  With `psum` they stay where they are: the reference reduces decoded values later.
  """
  return NamedSharding(mesh, P(None if exchange == "gather" else REPLICA, FSDP))


def decode_all(codec, mesh: Mesh, payload: jax.Array, like: Tree) -> Tree:
  """Decodes transmitted payloads: leaves float32 (M, ...), whole on every replica."""
  return _decode(codec, mesh, payload, like, replica=None)


def decode_own(codec, mesh: Mesh, payload: jax.Array, like: Tree) -> Tree:
  """Decodes payloads where they were encoded: leaves (M, ...) sharded by replica."""
  return _decode(codec, mesh, payload, like, replica=REPLICA)


def reduce_own(codec, mesh: Mesh, payload: jax.Array, like: Tree, replicas: int):
  """Reference exchange: all-reduce of decoded float32 values over the replicas.

  Returns:
    (mean over the replicas, like `like`; NaN in place of the cosine similarity,
    which needs the unreduced values).
  """
  specs = mesh_lib.specs(like, mesh)

  def local(payload):
    own_M = _decode_local(codec, payload, like, specs, mesh)
    total = jax.tree.map(lambda x_M: jax.lax.psum(x_M.sum(axis=0), REPLICA), own_M)
    return jax.tree.map(lambda x: x / replicas, total)

  mean = jax.shard_map(
    local, mesh=mesh, in_specs=P(REPLICA, FSDP), out_specs=specs, check_vma=False
  )(payload)
  return mean, jnp.float32(jnp.nan)


def _decode(codec, mesh: Mesh, payload: jax.Array, like: Tree, replica) -> Tree:
  specs = mesh_lib.specs(like, mesh)
  return jax.shard_map(
    lambda payload: _decode_local(codec, payload, like, specs, mesh),
    mesh=mesh,
    in_specs=P(replica, FSDP),
    out_specs=jax.tree.map(
      lambda spec: P(replica, *spec), specs, is_leaf=lambda x: isinstance(x, P)
    ),
    check_vma=False,
  )(payload)


def _decode_local(codec, payload, like: Tree, specs: Tree, mesh: Mesh) -> Tree:
  """Decodes this device's shard, uint8 [m, 1, bytes] -> leaves (m, ...)."""
  shard = jax.tree.map(
    lambda x, spec: jax.ShapeDtypeStruct(
      NamedSharding(mesh, spec).shard_shape(x.shape), jnp.float32
    ),
    like,
    specs,
  )
  decode_one = lambda code: payload_lib.decode_tree(codec, code, shard)
  return jax.vmap(decode_one)(payload[:, 0])
