"""Transports, which carry payloads between replicas and do nothing else.

`device`: the devices exchange payloads. Each group of replicas sends its payload to
every other group: one permutation for each shift of the groups. The permutations send
as many bytes as an all-gather would. XLA for TPU overlaps permutations with other work,
but it does not overlap an all-gather inside one slice.
On GPUs one all-gather sends all payloads: NCCL may deadlock if several permutations of
the same devices run at the same time.
`behind` runs inner steps between `start` and `finish` of an exchange.

`host`: the hosts copy payloads from their devices and exchange them over TCP. `carry`
waits for the exchange, so a thread calls `carry`. This transport is for slow links.

A payload is uint8 [M, fsdp, bytes], see `diloco.wire.exchange`.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.errors import ConfigError, TryAgain
from diloco.mesh import sharding
from diloco.mesh.sharding import FSDP, REPLICA
from diloco.spec import plugins
from diloco.util.types import PyTree
from diloco.wire import exchange

# Platforms where XLA runs an exchange beside inner steps. On CPUs it runs one after the
# other, and a program with both would only take longer to compile.
OVERLAPPING = {"gpu", "tpu"}
# XLA for GPU runs one collective at a time on each stream. On the stream that fsdp's
# collectives use, the exchange would wait until the inner steps end.
_OWN_STREAM = {"_xla_gpu_collective_stream": "p2p"}


class ExchangeFailed(TryAgain):
  """An exchange of payloads failed: another process is probably gone."""


def make_transport(kind: str, mesh: Mesh, packed: bool = True) -> "Transport":
  """Makes a transport.

  Args:
    kind: overlap.transport, a name in `plugins.NAMES`.
    packed: whether devices exchange packed codes (wire.exchange=gather).

  Raises:
    ConfigError: overlap.transport is host, but the processes do not hold the same
      number of whole rows of the mesh, or JAX may not use CPUs.
  """
  at_hosts = plugins.transport(kind).at_hosts
  return HostTransport(mesh) if at_hosts else DeviceTransport(mesh, packed)


class DeviceTransport:
  """Carries payloads between devices; with one group of replicas, nothing moves.

  Attributes:
    moves: whether payloads cross devices.
    overlaps: whether an exchange must share a program with inner steps to overlap them.
      If so, `behind` calls `start` and `finish` below. Always False for hosts.
    waits: whether launches wait for earlier ones. With dozens of launches at once,
      collectives between CPU devices may wait for each other forever: in a final sync
      of many fragments, or if a loop fetches no loss.
    hosts: a mesh with one CPU of each process if hosts carry payloads and keep the
      outer state; None if devices do so.
  """

  hosts = None

  def __init__(self, mesh: Mesh, packed: bool = True):
    self._mesh = mesh
    self.moves = packed and mesh.shape[REPLICA] > 1
    overlapping = mesh.devices.flat[0].platform in OVERLAPPING
    self.overlaps = self.moves and overlapping
    self.waits = mesh.devices.size > 1 and not overlapping

  def connect(self) -> None:
    """Opens the connections; all processes call this at the start of a run.

    Gloo fails if a process is 30 s late to the first exchange, as may happen after H
    inner steps. Later exchanges have no such limit.
    """
    if self.moves and jax.process_count() > 1:
      jax.block_until_ready(self.carry(_one_byte(self._mesh)))

  def carry(self, payload: jax.Array) -> jax.Array:
    """Sends the payloads of this process's replicas; returns those of all replicas.

    Args:
      payload: sharded as `exchange.encoded` says.

    Raises:
      ExchangeFailed: another process is probably gone.
    """
    if self.waits:
      jax.block_until_ready(payload)
    return transmit(payload, mesh=self._mesh) if self.moves else payload


@functools.partial(jax.jit, static_argnames="mesh")
def transmit(payload: jax.Array, *, mesh: Mesh) -> jax.Array:
  """Exchanges a payload in a separate program; no inner step overlaps it."""
  return finish(mesh, [payload], start(mesh, [payload]))[0]


def behind(
  mesh: Mesh, payloads: list[jax.Array], steps: Callable[[], PyTree]
) -> tuple[PyTree, list[jax.Array]]:
  """Runs inner steps while payloads are exchanged; to be called inside jit.

  Args:
    mesh: the device mesh.
    payloads: uint8 [M, fsdp, bytes], sent before the first step.
    steps: runs a loop of inner steps; their number is an argument of the program. If
      XLA knew that this number is 1, XLA would unroll the loop and begin the exchange
      only after the layers of the step.

  Returns:
    The result of `steps`, and the payloads of all replicas.
  """
  with jax.named_scope("exchange_start"):
    received = start(mesh, payloads)
  with jax.named_scope("inner_steps"):
    done = steps()
  # Without this barrier, XLA may wait for the exchange before it runs the steps.
  done, received = jax.lax.optimization_barrier((done, received))
  with jax.named_scope("exchange_finish"):
    return done, finish(mesh, payloads, received)


def start(mesh: Mesh, payloads: list[jax.Array]) -> tuple[jax.Array, ...]:
  """Sends the payloads of each group of replicas to all other groups, as one message.

  Args:
    mesh: the device mesh, with n groups along the replica axis.
    payloads: sharded as `exchange.encoded` says; at least one.

  Returns:
    Arrays uint8 [bytes] on each device. For GPUs, one array holds all payloads.
    Otherwise, array s - 1 holds the payloads that permutation s of `_sources` brings.
    The arrays are flat: a TPU would pad a row of bytes to four rows and send four times
    as much.
  """
  places, sources = [_spec(mesh, x, REPLICA) for x in payloads], _sources(mesh)

  def local(own: list[jax.Array]) -> tuple[jax.Array, ...]:
    flat = jnp.concatenate([x.reshape(-1) for x in own])
    if gathers(mesh):
      with set_xla_metadata(**_OWN_STREAM):
        return (jax.lax.all_gather(flat, REPLICA, tiled=True),)
    pairs = [[(g, i) for i, g in enumerate(row)] for row in sources[1:].tolist()]
    return tuple(jax.lax.ppermute(flat, REPLICA, to) for to in pairs)

  out = (P(sharding.BOTH),) * (1 if gathers(mesh) else len(sources) - 1)
  return jax.shard_map(local, mesh=mesh, in_specs=(places,), out_specs=out)(payloads)


def finish(
  mesh: Mesh, payloads: list[jax.Array], received: tuple[jax.Array, ...]
) -> list[jax.Array]:
  """Sorts the arrays of `start` by payload and replica; nothing is exchanged.

  Args:
    payloads: the argument of `start`.
    received: the result of `start`.

  Returns:
    For each payload, uint8 [M, fsdp, bytes], sharded as `exchange.transmitted` says.
  """
  order = np.argsort(_sources(mesh), axis=0)

  def local(own: list[jax.Array], received: tuple[jax.Array, ...]) -> list[jax.Array]:
    if gathers(mesh):
      by_group = received[0].reshape(mesh.shape[REPLICA], -1)
    else:
      arrived = jnp.stack([jnp.concatenate([x.reshape(-1) for x in own]), *received])
      by_group = arrived[jnp.asarray(order)[:, jax.lax.axis_index(REPLICA)]]
    cuts = np.cumsum([x.size for x in own])[:-1]
    parts = jnp.split(by_group, cuts, axis=1)
    return [part.reshape(-1, *x.shape[1:]) for x, part in zip(own, parts)]

  sent = [_spec(mesh, x, REPLICA) for x in payloads]
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(sent, (P(sharding.BOTH),) * len(received)),
    out_specs=[_spec(mesh, x, None) for x in payloads],
    check_vma=False,
  )(payloads, received)


def gathers(mesh: Mesh) -> bool:
  """Returns whether one all-gather carries the payloads, as on GPUs."""
  return mesh.devices.flat[0].platform == "gpu"


def _sources(mesh: Mesh) -> np.ndarray:
  """Lists permutations that bring the payloads of n groups of replicas to all groups.

  A permutation shifts the groups by a number of slices and by a number of groups inside
  each slice. So in a permutation either all pairs cross slices or none do. If only some
  pairs crossed, XLA for TPU would split the permutation and overlap only a part of it.

  Returns:
    ints x [n, n]: in permutation s, group i gets the payload of group x[s, i].
    Permutation 0 moves nothing.
  """
  n, slices = mesh.shape[REPLICA], sharding.num_slices(mesh)
  shape = (slices, n // slices) if n % slices == 0 else (1, n)
  groups = np.arange(n).reshape(shape)
  shifts = np.ndindex(shape)
  return np.stack([np.roll(groups, shift, (0, 1)).ravel() for shift in shifts])


class HostTransport:
  """Carries payloads between hosts, one exchange at a time, in order of the calls.

  See `DeviceTransport`, which has the same methods.
  """

  moves = overlaps = waits = False

  def __init__(self, mesh: Mesh):
    self._mesh = mesh
    self._rows = _rows_of_processes(mesh)
    firsts = {d.process_index: d for d in reversed(_cpus())}
    grid = np.asarray([[firsts[p]] for p in sorted(firsts)], dtype=object)
    self.hosts = sharding.mesh_of(grid)

  def connect(self) -> None:
    self.carry(_one_byte(self._mesh))

  def carry(self, payload: jax.Array) -> jax.Array:
    """See `DeviceTransport.carry`; here each device of `hosts` gets all payloads."""
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
      # Over TCP, Gloo's all-gather takes 1.5 times as long as the bytes need on the
      # link. Permutations would take 2 times as long, because Gloo sends in one
      # direction at a time.
      groups = codes.reshape(self._mesh.shape[REPLICA], -1)
      mine = groups[self._rows[jax.process_index()]]
      by_process = NamedSharding(self.hosts, P(REPLICA))
      sent = jax.make_array_from_process_local_data(by_process, mine, groups.shape)
      with jax.set_mesh(self.hosts):
        gathered = np.asarray(_whole(sent, place=whole).addressable_data(0))
      codes = gathered[np.argsort(np.concatenate(self._rows))].reshape(payload.shape)
    return sharding.place(codes, whole)


Transport: TypeAlias = DeviceTransport | HostTransport


@functools.partial(jax.jit, static_argnames="place")
def _whole(x: jax.Array, *, place: NamedSharding) -> jax.Array:
  return jax.lax.with_sharding_constraint(x, place)


def _one_byte(mesh: Mesh) -> jax.Array:
  """Makes a payload of one byte per device; its exchange opens the connections."""
  shape = (mesh.shape[REPLICA], mesh.shape[FSDP], 1)
  return sharding.place(np.zeros(shape, np.uint8), exchange.encoded(mesh))


def _spec(mesh: Mesh, payload: jax.Array, replica: str | None) -> P:
  """Returns the partition spec of a payload.

  If a mesh with an fsdp axis of another size encoded the payload, each device holds
  all fsdp shards.
  """
  same_fsdp = payload.shape[1] == mesh.shape[FSDP]
  return P(replica, FSDP) if same_fsdp else P(replica)


def _cpus() -> list[jax.Device]:
  try:
    return jax.devices("cpu")
  except RuntimeError as error:  # JAX_PLATFORMS has no cpu.
    # `ignore` is for jax 0.10; jax 0.12 shows its options to type checkers.
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined, unused-ignore]
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
