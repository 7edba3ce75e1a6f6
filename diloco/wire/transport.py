"""Carries payloads between replicas. A transport does nothing else.

`device`: the devices exchange payloads. Each group of replicas sends its payload to
every other group, in one permutation per distance; an all-gather sends as much. XLA
for TPU overlaps permutations with other work, but not the all-gather inside one slice.
`diloco.algorithm.overlap` runs inner steps between `start` and `finish`.

`host`: the hosts copy payloads from their devices and exchange them over TCP. `carry`
blocks, so a thread runs it. This is for slow links between sites.

A payload is uint8 [M, fsdp, bytes], see `diloco.wire.exchange`.
"""

import functools
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
  """An exchange of payloads failed: another process is probably gone."""


class Transport(Protocol):
  """Carries payloads.

  Attributes:
    hides: whether an exchange must share a program with inner steps to be hidden. Only
      for permutations on devices: `overlap` then calls `start` and `finish` below.
  """

  hides: bool

  @property
  def hosts(self) -> Mesh | None:
    """One CPU device per process if hosts carry payloads and keep the outer state."""

  def connect(self) -> None:
    """Opens the connections; all processes call this at the start of a run.

    Gloo fails if a process is 30 s late to the first exchange, as may happen after H
    inner steps. Later exchanges have no such limit.
    """

  def carry(self, payload: jax.Array) -> jax.Array:
    """Sends the payloads of this process's replicas; returns everyone's payloads.

    Args:
      payload: sharded as `exchange.encoded` says.

    Raises:
      ExchangeFailed: another process is probably gone.
    """


def make_transport(c: Config, mesh: Mesh) -> Transport:
  """Makes the transport of a config.

  Raises:
    ConfigError: overlap.transport is host, but the processes do not hold equally many
      whole rows of the mesh, or JAX may not use CPUs.
  """
  if c.overlap.transport == "host":
    return HostTransport(mesh)
  return DeviceTransport(mesh, packed=c.wire.exchange == "gather")


class DeviceTransport:
  """Carries payloads between devices. With one group of replicas, nothing moves."""

  hosts = None

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
  """Exchanges payloads in a separate program; no inner step hides the exchange."""
  return finish(mesh, payload, start(mesh, payload))


def start(mesh: Mesh, payload: jax.Array) -> tuple[jax.Array, ...]:
  """Sends the payload of each group of replicas to all other groups.

  Args:
    mesh: the device mesh, with n groups along the replica axis.
    payload: sharded as `exchange.encoded` says.

  Returns:
    n - 1 arrays uint8 [payload.size]. On group i, array s holds the payload of group
    i - s - 1 modulo n. The arrays are flat: a TPU would pad a row of bytes to four rows
    and send four times as much.
  """
  n, place = mesh.shape[REPLICA], _spec(mesh, payload, REPLICA)
  flat_places = (P(tuple(place)),) * (n - 1)

  def local(own):
    distances = ([(i, (i + s) % n) for i in range(n)] for s in range(1, n))
    flat = own.reshape(-1)
    return tuple(jax.lax.ppermute(flat, REPLICA, pairs) for pairs in distances)

  return jax.shard_map(local, mesh=mesh, in_specs=place, out_specs=flat_places)(payload)


def finish(
  mesh: Mesh, payload: jax.Array, received: tuple[jax.Array, ...]
) -> jax.Array:
  """Sorts the arrays of `start` by replica; nothing is exchanged.

  Args:
    payload: the argument of `start`.
    received: the result of `start`.

  Returns:
    uint8 [M, fsdp, bytes], sharded as `exchange.transmitted` says.
  """
  n, place = mesh.shape[REPLICA], _spec(mesh, payload, REPLICA)
  flat_places = (P(tuple(place)),) * (n - 1)

  def local(own, received):
    by_distance = jnp.stack([own, *(x.reshape(own.shape) for x in received)])
    order = (jax.lax.axis_index(REPLICA) - jnp.arange(n)) % n
    return by_distance[order].reshape(-1, *own.shape[1:])

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(place, flat_places),
    out_specs=_spec(mesh, payload, None),
    check_vma=False,
  )(payload, received)


class HostTransport:
  """Carries payloads between hosts, one exchange at a time, in order of the calls."""

  hides = False

  def __init__(self, mesh: Mesh):
    self._mesh = mesh
    self._rows = _rows_of_processes(mesh)
    firsts = {d.process_index: d for d in reversed(_cpus())}
    grid = np.asarray([[firsts[p]] for p in sorted(firsts)], dtype=object)
    self.hosts = Mesh(grid, (REPLICA, FSDP), axis_types=sharding.AXIS_TYPES)

  def connect(self) -> None:
    self.carry(_one_byte(self._mesh))

  def carry(self, payload: jax.Array) -> jax.Array:
    """Implements `Transport.carry`; every device of `hosts` gets all payloads."""
    try:
      return self._gather(payload)
    except Exception as error:
      reason = str(error).strip().splitlines()[0] if str(error) else repr(error)
      raise ExchangeFailed(
        f"an exchange of payloads failed ({reason}); another process is probably gone,"
        " so start all processes again; the same command continues the run."
      ) from error

  def _gather(self, payload: jax.Array) -> jax.Array:
    whole = NamedSharding(self.hosts, P())
    codes = sharding.local_parts(payload)
    if len(self._rows) > 1:
      # Over TCP, Gloo's all-gather takes 1.5 times the link's own time. Permutations
      # would take 2 times, because Gloo sends them in one direction at a time.
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
  """Makes a payload of one byte per device, which opens connections."""
  shape = (mesh.shape[REPLICA], mesh.shape[FSDP], 1)
  return sharding.place(np.zeros(shape, np.uint8), exchange.encoded(mesh))


def _spec(mesh: Mesh, payload: jax.Array, replica: str | None) -> P:
  """Returns a payload's spec; if its fsdp differs, devices hold all of its shards."""
  own = payload.shape[1] == mesh.shape[FSDP]
  return P(replica, FSDP) if own else P(replica)


def _cpus() -> list[jax.Device]:
  try:
    return jax.devices("cpu")
  except RuntimeError as error:  # JAX_PLATFORMS has no cpu.
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    raise ConfigError(
      "overlap.transport is host, which needs CPUs, but JAX_PLATFORMS is"
      f" {platforms!r}; set it to '{platforms},cpu', or choose device."
    ) from error


def _rows_of_processes(mesh: Mesh) -> list[list[int]]:
  """Lists the rows of the mesh (groups of replicas) that each process holds."""
  rows: dict[int, list[int]] = {}
  for r, row in enumerate(mesh.devices):
    owners = sorted({d.process_index for d in row})
    if len(owners) > 1:
      raise ConfigError(
        f"overlap.transport is host, but mesh row {r} has devices of the processes"
        f" {', '.join(map(str, owners))}; lower mesh.fsdp, or choose device."
      )
    rows.setdefault(owners[0], []).append(r)
  held = [rows[p] for p in sorted(rows)]
  if len({len(r) for r in held}) > 1:
    raise ConfigError(
      "overlap.transport is host, but the processes hold different numbers of mesh"
      f" rows: {', '.join(str(len(r)) for r in held)}; change mesh.replica, or choose"
      " device."
    )
  return held
