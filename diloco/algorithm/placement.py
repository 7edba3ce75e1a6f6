"""Where the outer state lives, and where and when it is updated.

default                  The outer state lives on the devices, and is updated there.
outer.offload            The outer state lives in pinned memory of the devices' hosts. A
                         fragment is copied to the devices when it is sent, and copied
                         back when it is updated.
overlap.transport=host   The outer state lives on the hosts: every process holds all of
                         it on its CPU, and updates it there from everyone's payloads.
"""

import contextlib
import dataclasses
import operator
import time
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.mesh.modes import plain_modes
from diloco.util.types import PyTree

Result = TypeVar("Result")


class Jobs:
  """Runs one job per exchange in flight, such as `Plan.receive`.

  In the foreground, a job runs when its fragment arrives. If it ran earlier, it
  would delay inner steps, because devices run programs in launch order. In the
  background, a thread runs the jobs in the order of the sends while the devices train.

  What is in flight is in the state alone. A result counts only if the job began with
  exactly the arrays that the state has when the fragment arrives.
  """

  def __init__(self, background: bool):
    self._thread = futures.ThreadPoolExecutor(1, "exchange") if background else None
    # {p: (arguments, result) of the job that began last}
    self._jobs: dict[int, tuple[PyTree, futures.Future[PyTree]]] = {}
    self._waited_s = 0.0

  def start(self, p: int, job: Callable[..., PyTree], *args: PyTree) -> None:
    """Lets `job(*args)` begin.

    Args:
      p: the number that `finish` gives again: the fragment, or the round.
    """
    if self._thread:
      run = plain_modes()(lambda: jax.block_until_ready(job(*args)))
      self._jobs[p] = args, self._thread.submit(run)

  def finish(self, p: int, job: Callable[..., Result], *args: PyTree) -> Result:
    """Returns `job(*args)`; called when fragment p arrives."""
    if self._thread is None:
      return job(*args)
    began_with, _ = self._jobs.get(p, (None, None))
    if not _are_same(began_with, args):
      # The run resumed, or went back to an earlier state. The thread runs a job that it
      # drops to its end first, so all processes exchange in the same order.
      self.start(p, job, *args)
    began = time.perf_counter()
    result = self._jobs.pop(p)[1].result()
    self._waited_s = time.perf_counter() - began
    return result

  def waited(self) -> dict[str, np.float32]:
    """Returns {"waited_s": seconds that `finish` last waited}; {} without a thread."""
    return {"waited_s": np.float32(self._waited_s)} if self._thread else {}

  def settle(self) -> None:
    """Waits for all jobs."""
    # Otherwise two threads could start collectives, in another order on each process.
    futures.wait(result for _, result in self._jobs.values())

  def close(self) -> None:
    """Drops the jobs that have not begun; waits for none."""
    if self._thread:
      self._thread.shutdown(wait=False, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where the outer state lives, and where the outer step runs.

  Attributes:
    devices: the replica x fsdp mesh.
    mesh: runs the outer step: `devices`, or one CPU of every process.
    at_hosts: whether the hosts hold and update the outer state.
    offload: whether the outer state lives in pinned memory.
    jobs: lets hosts carry and update fragments while the devices train.
  """

  devices: Mesh
  mesh: Mesh
  at_hosts: bool = False
  offload: bool = False
  jobs: Jobs = dataclasses.field(default_factory=lambda: Jobs(background=False))

  def shardings(self, places: PyTree) -> PyTree:
    """Turns shardings on the devices into those of the outer state where it lives."""
    if self.at_hosts:
      return jax.tree.map(lambda _: NamedSharding(self.mesh, P()), places)
    if not self.offload:
      return places
    return jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), places)

  def keep(self, tree: PyTree) -> PyTree:
    """Copies outer state to where it lives, from the devices or from `mesh`."""
    if self.at_hosts:
      return jax.tree.map(self._to_host, tree)
    return _in_memory(tree, "pinned_host") if self.offload else tree

  def bring(self, tree: PyTree) -> PyTree:
    """Copies outer state from where it lives to `mesh`, which runs the outer step."""
    return _in_memory(tree, "device") if self.offload else tree

  def fetch(self, theta: PyTree) -> PyTree:
    """Copies outer parameters to the devices, from where they live or from `mesh`."""
    if not self.at_hosts:
      return self.bring(theta)
    there = sharding.shardings(theta, self.devices)
    copy = lambda x, at: sharding.place(np.asarray(x.addressable_data(0)), at)
    return jax.tree.map(copy, theta, there)

  def on_mesh(self) -> contextlib.AbstractContextManager[object]:
    """Sets the mesh of an outer step on hosts.

    On devices, the mesh is set already; `jax.vmap` forbids to set it again.
    """
    return jax.set_mesh(self.mesh) if self.at_hosts else contextlib.nullcontext()

  def _to_host(self, x: jax.Array) -> jax.Array:
    here = NamedSharding(self.mesh, P())
    if x.sharding == here:
      return x
    return sharding.place(sharding.local_parts(x), here)


def make_placement(mesh: Mesh, hosts: Mesh | None, offload: bool) -> Placement:
  """Makes a placement.

  Args:
    mesh: the replica x fsdp mesh.
    hosts: one CPU of every process if hosts keep the outer state, else None.
    offload: whether the outer state lives in pinned memory; ignored if hosts keep it.

  Raises:
    ConfigError: the hosts have no pinned memory.
  """
  if hosts is not None:
    return Placement(mesh, hosts, at_hosts=True, jobs=Jobs(background=True))
  if offload:
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
      raise ConfigError(
        f"outer.offload needs memory of kind pinned_host, but {device.device_kind} has"
        f" {', '.join(kinds) or 'none'}; unset it or set overlap.transport=host."
      )
  return Placement(mesh, mesh, offload=offload)


def _are_same(a: PyTree, b: PyTree) -> bool:
  """Returns whether two trees hold the same arrays, not only equal ones."""
  x, y = jax.tree.leaves(a), jax.tree.leaves(b)
  return len(x) == len(y) and all(map(operator.is_, x, y))


def _in_memory(tree: PyTree, kind: str) -> PyTree:
  """Copies every shard to another memory of its device."""
  return jax.tree.map(
    lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), tree
  )
