"""Places: where the outer state lives, and where lines 7 to 12 of Algorithm 2 run.

OnDevices   The outer state lives on the devices, and is updated there.
Offloaded   The outer state lives in pinned memory of the devices' hosts. A fragment is
            copied to the devices when it is sent, and copied back when it is updated.
OnHosts     The outer state lives on the hosts: every process has a copy on its CPU, and
            a thread updates the copy there from the payloads of all replicas.

All places compute the same results; `streaming.Streaming` defines lines 7 to 12.
"""

import dataclasses
import functools
import operator
import time
from collections.abc import Callable
from concurrent import futures
from typing import TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.algorithm.state import InFlight, OuterState
from diloco.algorithm.sync_metrics import Metrics
from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.mesh.modes import plain_modes
from diloco.util.types import PyTree

Result = TypeVar("Result")
# Called with theta, opt_state, one more tree; returns new theta, opt_state, metrics.
Update: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, Metrics]]
# Called with theta on devices, codec_state; returns payload, codec_state, metrics.
Encode: TypeAlias = Callable[[PyTree, PyTree], tuple[jax.Array, PyTree, Metrics]]
Updated: TypeAlias = tuple[OuterState, PyTree, Metrics]
# All methods of a process share this thread, so their exchanges run in the order of the
# sends. Gloo pairs the exchanges of two processes by their order alone.
_EXCHANGES = futures.ThreadPoolExecutor(1, "exchange")


@dataclasses.dataclass(frozen=True)
class OnDevices:
  """The outer state lives on the devices, and is updated there.

  Attributes:
    devices: the replica x fsdp mesh.
  """

  devices: Mesh

  @property
  def mesh(self) -> Mesh:
    """The mesh on which `update` runs."""
    return self.devices

  def send(
    self, encode: Encode, update: Update, p: int, state: OuterState
  ) -> tuple[OuterState, Metrics]:
    """Lines 7 and 8: sends fragment p; returns the state with p in flight.

    Args:
      encode: lines 7 and 8.
      update: lines 10 and 11, which a thread may begin as soon as p is sent.
    """
    theta, _, codec_state = state.fragment(p)
    payload, codec_state, sent = encode(self.fetch(theta), codec_state)
    return state.after_send(p, codec_state, payload), sent

  def receive(self, update: Update, p: int, state: OuterState) -> Updated:
    """Lines 10 and 11 for fragment p in flight; theta and opt_state are donated.

    Returns:
      The new state, the fragment's new theta on `mesh`, metrics float32 [].
    """
    return self.update(update, p, state, state.in_flight[p])

  def update(self, line: Update, p: int, state: OuterState, given: PyTree) -> Updated:
    """Updates fragment p by a function, such as lines 10 and 11, on `mesh`.

    Args:
      line: the function, called with theta, opt_state and `given`.
      given: a payload in flight, or arrays on the devices.
    """
    theta, opt_state, metrics = line(*state.fragment(p)[:2], given)
    return state.after_update(p, theta, opt_state), theta, metrics

  def shardings(self, places: PyTree) -> PyTree:
    """Turns the outer state's shardings on the devices into those of this place."""
    return places

  def keep(self, tree: PyTree) -> PyTree:
    """Copies outer state from the devices or from `mesh` to this place."""
    return tree

  def fetch(self, theta: PyTree) -> PyTree:
    """Copies outer parameters from this place or from `mesh` to the devices."""
    return theta

  def settle(self) -> None:
    """Waits until no thread of this process exchanges payloads."""


@dataclasses.dataclass(frozen=True)
class Offloaded(OnDevices):
  """The outer state lives in pinned memory, and is updated on the devices.

  Raises:
    ConfigError: the hosts have no pinned memory.
  """

  def __post_init__(self) -> None:
    device = self.devices.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
      raise ConfigError(
        f"outer.offload needs memory of kind pinned_host, but {device.device_kind} has"
        f" {', '.join(kinds) or 'none'}; unset it or set overlap.transport=host."
      )

  def send(
    self, encode: Encode, update: Update, p: int, state: OuterState
  ) -> tuple[OuterState, Metrics]:
    return super().send(encode, update, p, _moved(state, p, "device"))

  def update(self, line: Update, p: int, state: OuterState, given: PyTree) -> Updated:
    state = _moved(state, p, "device")  # Copies nothing if `send` has put p there.
    state, theta, metrics = super().update(line, p, state, given)
    return _moved(state, p, "pinned_host"), theta, metrics

  def shardings(self, places: PyTree) -> PyTree:
    return jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), places)

  def keep(self, tree: PyTree) -> PyTree:
    return _in_memory(tree, "pinned_host")

  def fetch(self, theta: PyTree) -> PyTree:
    return _in_memory(theta, "device")


class Jobs:
  """Runs one job, such as lines 10 and 11, for each exchange in flight.

  In the foreground, a job runs when its fragment arrives. In the background, a thread
  runs the jobs in the order of the sends while the devices train.

  Only the state says which fragments are in flight. The result of a job is used only if
  the job began with exactly the arrays that the state has when the fragment arrives.

  Args:
    thread: runs the jobs in the background; None: they run in the foreground.
  """

  def __init__(self, thread: futures.ThreadPoolExecutor | None):
    self._thread = thread
    # {p: (arguments, result) of the newest job}
    self._jobs: dict[int, tuple[PyTree, futures.Future[PyTree]]] = {}
    self.waited_s = 0.0  # Seconds that the last `finish` waited.

  def start(self, p: int, job: Callable[..., PyTree], *args: PyTree) -> None:
    """Starts `job(*args)` in the thread; does nothing in the foreground.

    Args:
      p: number of the fragment or round; `finish` gets the same number.
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
      # The run resumed, or went back to an earlier state. The thread first runs the old
      # job to its end, so all processes exchange in the same order.
      self.start(p, job, *args)
    began = time.perf_counter()
    result = self._jobs.pop(p)[1].result()
    self.waited_s = time.perf_counter() - began
    return result

  def close(self) -> None:
    """Drops the jobs that have not begun; waits for no job."""
    if self._thread:
      self._thread.shutdown(wait=False, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class OnHosts(OnDevices):
  """The outer state lives on the hosts, and a thread updates it there.

  Attributes:
    hosts: a mesh with one CPU of each process.
  """

  hosts: Mesh
  _jobs: Jobs = dataclasses.field(default_factory=lambda: Jobs(_EXCHANGES))

  @property
  def mesh(self) -> Mesh:
    return self.hosts

  def send(
    self, encode: Encode, update: Update, p: int, state: OuterState
  ) -> tuple[OuterState, Metrics]:
    state, sent = super().send(encode, update, p, state)
    theta, opt_state, _ = state.fragment(p)
    job = functools.partial(self._update, update)
    self._jobs.start(p, job, theta, opt_state, state.in_flight[p])
    return state, sent

  def receive(self, update: Update, p: int, state: OuterState) -> Updated:
    theta, opt_state, _ = state.fragment(p)
    job = functools.partial(self._update, update)
    theta, opt_state, metrics = self._jobs.finish(
      p, job, theta, opt_state, state.in_flight[p]
    )
    metrics |= {"waited_s": np.float32(self._jobs.waited_s)}
    return state.after_update(p, theta, opt_state), theta, metrics

  def update(self, line: Update, p: int, state: OuterState, given: PyTree) -> Updated:
    with jax.set_mesh(self.hosts):
      return super().update(line, p, state, self.keep(given))

  def shardings(self, places: PyTree) -> PyTree:
    return jax.tree.map(lambda _: NamedSharding(self.hosts, P()), places)

  def keep(self, tree: PyTree) -> PyTree:
    here = NamedSharding(self.hosts, P())
    put = lambda x: sharding.place(sharding.local_parts(x), here)
    return jax.tree.map(lambda x: x if x.sharding == here else put(x), tree)

  def fetch(self, theta: PyTree) -> PyTree:
    there = sharding.shardings(theta, self.devices)
    copy = lambda x, at: sharding.place(np.asarray(x.addressable_data(0)), at)
    return jax.tree.map(copy, theta, there)

  def settle(self) -> None:
    # Otherwise two threads could start collectives, in another order on each process.
    _EXCHANGES.submit(int).result()  # Runs after all earlier jobs.

  def _update(
    self, update: Update, theta: PyTree, opt_state: PyTree, flying: InFlight
  ) -> tuple[PyTree, PyTree, Metrics]:
    with jax.set_mesh(self.hosts):
      return update(theta, opt_state, flying)


def make_place(mesh: Mesh, hosts: Mesh | None, offload: bool) -> OnDevices:
  """Makes the place of the outer state.

  Args:
    mesh: the replica x fsdp mesh.
    hosts: a mesh with one CPU of each process if hosts keep the outer state, else None.
    offload: whether the outer state lives in pinned memory; ignored if hosts keep it.

  Raises:
    ConfigError: the hosts have no pinned memory.
  """
  if hosts is not None:
    return OnHosts(mesh, hosts)
  return Offloaded(mesh) if offload else OnDevices(mesh)


def _are_same(a: PyTree, b: PyTree) -> bool:
  """Returns whether two trees hold the same array objects, not only equal values."""
  x, y = jax.tree.leaves(a), jax.tree.leaves(b)
  return len(x) == len(y) and all(map(operator.is_, x, y))


def _moved(state: OuterState, p: int, kind: str) -> OuterState:
  """Returns the state with fragment p in another memory of the devices."""
  theta, opt_state, _ = state.fragment(p)
  return state.with_fragment(p, *_in_memory((theta, opt_state), kind))


def _in_memory(tree: PyTree, kind: str) -> PyTree:
  """Copies every shard to another memory of its device."""
  return jax.tree.map(
    lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), tree
  )
