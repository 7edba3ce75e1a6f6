"""How payloads get from send to update, and where the outer state lives meanwhile.

`device`: outer state and exchange are the devices'. The exchange is part of the
program that runs the inner steps after the send (`diloco.sync.make_hidden_exchange`).
XLA runs it beside them on TPUs and GPUs, not on CPUs.

`host`: outer parameters and momentum live in the hosts' memory. Packed codes are
copied there, and a background thread exchanges them over TCP, decodes them and steps
the outer optimizer, while the devices train. For links between sites.

Both compute the same, and a fragment is merged at the step that the schedule says: if
an exchange is late, training waits.
"""

import time
from concurrent import futures
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.config import ConfigError
from diloco.model import sharding as mesh_lib
from diloco.model.sharding import FSDP, REPLICA
from diloco.wire import exchange

Tree = Any


class ExchangeFailed(RuntimeError):
  """A payload could not be exchanged: another process is probably gone."""


class Transport(Protocol):
  """What the outer step asks of a transport.

  theta and opt_state are the outer parameters and outer optimizer state of one
  fragment, float32 leaves (n, ...) under `blocks` and without n under `embed`. A
  payload is uint8 [M, fsdp, bytes].

  Attributes:
    mesh: the device mesh.
    encoded: where payloads lie once encoded.
    update: jitted update of a transmitted payload, see `diloco.outer.make_update`.
  """

  mesh: Mesh
  encoded: NamedSharding
  update: Any

  def connect(self) -> None:
    """Opens what an exchange needs; called where all processes are at once.

    Gloo gives up if a peer comes to their first exchange 30 s later, which replicas
    may well do after H steps; to later ones it may come as late as it likes.
    """
    ...

  def hides(self) -> bool:
    """Whether an exchange has to be part of a program of inner steps to be hidden."""
    ...

  def keep(self, tree: Tree) -> Tree:
    """theta and opt_state, or one of them, from the devices to where they live."""
    ...

  def fetch(self, theta: Tree) -> Tree:
    """theta from where it lives to the devices, sharded as on them."""
    ...

  def start(
    self, p: int, payload: jax.Array, fetched: Tree, theta: Tree, opt_state: Tree
  ) -> None:
    """Begins to exchange fragment p's payload, which was just encoded.

    Args:
      p: the fragment.
      payload: as `encoded`.
      fetched: its theta on the devices, from `fetch`.
      theta: the same where it lives.
      opt_state: where it lives.
    """
    ...

  def finish(
    self, p: int, payload: jax.Array, theta: Tree, opt_state: Tree
  ) -> tuple[Tree, Tree, Tree, dict[str, jax.Array]]:
    """Awaits fragment p's exchange and updates its outer state.

    Args:
      p: the fragment.
      payload: as `encoded` or, exchanged beside inner steps, as transmitted.
      theta: where it lives.
      opt_state: where it lives.

    Returns:
      (theta, opt_state, theta on the devices, metrics): the first two where they live.

    Raises:
      ExchangeFailed: another process is probably gone.
    """
    ...

  def settle(self) -> None:
    """Waits until nothing is exchanged in the background."""
    ...

  def publish(self, tree: Tree) -> Tree:
    """Outer state of all fragments as arrays that all processes can save together."""
    ...

  def published(self, tree: Tree) -> Tree:
    """Shapes of what `publish` returns, of outer state as it lies on the devices."""
    ...

  def adopt(self, tree: Tree) -> Tree:
    """The inverse of `publish`."""
    ...

  def close(self) -> None:
    """Ends what runs in the background, without waiting for it."""
    ...


def make_transport(c, mesh: Mesh, make_update) -> Transport:
  """The transport of a resolved config.

  Args:
    c: resolved config.
    mesh: the device mesh.
    make_update: function from a mesh to the update that runs on it, see
      `diloco.outer.make_update`.

  Raises:
    ConfigError: a replica's devices belong to several processes or JAX may not use
      CPUs (host), or the devices' hosts have no pinned memory (outer.offload).
  """
  if c.overlap.transport == "host":
    return HostTransport(mesh, make_update)
  return DeviceTransport(mesh, make_update, c.wire.exchange, c.outer.offload)


class DeviceTransport:
  """Payloads from device to device, outer state there or, offloaded, at their hosts.

  Offloaded outer state lies in the pinned memory of each device's host, sharded as on
  the devices. A fragment is copied to the devices when it is sent, beside the inner
  steps that follow, and back once it is updated.

  Attributes:
    transmitted: where payloads lie once transmitted.
    transmit: jitted exchange by itself, for what no inner step can hide.
    update: donates theta and opt_state.
  """

  def __init__(self, mesh: Mesh, make_update, exchange_name: str, offload: bool):
    if offload:
      _check_pinned(mesh)
    self.mesh, self._offload = mesh, offload
    self._fetched: dict[int, tuple[Tree, Tree]] = {}
    self.encoded = exchange.encoded(mesh)
    self.transmitted = exchange.transmitted(mesh, exchange_name)
    self.transmit = jax.jit(lambda x: exchange.finish(mesh, x, exchange.start(mesh, x)))
    self.update = jax.jit(make_update(mesh), donate_argnums=(0, 1))

  def connect(self) -> None:
    if self.hides() and jax.process_count() > 1:
      jax.block_until_ready(self.transmit(_one_byte(self.mesh, self.encoded)))

  def hides(self) -> bool:
    return not self.encoded.is_equivalent_to(self.transmitted, 3)

  def keep(self, tree: Tree) -> Tree:
    return _in_memory(tree, "pinned_host") if self._offload else tree

  def fetch(self, theta: Tree) -> Tree:
    return _in_memory(theta, "device") if self._offload else theta

  def start(
    self, p: int, payload: jax.Array, fetched: Tree, theta: Tree, opt_state: Tree
  ) -> None:
    if self._offload:  # Copied while the devices go on with inner steps.
      self._fetched[p] = fetched, self.fetch(opt_state)

  def finish(self, p: int, payload: jax.Array, theta: Tree, opt_state: Tree):
    if not payload.sharding.is_equivalent_to(self.transmitted, payload.ndim):
      payload = self.transmit(payload)
    if self._offload:
      ahead = self._fetched.pop(p, None)  # None if sent before this process resumed.
      theta, opt_state = ahead or self.fetch((theta, opt_state))
    on_devices, opt_state, metrics = self.update(theta, opt_state, payload)
    return self.keep(on_devices), self.keep(opt_state), on_devices, metrics

  def settle(self) -> None:
    pass  # Programs of the devices run in the order of their launches.

  def publish(self, tree: Tree) -> Tree:
    return tree

  def published(self, tree: Tree) -> Tree:
    if not self._offload:
      return tree
    return jax.tree.map(
      lambda x: _shape(x, x.sharding.with_memory_kind("pinned_host")), tree
    )

  def adopt(self, tree: Tree) -> Tree:
    return tree

  def close(self) -> None:
    pass


class HostTransport:
  """Outer state in the hosts' memory, payloads from host to host.

  Every process keeps the whole outer state and updates it by itself, from the
  payloads of all; there is one exchange at a time, in the order of the sends.
  """

  def __init__(self, mesh: Mesh, make_update):
    self.mesh = mesh
    self.encoded = exchange.encoded(mesh)
    self._rows = _rows_of_processes(mesh)
    # The first CPU device of every process; of this process, a mesh by itself.
    firsts = {d.process_index: d for d in reversed(_cpus())}
    self._hosts = _column(firsts[p] for p in sorted(firsts))
    self._host = _column([firsts[jax.process_index()]])
    # An all-gather: over TCP between two hosts Gloo takes 1.5 times as long as the
    # link needs, and twice as long for permutes, which it does one way at a time.
    self._transmit = jax.jit(lambda x: x, out_shardings=NamedSharding(self._hosts, P()))
    # Nothing is donated: until a fragment arrives its old state can be asked for.
    self.update = jax.jit(make_update(self._host))
    self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="exchange")
    self._jobs: dict[int, futures.Future] = {}

  def connect(self) -> None:
    one_byte = _one_byte(self.mesh, self.encoded)
    self._thread.submit(self._transmit_codes, one_byte).result()

  def hides(self) -> bool:
    return False

  def keep(self, tree: Tree) -> Tree:
    return jax.device_put(
      jax.tree.map(_whole_copy, tree), NamedSharding(self._host, P())
    )

  def fetch(self, theta: Tree) -> Tree:
    return jax.tree.map(
      lambda x, place: mesh_lib.place(np.asarray(x), place),
      theta,
      mesh_lib.shardings(theta, self.mesh),
    )

  def start(
    self, p: int, payload: jax.Array, fetched: Tree, theta: Tree, opt_state: Tree
  ) -> None:
    del fetched
    self._start(p, payload, theta, opt_state)

  def _start(self, p: int, payload: jax.Array, theta: Tree, opt_state: Tree) -> None:
    for shard in payload.addressable_shards:
      shard.data.copy_to_host_async()
    self._jobs[p] = self._thread.submit(self._exchange, payload, theta, opt_state)

  def finish(self, p: int, payload: jax.Array, theta: Tree, opt_state: Tree):
    if p not in self._jobs:  # Sent before this process resumed.
      self._start(p, payload, theta, opt_state)
    began = time.perf_counter()
    try:
      theta, opt_state, metrics = self._jobs.pop(p).result()
    except Exception as error:
      reason = str(error).strip().splitlines()[0] if str(error) else repr(error)
      raise ExchangeFailed(
        f"the exchange of fragment {p} failed ({reason}); another process is probably"
        " gone, so start all again with the same command to go on from the last"
        " checkpoint."
      ) from error
    waited = np.float32(time.perf_counter() - began)
    metrics["waited_s"] = jax.device_put(waited, NamedSharding(self._host, P()))
    return theta, opt_state, self.fetch(theta), metrics

  def settle(self) -> None:
    # Two threads that start collectives between the same processes could start them
    # in another order on each.
    futures.wait(self._jobs.values())

  def close(self) -> None:
    self._thread.shutdown(wait=False, cancel_futures=True)

  def publish(self, tree: Tree) -> Tree:
    return _whole_on(self._hosts, tree)

  def published(self, tree: Tree) -> Tree:
    whole = NamedSharding(self._hosts, P())
    return jax.tree.map(lambda x: _shape(x, whole), tree)

  def adopt(self, tree: Tree) -> Tree:
    return _whole_on(self._host, tree)

  def _exchange(self, payload: jax.Array, theta: Tree, opt_state: Tree):
    """What the background thread does for one fragment."""
    codes = self._transmit_codes(payload)
    with jax.set_mesh(self._host):
      codes = jax.device_put(codes, NamedSharding(self._host, P()))
      return jax.block_until_ready(self.update(theta, opt_state, codes))

  def _transmit_codes(self, payload: jax.Array) -> np.ndarray:
    """The payloads of all replicas, uint8 [M, fsdp, bytes], in host memory."""
    own = self._rows[jax.process_index()]
    codes = np.zeros(payload.shape, np.uint8)
    for shard in payload.addressable_shards:
      codes[shard.index] = np.asarray(shard.data)
    if len(self._rows) == 1:
      return codes
    with jax.set_mesh(self._hosts):
      rows = len(codes) // self.mesh.shape[REPLICA]
      mine = np.concatenate([codes[r * rows : (r + 1) * rows] for r in own])
      sharding = NamedSharding(self._hosts, P(REPLICA))
      sent = jax.make_array_from_process_local_data(sharding, mine, payload.shape)
      found = np.asarray(self._transmit(sent).addressable_data(0))
      order = np.concatenate(self._rows)
      found = found.reshape(len(order), rows, *found.shape[1:])
      return found[np.argsort(order)].reshape(payload.shape)


def _one_byte(mesh: Mesh, place: NamedSharding) -> jax.Array:
  """The smallest payload: of one replica per row of the mesh."""
  shape = (mesh.shape[REPLICA], mesh.shape[FSDP], 1)
  return mesh_lib.place(np.zeros(shape, np.uint8), place)


def _in_memory(tree: Tree, kind: str) -> Tree:
  """Arrays with the same shards in another memory of their devices."""
  return jax.tree.map(
    lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), tree
  )


def _shape(x, sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _check_pinned(mesh: Mesh) -> None:
  device = mesh.devices.flat[0]
  kinds = _memory_kinds(device)
  if "pinned_host" not in kinds:
    raise ConfigError(
      f"outer.offload needs memory of kind pinned_host, but {device.device_kind} has"
      f" {', '.join(kinds) or 'none'}; leave it off, or set overlap.transport=host."
    )


def _memory_kinds(device) -> list[str]:
  return [memory.kind for memory in device.addressable_memories()]


def _cpus() -> list[jax.Device]:
  try:
    return jax.devices("cpu")
  except RuntimeError as error:  # JAX_PLATFORMS leaves them out.
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    raise ConfigError(
      "overlap.transport is host, which computes outer steps on CPUs, but"
      f" JAX_PLATFORMS is {platforms!r}; set it to '{platforms},cpu', or choose device."
    ) from error


def _column(devices) -> Mesh:
  """A mesh of one device per replica group."""
  grid = np.asarray(list(devices), dtype=object).reshape(-1, 1)
  return Mesh(grid, (REPLICA, FSDP), axis_types=mesh_lib.AXIS_TYPES)


def _rows_of_processes(mesh: Mesh) -> list[list[int]]:
  """The groups of replicas (rows of the mesh) that each process holds."""
  rows: dict[int, list[int]] = {}
  for r, row in enumerate(mesh.devices):
    owners = sorted({d.process_index for d in row})
    if len(owners) > 1:
      raise ConfigError(
        f"overlap.transport is host, but the devices of mesh row {r} belong to the"
        f" processes {', '.join(map(str, owners))}; lower mesh.fsdp to the devices of"
        " one process, or choose device."
      )
    rows.setdefault(owners[0], []).append(r)
  held = [rows[p] for p in sorted(rows)]
  if len({len(r) for r in held}) > 1:
    raise ConfigError(
      "overlap.transport is host, but the processes hold different numbers of mesh"
      f" rows: {', '.join(str(len(r)) for r in held)}; choose mesh.replica so that"
      " they are equal, or choose device."
    )
  return held


def _whole_on(mesh: Mesh, tree: Tree) -> Tree:
  """Arrays that this process has whole, as whole on every device of a mesh."""
  whole = NamedSharding(mesh, P())
  return jax.tree.map(
    lambda x: jax.make_array_from_single_device_arrays(
      x.shape, whole, [x.addressable_data(0)]
    ),
    tree,
  )


def _whole_copy(x: jax.Array) -> np.ndarray:
  """An array of which this process's devices hold every part, in host memory."""
  whole = np.empty(x.shape, x.dtype)
  for shard in x.addressable_shards:
    whole[shard.index] = np.asarray(shard.data)
  return whole
