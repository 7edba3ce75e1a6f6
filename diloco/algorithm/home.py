"""Where the outer state lives, and where it is updated.

default                  The outer state lives on the devices, and is updated there.
outer.offload            The outer state lives in pinned memory of the devices' hosts. A
                         fragment is copied to the devices when it is sent, and copied
                         back when it is updated.
overlap.transport=host   The outer state lives on the hosts: every process holds all of
                         it on its CPU, and updates it there from everyone's payloads.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.config import Config
from diloco.errors import ConfigError
from diloco.mesh import sharding

Tree = Any


@dataclasses.dataclass(frozen=True)
class Home:
  """Where the outer state lives, and where the outer step runs.

  Attributes:
    devices: the replica x fsdp mesh.
    mesh: runs the outer step: `devices`, or one CPU of every process.
    at_hosts: whether the hosts hold and update the outer state.
    offload: whether the outer state lives in pinned memory.
  """

  devices: Mesh
  mesh: Mesh
  at_hosts: bool = False
  offload: bool = False

  def shardings(self, places: Tree) -> Tree:
    """Turns shardings on the devices into those of the outer state at its home."""
    if self.at_hosts:
      return jax.tree.map(lambda _: NamedSharding(self.mesh, P()), places)
    if not self.offload:
      return places
    return jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), places)

  def keep(self, tree: Tree) -> Tree:
    """Copies outer state to its home, from the devices or from `mesh`."""
    if self.at_hosts:
      return jax.tree.map(self._to_host, tree)
    return _in_memory(tree, "pinned_host") if self.offload else tree

  def bring(self, tree: Tree) -> Tree:
    """Copies outer state from its home to `mesh`, which runs the outer step."""
    return _in_memory(tree, "device") if self.offload else tree

  def fetch(self, theta: Tree) -> Tree:
    """Copies outer parameters to the devices, from their home or from `mesh`."""
    if not self.at_hosts:
      return self.bring(theta)
    there = sharding.shardings(theta, self.devices)
    copy = lambda x, at: sharding.place(np.asarray(x.addressable_data(0)), at)
    return jax.tree.map(copy, theta, there)

  def _to_host(self, x: jax.Array) -> jax.Array:
    here = NamedSharding(self.mesh, P())
    if x.sharding == here:
      return x
    return sharding.place(sharding.local_parts(x), here)


def make_home(c: Config, mesh: Mesh, hosts: Mesh | None) -> Home:
  """Makes the home that a config asks for.

  Args:
    hosts: one CPU of every process if overlap.transport is host, else None.

  Raises:
    ConfigError: outer.offload is set, but the hosts have no pinned memory.
  """
  if hosts is not None:
    return Home(mesh, hosts, at_hosts=True)
  offload = c.outer.offload and bool(c.make_fragments())
  if offload:
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
      raise ConfigError(
        f"outer.offload needs memory of kind pinned_host, but {device.device_kind} has"
        f" {', '.join(kinds) or 'none'}; unset it or set overlap.transport=host."
      )
  return Home(mesh, mesh, offload=offload)


def _in_memory(tree: Tree, kind: str) -> Tree:
  """Copies every shard to another memory of its device."""
  return jax.tree.map(
    lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), tree
  )
