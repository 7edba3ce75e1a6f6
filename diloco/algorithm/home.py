"""Where outer parameters and outer optimizer state live, and where they are updated.

devices             both: on the devices of the replicas
outer.offload       wait in pinned memory of the devices' hosts; a fragment that is
                    sent is copied to the devices, and back once it is updated
overlap.transport   host: both on the hosts; every process has the whole state on its
                    CPU, and updates it from everyone's payloads
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.config import Config, ConfigError
from diloco.model import sharding

Tree = Any


@dataclasses.dataclass(frozen=True)
class Home:
  """The home of the outer state.

  Attributes:
    devices: the replica x fsdp mesh.
    mesh: where updates are computed: `devices`, or a CPU of every process.
    at_hosts: whether the hosts hold and update the state.
    offload: whether the state waits in pinned memory.
  """

  devices: Mesh
  mesh: Mesh
  at_hosts: bool = False
  offload: bool = False

  def shardings(self, places: Tree) -> Tree:
    """Shardings at home, from those on the devices."""
    if self.at_hosts:
      return jax.tree.map(lambda _: NamedSharding(self.mesh, P()), places)
    if not self.offload:
      return places
    return jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), places)

  def keep(self, tree: Tree) -> Tree:
    """From the devices, or from where updates are computed, to home."""
    if self.at_hosts:
      return jax.tree.map(self._to_host, tree)
    return _in_memory(tree, "pinned_host") if self.offload else tree

  def bring(self, tree: Tree) -> Tree:
    """From home to where updates are computed."""
    return _in_memory(tree, "device") if self.offload else tree

  def fetch(self, theta: Tree) -> Tree:
    """Outer parameters, at home or where they were updated, to the devices."""
    if not self.at_hosts:
      return self.bring(theta)
    there = sharding.shardings(theta, self.devices)
    copy = lambda x, at: sharding.place(np.asarray(x.addressable_data(0)), at)
    return jax.tree.map(copy, theta, there)

  def _to_host(self, x: jax.Array) -> jax.Array:
    here = NamedSharding(self.mesh, P())
    if x.sharding == here:
      return x
    whole = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
      whole[shard.index] = np.asarray(shard.data)
    return sharding.place(whole, here)


def make_home(c: Config, mesh: Mesh, hosts: Mesh | None) -> Home:
  """The home that a config asks for.

  Args:
    c: the config.
    mesh: the device mesh.
    hosts: a CPU of every process, if overlap.transport is host.

  Raises:
    ConfigError: outer.offload, but the devices' hosts have no pinned memory.
  """
  if hosts is not None:
    return Home(mesh, hosts, at_hosts=True)
  if c.outer.offload:
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
      raise ConfigError(
        f"outer.offload needs memory of kind pinned_host, but {device.device_kind} has"
        f" {', '.join(kinds) or 'none'}; leave it off, or set overlap.transport=host."
      )
  return Home(mesh, mesh, offload=c.outer.offload)


def _in_memory(tree: Tree, kind: str) -> Tree:
  """The same shards in another memory of their devices."""
  return jax.tree.map(
    lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), tree
  )
