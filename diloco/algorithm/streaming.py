"""Streaming DiLoCo as one object: which fragments replicas exchange, when, and how.

The trainer (`method.py`) and the library (`diloco.streaming`) use this object.
Without fragments, as in data-parallel, nothing is ever sent or merged.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Wrapped

from diloco.algorithm import fused, optimizers, outer, slices
from diloco.algorithm.optimizers import Outer, OuterTuned
from diloco.algorithm.placement import OnDevices, OnHosts, make_place
from diloco.algorithm.state import Event, InFlight, OuterState, Parts
from diloco.algorithm.sync_metrics import Metrics
from diloco.config import Config
from diloco.mesh import sharding
from diloco.mesh.sharding import FSDP, REPLICA
from diloco.spec import shapes, sizes
from diloco.spec.fields import WireConfig
from diloco.spec.fragments import Fragment
from diloco.spec.plugins import OuterStep
from diloco.spec.schedule import Schedule
from diloco.spec.shapes import Shapes
from diloco.util.types import PyTree
from diloco.wire import exchange
from diloco.wire.transport import Transport, make_transport


class Step(Protocol):
  """A function that runs lines 6 to 12: `outer.outer_step`, or one of a plug-in."""

  def __call__(
    self,
    sync: "Streaming",
    t: int,
    params_M: PyTree,
    state: OuterState,
    last_send: int | None = None,
  ) -> tuple[PyTree, OuterState, list[Event]]: ...


@dataclasses.dataclass(frozen=True)
class Streaming:
  """Synchronises M replicas: lines 6 to 12 of Algorithm 2 (arXiv 2501.18512).

  Attributes:
    schedule: which fragments are sent and received after which step.
    fragments: the P fragments, in the order in which they are sent.
    layers: layer indices of each fragment, int32 (n,).
    parameters: shapes of one replica's parameters.
    shapes: parameter shapes of each fragment.
    wire: compressor and number format of payloads.
    outer: the outer optimizer.
    tuned: learning rate and momentum of the outer optimizer.
    alpha: weight of a replica's own parameters in a merge.
    seed: seed of the compressors' random numbers.
    mesh: the device mesh.
    place: where the outer state lives, and where and when it is updated.
    transport: carries the payloads between replicas.
    lines_7_8: `outer.send` or `fused.send`.
    lines_10_11: `outer.update` or `fused.update`, or its in-place form.
    outer_step: lines 6 to 12, and the steps that plug-ins add around these lines.
  """

  schedule: Schedule
  fragments: tuple[Fragment, ...]
  layers: tuple[np.ndarray, ...]
  parameters: Shapes
  shapes: tuple[Shapes, ...]
  wire: WireConfig
  outer: Outer
  tuned: OuterTuned
  alpha: float
  seed: int | jax.Array
  mesh: Mesh
  place: OnDevices
  transport: Transport
  lines_7_8: Wrapped
  lines_10_11: Wrapped
  outer_step: OuterStep

  @property
  def replicas(self) -> int:
    return len(self.schedule.taus)

  def init(self, params_M: PyTree) -> OuterState:
    """Makes the first outer state; its parameters are those of replica 0."""
    parts, own = list[Parts](), list[dict[str, PyTree]]()
    for p, layers in enumerate(self.layers):
      (theta, opt_state, codec_state), mine = self._init(p)(params_M, layers)
      parts.append((*self.place.keep((theta, opt_state)), codec_state))
      own.append(mine)
    return _outer_state(parts, {}, own)

  def abstract(
    self, params_M: PyTree, in_flight: Iterable[int] = (), fsdp: Mapping[int, int] = {}
  ) -> OuterState:
    """Describes shapes, dtypes and shardings of an outer state; computes nothing.

    Args:
      params_M: parameters of all replicas, or their shapes.
      in_flight: fragments whose payloads the state holds.
      fsdp: {p: size of the fsdp axis that encoded p}; default: this mesh's size.
    """
    parts, own = list[Parts](), list[dict[str, PyTree]]()
    for p, layers in enumerate(self.layers):
      state, mine = jax.eval_shape(self._init(p), params_M, layers)
      theta_at, opt_at, codec_at = _outer_shardings(state, self.outer, self.mesh)
      places = (*self.place.shardings((theta_at, opt_at)), codec_at)
      parts.append(sharding.structs(state, places))
      mine_at = _own_shardings(mine, state[0], self.replicas, self.mesh)
      own.append(sharding.structs(mine, mine_at))
    payload = lambda p: cast(jax.Array, self.payload(p, fsdp.get(p)))  # A shape.
    return _outer_state(parts, {p: InFlight(payload(p)) for p in in_flight}, own)

  def step(
    self, t: int, params_M: PyTree, state: OuterState, last_send: int | None = None
  ) -> tuple[PyTree, OuterState, list[Event]]:
    """Runs lines 6 to 12 after inner step t; see `outer.outer_step`."""
    return self.outer_step.run(self, t, params_M, state, last_send)

  def drain(
    self, last: int, params_M: PyTree, state: OuterState, final_sync: bool = False
  ) -> tuple[PyTree, OuterState, list[Event]]:
    """Receives the fragments in flight after the last step.

    With `final_sync`, synchronises all fragments once more after that.

    Raises:
      ExchangeFailed: another process is probably gone.
    """
    events, t = list[Event](), last
    for t in range(last + 1, last + max(self.schedule.taus) + 1):
      params_M, state, more = self.step(t, params_M, state, last_send=last)
      events += more
    if final_sync:
      # No earlier send used step t + 1 for its PRNG key: the random numbers are new.
      now = Schedule(len(self.fragments), 1, (0,) * self.replicas)
      sync = dataclasses.replace(self, schedule=now)
      params_M, state, more = outer.outer_step(sync, t + 1, params_M, state)
      events += more
    return params_M, state, events

  def params(self, state: OuterState) -> PyTree:
    """Joins the outer parameters that each fragment has since its last sync.

    The papers evaluate these parameters (2501.18512, Table 3).

    Returns:
      One replica's tree, float32, sharded over fsdp.
    """
    # Jobs and the copies below must not start collectives at the same time, so wait.
    self.place.settle()
    thetas = map(self.place.fetch, state.theta)
    return slices.join(thetas, self.layers, self.parameters, self.mesh)

  def after_drain(self, step: int) -> "Streaming":
    """Returns this object for a run that finished after `step` and is now extended."""
    schedule = dataclasses.replace(self.schedule, drained=step)
    return dataclasses.replace(self, schedule=schedule)

  def overlap_steps(self, t: int) -> int:
    """Counts the inner steps that share a program with the exchange after step t."""
    return self.schedule.overlap_steps(t) if self.transport.overlaps else 0

  def connect(self) -> None:
    """Opens the connections of the transport; all processes call this."""
    self.place.settle()  # Jobs exchange payloads, too.
    self.transport.connect()

  def send(
    self, t: int, p: int, params_M: PyTree, state: OuterState
  ) -> tuple[OuterState, Metrics]:
    """Lines 7 and 8: sends fragment p after step t."""
    encode = functools.partial(self.encode, t, p, params_M)
    return self.place.send(encode, self.update, p, state)

  def receive(self, p: int, state: OuterState) -> tuple[OuterState, PyTree, Metrics]:
    """Runs lines 10 and 11 of Algorithm 2 for fragment p, which is in flight.

    The buffers of theta and opt_state are donated.

    Returns:
      The new state, the fragment's new theta for `merge`, metrics float32 [].
    """
    return self.place.receive(self.update, p, state)

  def merge(
    self, p: int, params_M: PyTree, theta: PyTree, mask: Sequence[bool]
  ) -> PyTree:
    """Line 12 for fragment p; theta comes from the state or from `receive`."""
    theta, layers = self.place.fetch(theta), self.layers[p]
    with TraceAnnotation("merge"):
      return outer.merge(params_M, theta, layers, np.asarray(mask), alpha=self.alpha)

  def encode(
    self,
    t: int,
    p: int,
    params_M: PyTree,
    theta: PyTree,
    codec_state: PyTree,
    first: int = 0,
  ) -> tuple[jax.Array, PyTree, Metrics]:
    """Lines 7 and 8 on arrays, with theta on the devices; see `outer.send`."""
    # A key takes milliseconds on CPUs, and the fused form draws no random numbers.
    key = None if self.lines_7_8 is fused.send else self.key(t, p)
    layers = self.layers[p]
    with TraceAnnotation("send"):
      return self.lines_7_8(
        params_M, theta, codec_state, layers, key, first, wire=self.wire, mesh=self.mesh
      )

  def update(
    self, theta: PyTree, opt_state: PyTree, flying: InFlight
  ) -> tuple[PyTree, PyTree, Metrics]:
    """Lines 10 and 11 on arrays of `place.mesh`: exchanges payloads, then updates.

    Donates theta and opt_state, except on hosts.
    """
    payload = flying.payload
    if not flying.arrived:
      with TraceAnnotation("exchange"):
        payload = self.transport.carry(payload)
    kind = {"wire": self.wire, "outer": self.outer, "mesh": self.place.mesh}
    with TraceAnnotation("receive"):
      return self.lines_10_11(theta, opt_state, payload, self.tuned, **kind)

  def key(self, t: int, number: int) -> jax.Array:
    """Makes the PRNG key of fragment `number` after step t.

    The key depends only on the seed, t and the number. So the random numbers are the
    same in every part of a run, with every transport, and after a run resumes.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), t), number)

  def sync_bytes(self, p: int) -> int:
    """Counts the bytes that one replica sends in one sync of fragment p."""
    return self._sync_bytes[p]

  @functools.cached_property
  def _sync_bytes(self) -> list[int]:  # Cached, because every send needs it.
    fsdp = self.mesh.shape[FSDP]
    count = functools.partial(sizes.sync_bytes, self.wire, self.replicas)
    return [count(part, fsdp) for part in self.shapes]

  def payload(self, p: int, fsdp: int | None = None) -> jax.ShapeDtypeStruct:
    """Describes the shape and sharding of fragment p's encoded payload.

    Args:
      fsdp: size of the fsdp axis at the encoding; None: as in this mesh.
    """
    mesh_fsdp = self.mesh.shape[FSDP]
    fsdp = mesh_fsdp if fsdp is None else fsdp
    size = sizes.payload_bytes(self.wire, self.shapes[p], fsdp) // fsdp
    place = NamedSharding(self.mesh, P(REPLICA))
    return jax.ShapeDtypeStruct(
      (self.replicas, fsdp, size),
      jnp.uint8,
      sharding=exchange.encoded(self.mesh) if fsdp == mesh_fsdp else place,
    )

  @property
  def largest(self) -> int:
    """The index of the fragment with the largest payload."""
    return int(np.argmax([self.payload(p).size for p in range(len(self.fragments))]))

  def transmitted(self, p: int) -> jax.ShapeDtypeStruct:
    """Describes fragment p's payload after the exchange; see `transport.carry`."""
    payload = self.payload(p)
    if not self.transport.moves:
      return payload
    there = exchange.transmitted(self.mesh)
    return jax.ShapeDtypeStruct(payload.shape, payload.dtype, sharding=there)

  def _init(
    self, p: int
  ) -> Callable[[PyTree, np.ndarray], tuple[Parts, dict[str, PyTree]]]:
    return functools.partial(
      _init_fragment,
      keys=tuple(self.shapes[p]),
      wire=self.wire,
      outer=self.outer,
      states=tuple(self.outer_step.states.items()),
      mesh=self.mesh,
    )


def make_streaming(
  c: Config,
  mesh: Mesh,
  parameters: Shapes | None = None,
  *,
  fragments: tuple[Fragment, ...] | None = None,
  schedule: Schedule | None = None,
  optimizer: optax.GradientTransformation | None = None,
) -> Streaming:
  """Makes the `Streaming` of a config on a mesh; the library sets the other arguments.

  Args:
    mesh: the replica x fsdp mesh.
    parameters: shapes of one replica's parameters; None: the model's shapes.
    fragments: the parameters that are sent together; None: the config's fragments.
    schedule: when fragments are sent and received; None: the config's schedule.
    optimizer: the outer optimizer; None: the config's outer optimizer.

  Raises:
    ConfigError: the transport or pinned memory does not fit the machine, or the outer
      optimizer cannot update these parameters.
  """
  parameters = parameters or shapes.parameters(c.model)
  fragments = c.make_fragments() if fragments is None else fragments
  outer_optimizer: Outer = optimizer or c.outer
  # data_parallel sends no payloads, so hosts have nothing to exchange.
  kind = c.overlap.transport if fragments else "device"
  transport = make_transport(kind, mesh, c.wire.exchange == "gather")
  place = make_place(mesh, transport.hosts, c.outer.offload and bool(fragments))
  parts = tuple(f.shapes(parameters) for f in fragments)
  for part in parts:  # Finds mistakes in the optimizer; computes nothing.
    optimizers.outer_shardings(
      outer_optimizer, sharding.abstract(part, "float32"), mesh
    )
  step = OuterStep(outer.outer_step)
  for extension in sorted(c.extensions, key=lambda x: x.wraps_last):
    step = extension.wrap(c, step)
  return Streaming(
    schedule=schedule or c.make_schedule(),
    fragments=fragments,
    layers=tuple(f.indices for f in fragments),
    parameters=parameters,
    shapes=parts,
    wire=c.wire,
    outer=outer_optimizer,
    tuned=optimizers.outer_tuned(outer_optimizer),
    alpha=c.overlap.alpha,
    seed=c.seed,
    mesh=mesh,
    place=place,
    transport=transport,
    lines_7_8=choose_send(c.wire, place),
    lines_10_11=choose_update(c.wire, outer_optimizer, place),
    outer_step=step,
  )


def choose_send(wire: WireConfig, place: OnDevices) -> Wrapped:
  """Chooses the plain or the fused form of lines 7 and 8."""
  return (fused if fused.can_send(wire, place.devices) else outer).send


def choose_update(wire: WireConfig, optimizer: Outer, place: OnDevices) -> Wrapped:
  """Chooses the form of lines 10 and 11: plain or fused; in place except on hosts."""
  form = fused if fused.can_update(wire, optimizer, place.mesh) else outer
  return form.update if isinstance(place, OnHosts) else form.update_in_place


@functools.partial(jax.jit, static_argnames=("keys", "wire", "outer", "states", "mesh"))
def _init_fragment(
  params_M: PyTree,
  layers: np.ndarray,
  *,
  keys: tuple[str, ...],
  wire: WireConfig,
  outer: Outer,
  states: tuple[tuple[str, Callable[[PyTree], PyTree]], ...],
  mesh: Mesh,
) -> tuple[Parts, dict[str, PyTree]]:
  """Makes the first theta, opt_state, codec_state and `own` arrays of a fragment."""
  part_M = slices.take(params_M, keys, layers)
  theta = jax.tree.map(lambda x_M: x_M[0].astype(jnp.float32), part_M)
  opt_state = optimizers.make_outer(outer).init(theta)
  part_M = jax.tree.map(jnp.float32, part_M)
  state = (theta, opt_state, exchange.init_state(wire, part_M))
  own = {name: init(part_M) for name, init in states}
  replicas = len(jax.tree.leaves(part_M)[0])
  own_at = _own_shardings(own, theta, replicas, mesh)
  places = _outer_shardings(state, outer, mesh), own_at
  return jax.lax.with_sharding_constraint((state, own), places)


def _outer_shardings(state: Parts, outer: Outer, mesh: Mesh) -> Parts:
  """Returns device shardings of a fragment's theta, opt_state and codec_state."""
  theta, _, codec_state = state
  theta_at, opt_at = optimizers.outer_shardings(outer, theta, mesh)
  led = sharding.with_leading(theta_at, (REPLICA,))
  codec_at = jax.tree.map(
    lambda at, tensor: jax.tree.map(lambda _: at, tensor), led, codec_state
  )
  return theta_at, opt_at, codec_at


def _own_shardings(
  own: dict[str, PyTree], theta: PyTree, replicas: int, mesh: Mesh
) -> PyTree:
  """Returns device shardings of the arrays that plug-ins keep for a fragment."""
  places = sharding.shardings(theta, mesh)
  led = lambda x: jax.ShapeDtypeStruct((replicas, *x.shape), x.dtype)
  return optimizers.places_like(
    own,
    (theta, places),
    (jax.tree.map(led, theta), sharding.with_leading(places, (REPLICA,))),
    whole=NamedSharding(mesh, P()),
  )


def _outer_state(
  parts: list[Parts], in_flight: dict[int, InFlight], own: list[dict[str, PyTree]]
) -> OuterState:
  """Joins theta, opt_state and codec_state of each fragment."""
  thetas, opt_states, codec_states = zip(*parts) if parts else ((), (), ())
  return OuterState(thetas, opt_states, codec_states, in_flight, tuple(own))
