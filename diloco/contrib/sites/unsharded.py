"""Encodes the payloads of a site as if each of its replicas were on one device.

So the bytes do not depend on how fsdp shards a replica: sites with different numbers of
devices can train together, and a site may go on with other devices. The first device of
a replica gathers the fragment, and runs the program of a site without fsdp.
"""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.algorithm.slices import Layers, take
from diloco.algorithm.streaming import Streaming
from diloco.algorithm.sync_metrics import Metrics
from diloco.mesh import sharding
from diloco.mesh.sharding import FSDP, REPLICA
from diloco.util.types import PyTree


def send(
  sync: Streaming,
  t: int,
  p: int,
  params_M: PyTree,
  theta: PyTree,
  codec_state: PyTree,
  first: int,
) -> tuple[jax.Array, PyTree, Metrics]:
  """Runs lines 7 and 8 for fragment p after step t, like `Streaming.encode`.

  Returns:
    Payload uint8 [M, 1, bytes]; new codec_state, sharded as before; metrics.
  """
  mesh = sync.mesh
  if mesh.shape[FSDP] == 1:
    theta = sync.place.fetch(theta)
    return sync.encode(t, p, params_M, theta, codec_state, first)
  alone = sharding.mesh_of(mesh.devices[:, :1])
  arrays = (params_M, codec_state, sync.layers[p])
  gathered = _gather(*arrays, keys=tuple(sync.shapes[p]), mesh=mesh)
  part_M, state = jax.tree.map(functools.partial(_first_copy, alone), gathered)
  theta = dataclasses.replace(sync.place, devices=alone).fetch(theta)
  layers = tuple(np.arange(len(x), dtype=x.dtype) for x in sync.layers)
  one = dataclasses.replace(sync, mesh=alone, layers=layers)
  with jax.set_mesh(alone):
    payload, state, metrics = one.encode(t, p, part_M, theta, state, first)
  scatter = lambda x, old: sharding.place(sharding.local_parts(x), old.sharding)
  return payload, jax.tree.map(scatter, state, codec_state), metrics


@functools.partial(jax.jit, static_argnames=("keys", "mesh"))
def _gather(
  params_M: PyTree,
  codec_state: PyTree,
  layers: Layers,
  *,
  keys: tuple[str, ...],
  mesh: Mesh,
) -> tuple[PyTree, PyTree]:
  """Returns a fragment's parameters and codec_state, whole on each device."""
  fragment = (take(params_M, keys, layers), codec_state)
  return jax.lax.with_sharding_constraint(fragment, NamedSharding(mesh, P(REPLICA)))


def _first_copy(alone: Mesh, x_M: jax.Array) -> jax.Array:
  """Returns the copies that lie on the devices of `alone`, as one array."""
  devices = set(alone.devices.flat)
  parts = [shard.data for shard in x_M.addressable_shards if shard.device in devices]
  at = NamedSharding(alone, P(REPLICA))
  return jax.make_array_from_single_device_arrays(x_M.shape, at, parts)
