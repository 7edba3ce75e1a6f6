"""How payloads travel. A transport carries, and does nothing else.

`device`: between the devices. Each group of replicas sends its payload to every other
group, by one permutation per distance: the bytes of an all-gather. XLA for TPUs runs
permutations beside other work, but not the all-gather of one slice. `carry` only
launches it; `diloco.algorithm.overlap` runs `start` and `finish` beside inner steps.

`host`: payloads are copied to the hosts, which exchange them over TCP. `carry` waits,
so it runs in a thread. For slow links between sites.

Payloads are uint8 [M, fsdp, bytes], see `diloco.wire.exchange`.
"""

import functools
from collections.abc import Iterable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.config import Config, ConfigError
from diloco.model import sharding
from diloco.model.sharding import FSDP, REPLICA
from diloco.wire import exchange


class ExchangeFailed(RuntimeError):
  """A payload could not be exchanged: another process is probably gone."""


class Transport(Protocol):
  """Carries payloads.

  Attributes:
    hides: whether an exchange is hidden only inside a program of inner steps.
  """

  hides: bool

  def connect(self) -> None:
    """Opens what an exchange needs; called when all processes are there.

    Gloo fails if a process comes 30 s late to its first exchange, which replicas may do
    after H steps. To later exchanges it may come at any time.
    """

  def carry(self, payload: jax.Array) -> jax.Array:
    """Everyone's payloads, from the payloads of this process's replicas.

    Args:
      payload: as `exchange.encoded`.

    Raises:
      ExchangeFailed: another process is probably gone.
    """


def make_transport(c: Config, mesh: Mesh) -> Transport:
  """The transport of a config.

  Raises:
    ConfigError: overlap.transport is host, and a replica's devices belong to several
      processes, or JAX may not use CPUs.
  """
  if c.overlap.transport == "host":
    return HostTransport(mesh)
  return DeviceTransport(mesh, packed=c.wire.exchange == "gather")


class DeviceTransport:
  """Payloads from device to device; with one group of replicas they stay."""

  def __init__(self, mesh: Mesh, packed: bool = True):
    self._mesh = mesh
    self.hides = packed and mesh.shape[REPLICA] > 1

  def connect(self) -> None:
    if self.hides and jax.process_count() > 1:
      jax.block_until_ready(self.carry(_one_byte(self._mesh)))

  def carry(self, payload: jax.Array) -> jax.Array:
    there = exchange.transmitted(self._mesh)
    if not self.hides or payload.sharding.is_equivalent_to(there, payload.ndim):
      return payload
    return transmit(payload, mesh=self._mesh)


@functools.partial(jax.jit, static_argnames="mesh")
def transmit(payload: jax.Array, *, mesh: Mesh) -> jax.Array:
  """An exchange that no inner step hides."""
  return finish(mesh, payload, start(mesh, payload))


def start(mesh: Mesh, payload: jax.Array) -> tuple[jax.Array, ...]:
  """Sends an encoded payload to the groups of replicas at every distance.

  Args:
    mesh: the device mesh, with n groups along the replica axis.
    payload: as `exchange.encoded`.

  Returns:
    n - 1 arrays uint8 [payload.size], sharded like it: on group i, array s holds the
    payload of group i - s - 1 modulo n. They are flat, since a TPU pads rows of bytes
    to four rows, and would send four times as much.
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
    payload: what `start` was given.
    received: what `start` returned.

  Returns:
    uint8 [M, fsdp, bytes], as `exchange.transmitted`.
  """
  n = mesh.shape[REPLICA]

  def local(own, received):
    by_distance = jnp.stack([own, *(x.reshape(own.shape) for x in received)])
    order = (jax.lax.axis_index(REPLICA) - jnp.arange(n)) % n
    return by_distance[order].reshape(-1, *own.shape[1:])

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(_spec(mesh, payload, REPLICA), (_flat_spec(mesh, payload),) * (n - 1)),
    out_specs=_spec(mesh, payload, None),
    check_vma=False,
  )(payload, received)


class HostTransport:
  """Payloads from host to host, one exchange at a time in the order of the calls.

  Attributes:
    hosts: a mesh of one CPU device of every process, along the replica axis.
  """

  hides = False

  def __init__(self, mesh: Mesh):
    self._mesh = mesh
    self._rows = _rows_of_processes(mesh)
    firsts = {d.process_index: d for d in reversed(_cpus())}
    self.hosts = _column(firsts[p] for p in sorted(firsts))

  def connect(self) -> None:
    self.carry(_one_byte(self._mesh))

  def carry(self, payload: jax.Array) -> jax.Array:
    """Everyone's payloads, whole on every process's CPU device of `hosts`."""
    try:
      return self._gather(payload)
    except Exception as error:
      reason = str(error).strip().splitlines()[0] if str(error) else repr(error)
      raise ExchangeFailed(
        f"an exchange of payloads failed ({reason}); another process is probably gone,"
        " so start all again with the same command to go on from the last checkpoint."
      ) from error

  def _gather(self, payload: jax.Array) -> jax.Array:
    whole = NamedSharding(self.hosts, P())
    codes = np.zeros(payload.shape, np.uint8)
    for shard in payload.addressable_shards:
      codes[shard.index] = np.asarray(shard.data)
    if len(self._rows) > 1:
      # An all-gather: over TCP between two hosts Gloo takes 1.5 times as long as the
      # link needs for it, and twice as long for permutes, one direction at a time.
      groups = codes.reshape(self._mesh.shape[REPLICA], -1)
      mine = groups[self._rows[jax.process_index()]]
      by_process = NamedSharding(self.hosts, P(REPLICA))
      sent = jax.make_array_from_process_local_data(by_process, mine, groups.shape)
      with jax.set_mesh(self.hosts):
        found = np.asarray(_whole(sent, place=whole).addressable_data(0))
      codes = found[np.argsort(np.concatenate(self._rows))].reshape(payload.shape)
    return sharding.place(codes, whole)


@functools.partial(jax.jit, static_argnames="place")
def _whole(x: jax.Array, *, place: NamedSharding) -> jax.Array:
  return jax.lax.with_sharding_constraint(x, place)


def _one_byte(mesh: Mesh) -> jax.Array:
  """The smallest payload: of one replica per row of the mesh."""
  shape = (mesh.shape[REPLICA], mesh.shape[FSDP], 1)
  return sharding.place(np.zeros(shape, np.uint8), exchange.encoded(mesh))


def _spec(mesh: Mesh, payload: jax.Array, replica: str | None) -> P:
  """A payload of another fsdp axis is whole on every device of its replica."""
  own = payload.shape[1] == mesh.shape[FSDP]
  return P(replica, FSDP) if own else P(replica)


def _flat_spec(mesh: Mesh, payload: jax.Array) -> P:
  own = payload.shape[1] == mesh.shape[FSDP]
  return P((REPLICA, FSDP)) if own else P(REPLICA)


def _cpus() -> list[jax.Device]:
  try:
    return jax.devices("cpu")
  except RuntimeError as error:  # JAX_PLATFORMS leaves them out.
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    raise ConfigError(
      "overlap.transport is host, which computes outer steps on CPUs, but"
      f" JAX_PLATFORMS is {platforms!r}; set it to '{platforms},cpu', or choose device."
    ) from error


def _column(devices: Iterable[jax.Device]) -> Mesh:
  """A mesh of one device per coordinate of the replica axis."""
  grid = np.asarray(list(devices), dtype=object).reshape(-1, 1)
  return Mesh(grid, (REPLICA, FSDP), axis_types=sharding.AXIS_TYPES)


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
