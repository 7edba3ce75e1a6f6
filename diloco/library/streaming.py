"""Streaming DiLoCo for any training loop and any pytree of parameters.

  method = diloco.streaming(params_M, sync_every=30, fragments=diloco.Stacked("blocks"))
  state = method.init(params_M)
  for t in range(1, T + 1):
    params_M, opt_state_M = train_step(params_M, opt_state_M, batch_M)  # Yours.
    params_M, state, events = method.step(t, params_M, state)
  params_M, state, events = method.drain(T, params_M, state)
  params = method.params(state)

Every method here names the leaves, then calls the method of the same name in
`algorithm/streaming.py`, which the trainer uses, too.
The first axis of every leaf of `params_M` is the replicas. In the whole package, the
ending `_M` of a name means this axis.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from diloco.algorithm import streaming as algorithm
from diloco.algorithm.optimizers import Outer
from diloco.algorithm.state import Event, OuterState
from diloco.config.resolve import check_some
from diloco.errors import ConfigError
from diloco.library import arguments
from diloco.library.layout import Fragments, Layout, make_layout, path_of
from diloco.mesh import sharding
from diloco.mesh.modes import plain_modes
from diloco.mesh.sharding import REPLICA
from diloco.spec.fields import OuterConfig, WireConfig
from diloco.spec.fragments import Fragment
from diloco.spec.schedule import Schedule
from diloco.util.types import PyTree
from diloco.wire.transport import behind

TrainStep = Callable[..., tuple[PyTree, PyTree, PyTree]]
OverlappedStep = Callable[..., tuple[PyTree, PyTree, PyTree, OuterState]]
_PAPER = OuterConfig()  # SGD with Nesterov momentum 0.9 and rate 0.4.


@dataclasses.dataclass(frozen=True)
class Streaming:
  """Synchronises M replicas: lines 6 to 12 of Algorithm 2 (arXiv 2501.18512).

  Attributes:
    sync: the object that the trainer uses, too.
    layout: how the outer step names the leaves of `params_M`.
  """

  sync: algorithm.Streaming
  layout: Layout

  @property
  def fragments(self) -> tuple[tuple[str, ...], ...]:
    """The paths of each fragment's leaves; a stack's layers follow as [i, j, ...]."""
    return tuple(map(self._describe, self.sync.fragments))

  def print_fragments(self) -> None:
    """Prints a line per fragment: bytes that a replica sends in a sync, and leaves."""
    for p, leaves in enumerate(self.fragments):
      print(f"fragment {p}: {self.sync_bytes(p):,} bytes, {', '.join(leaves)}")

  @plain_modes()
  def init(self, params_M: PyTree) -> OuterState:
    """Makes the first outer state; its outer parameters are those of replica 0.

    Raises:
      ConfigError: params_M has other leaves or shapes than that of `streaming`. So do
        `step`, `drain` and `abstract_state`.
    """
    state = self.sync.init(self.layout.split(params_M))
    return dataclasses.replace(state, steps=self._steps(0, 0))

  @plain_modes()
  def step(
    self, t: int, params_M: PyTree, state: OuterState
  ) -> tuple[PyTree, OuterState, list[Event]]:
    """Sends, receives and merges the fragments that are due after inner step t.

    Call `step` once after every inner step. A call costs nothing if no fragment is due.
    `params_M` and `state` are donated: use only the returned parameters and state.

    Args:
      t: number of finished inner steps, from 1.
      params_M: parameters of all replicas.
      state: from `init` or the last `step`.

    Returns:
      New parameters, new state, and an event for each send and receive.

    Raises:
      ConfigError: `state` is not the state of this method after step t - 1.
    """
    t, state = self._check("t", t, 1, state)
    drained = self.sync.schedule.drained
    parts_M = self.layout.split(params_M)
    parts_M, state, events = self.sync.step(t, parts_M, state)
    state = dataclasses.replace(state, steps=self._steps(t, drained))
    return self.layout.join(parts_M), state, events

  def overlapped(self, train_step: TrainStep) -> OverlappedStep:
    """Makes one program of your inner step and the exchange that follows a send.

      train_step = method.overlapped(train_step)
      for t in range(1, T + 1):
        params_M, opt_state_M, aux, state = train_step(
          t, params_M, opt_state_M, state, batch_M
        )
        params_M, state, events = method.step(t, params_M, state)

    On TPUs and GPUs the first inner step after a send hides the exchange of this send
    (docs/aot.md). All other inner steps run `train_step` alone. So do all inner steps
    if tau is 0, transport is "host", or the axis `replica` has size 1.

    Args:
      train_step: called as train_step(params_M, opt_state_M, *more); returns
        params_M, opt_state_M and metrics, which are trees of arrays. It is jitted here.

    Returns:
      The new train_step, as above. It donates params_M and opt_state_M, and raises a
      ConfigError if `state` is not the state after step t - 1.
    """
    alone = jax.jit(train_step, donate_argnums=(0, 1))

    def step(
      t: int, params_M: PyTree, opt_state_M: PyTree, state: OuterState, *more: PyTree
    ) -> tuple[PyTree, PyTree, PyTree, OuterState]:
      t, state = self._check("t", t, 1, state)
      if not self.sync.overlap_steps(t - 1):
        return *alone(params_M, opt_state_M, *more), state
      sent = self.sync.schedule.sends(t - 1)
      payloads = [state.in_flight[p].payload for p in sent]
      kind = {"train_step": train_step, "mesh": self.sync.mesh}
      done, arrived = overlapped_step(
        np.int32(1), params_M, opt_state_M, more, payloads, **kind
      )
      return *done, state.with_arrived(sent, arrived)

    return step

  @plain_modes()
  def drain(
    self, last: int, params_M: PyTree, state: OuterState, final_sync: bool = False
  ) -> tuple[PyTree, OuterState, list[Event]]:
    """Receives the fragments in flight after the last inner step; see `step`.

    Args:
      last: number of the last inner step.
      final_sync: whether all fragments are synchronised once more. If False, a
        fragment's outer parameters lack the inner steps after its last send.

    Raises:
      ConfigError: `state` is not the state of this method after step `last`.
    """
    last, state = self._check("last", last, 0, state)
    parts_M = self.layout.split(params_M)
    parts_M, state, events = self.sync.drain(last, parts_M, state, final_sync)
    state = dataclasses.replace(state, steps=self._steps(last, last))
    return self.layout.join(parts_M), state, events

  @plain_modes()
  def params(self, state: OuterState) -> PyTree:
    """Returns the outer parameters, float32, without the axis of the replicas.

    The papers evaluate these parameters (2501.18512, Table 3).

    Raises:
      ConfigError: a method with other parameters, fragments or outer made `state`.
    """
    return self.layout.join(self.sync.params(self._place(state, numbers=3)))

  @plain_modes()
  def abstract_state(self, params_M: PyTree, t: int) -> OuterState:
    """Describes the state after step t, for tools that restore it, such as Orbax.

    `method.after_drain(T).abstract_state(params_M, T)` describes a state that was saved
    after `drain` at step T.

    Args:
      params_M: parameters of all replicas, or their shapes.
      t: number of finished inner steps.

    Raises:
      ConfigError: t is no whole number of at least 0.
    """
    in_flight = self.sync.schedule.in_flight(arguments.whole_number("t", t))
    state = self.sync.abstract(self.layout.split(params_M), in_flight)
    place = NamedSharding(self.sync.mesh, P())
    steps = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=place)
    return dataclasses.replace(state, steps=steps)

  def sync_bytes(self, p: int) -> int:
    """Counts the bytes that one replica sends in one sync of fragment p."""
    return self.sync.sync_bytes(arguments.whole_number("p", p))

  def after_drain(self, last: int) -> "Streaming":
    """Returns the method for a run that goes on after `drain` at step `last`.

    Only here may a run change its sync_every, tau or wire.format.

    Raises:
      ConfigError: `last` is no whole number of at least 0.
    """
    last = arguments.whole_number("last", last)
    return dataclasses.replace(self, sync=self.sync.after_drain(last))

  def close(self) -> None:
    """Waits until the thread of transport="host" has no more work."""
    self.sync.place.settle()

  def _check(
    self, name: str, step: int, ahead: int, state: OuterState
  ) -> tuple[int, OuterState]:
    """Refuses a `state` of another step than `step - ahead`, or of another last drain.

    Returns:
      `step` as an int, and the state that `_place` returns.
    """
    step = arguments.whole_number(name, step)
    last, drained = np.asarray(state.steps)[:2].tolist()
    if step != last + ahead:
      raise ConfigError(
        f"{name} is {step}, but state is that after step {last}; call step once after"
        f" every inner step, so that {name} is {last + ahead} here."
      )
    first = self.sync.schedule.drained
    if drained != first:
      raise ConfigError(
        f"state was drained after step {drained} (0: never), but this method begins"
        f" after step {first}; use method.after_drain({drained})."
      )
    return step, self._place(state)

  @plain_modes()
  def _place(self, state: OuterState, numbers: int = 4) -> OuterState:
    """Moves NumPy arrays, such as those of a pickle, to their devices.

    Refuses a state of another method: compares the first `numbers` of `steps`.
    """
    steps = np.asarray(state.steps).tolist()
    expected = self._steps(last=steps[0], drained=steps[1]).tolist()
    if steps[:numbers] != expected[:numbers]:
      raise ConfigError(
        "state was made by a method with another params_M, fragments, outer,"
        " sync_every, tau or wire; use that method, or drain with that method before"
        " you change sync_every, tau or wire.format."
      )
    leaves = jax.tree.leaves(dataclasses.replace(state, steps=None))
    if all(isinstance(x, jax.Array) for x in leaves):
      return state
    likes, structure = jax.tree.flatten(self._abstract(state.in_flight))
    placed = [
      x if isinstance(x, jax.Array) else sharding.place(x, like.sharding)
      for x, like in zip(leaves, likes)
    ]
    return dataclasses.replace(jax.tree.unflatten(structure, placed), steps=state.steps)

  def _abstract(self, in_flight: Iterable[int] = ()) -> OuterState:
    """Describes a state without `steps`."""
    params_M = sharding.abstract(self.layout.name(self.layout.shapes), "float32")
    return self.sync.abstract(params_M, in_flight)

  def _steps(self, last: int, drained: int) -> np.ndarray:
    """Makes `OuterState.steps`."""
    schedule = self.sync.schedule
    # After a drain nothing is in flight, so a method with other values may go on.
    now = (schedule.sync_every, schedule.taus, self.sync.wire) if last > drained else ()
    numbers = [last, drained, self._shapes, _digest(now)]
    return np.asarray(numbers, np.uint32).view(np.int32)

  @functools.cached_property
  @plain_modes()
  def _shapes(self) -> int:
    """The digest of the fragments, and of the state's paths, shapes and dtypes."""
    leaves = jax.tree.leaves_with_path(self._abstract())
    shapes = [(path_of(path), x.shape, x.dtype.name) for path, x in leaves]
    return _digest((self.sync.fragments, shapes))

  def _describe(self, fragment: Fragment) -> tuple[str, ...]:
    parts, layers = self.sync.parameters, list(fragment.layers)
    stacked = parts["blocks"] if layers else ()
    rest = [path for name in fragment.rest for path in parts[name]]
    return (*(f"{path}{layers}" for path in stacked), *rest)


def streaming(
  params_M: PyTree,
  *,
  sync_every: int,
  fragments: Fragments = None,
  tau: int | Sequence[int] = 0,
  alpha: float = 0.0,
  wire: str | WireConfig = "fp32",
  outer: Outer = _PAPER,
  seed: int = 0,
  mesh: Mesh | None = None,
  transport: str = "device",
) -> Streaming:
  """Makes the method for a tree of parameters.

  With several processes, all must call this function: it opens their connections.

  Args:
    params_M: parameters of M replicas, leaves (M, ...), or their shapes. All leaves are
      synchronised, so they must be floating-point: keep counters and keys elsewhere.
    sync_every: H, inner steps between two syncs of one fragment.
    fragments: `Stacked(...)` if layers are stacked along an axis; or a function that
      takes the path of a leaf, such as "params/Dense_0/kernel", and returns the number
      of its fragment. None: one fragment of all leaves, as in DiLoCo.
    tau: inner steps between a send and its merge: one number, or one per replica. With
      transport "host" these steps hide the exchange. With "device" only `overlapped`
      hides the exchange, because a device runs two programs one after the other.
    alpha: weight of a replica's own parameters in a merge.
    wire: a number format (fp32, bf16, e3m0, any eXmY), or a WireConfig with format,
      compressor and block size. A WireConfig whose format is not set (auto) uses e3m0.
    outer: the outer optimizer. An OuterConfig names an optimizer and its rate. SGD from
      an OuterConfig is faster than SGD from optax, because it runs piece by piece.
    seed: seed of compressors that draw random numbers.
    mesh: devices with the axes `replica` and `fsdp`, from `diloco.replica_mesh`. None:
      the mesh or the single device on which params_M lies.
    transport: "device" or "host". With "host", hosts exchange the payloads over TCP
      in a thread, while the devices train (docs/machines.md).

  Raises:
    ConfigError: an argument cannot work. The message uses the names of the config's
      fields, such as overlap.alpha.
  """
  if transport not in ("device", "host"):
    raise ConfigError(f"transport is {transport!r}; choose device or host.")
  layout, parts = make_layout(params_M, fragments)
  replicas = arguments.count_replicas(params_M)
  taus = arguments.read_taus(tau, replicas)
  fields = {"sync_every": sync_every, "seed": seed, "overlap.transport": transport}
  fields |= {"overlap.tau": max(taus), "overlap.taus": taus, "overlap.alpha": alpha}
  c = arguments.check_fields(wire, outer, fields)
  schedule = Schedule(len(parts), c.sync_every, taus)
  mesh = arguments.mesh_under(params_M) if mesh is None else mesh
  arguments.check_mesh(mesh, replicas)
  with plain_modes():
    sync = algorithm.make_streaming(
      c,
      mesh,
      layout.parameters,
      fragments=parts,
      schedule=schedule,
      optimizer=None if isinstance(outer, OuterConfig) else outer,
    )
    sync.connect()
  return Streaming(sync, layout)


@functools.partial(
  jax.jit, static_argnames=("train_step", "mesh"), donate_argnums=(1, 2)
)
def overlapped_step(
  count: jax.Array,
  params_M: PyTree,
  opt_state_M: PyTree,
  more: tuple[PyTree, ...],
  payloads: list[jax.Array],
  *,
  train_step: TrainStep,
  mesh: Mesh,
) -> tuple[tuple[PyTree, PyTree, PyTree], list[jax.Array]]:
  """Runs one inner step while the payloads are exchanged.

  Args:
    count: 1, as int32 []; `transport.behind` says why this is an argument.
    params_M: parameters of all replicas; donated.
    opt_state_M: everything else that the step changes; donated.
    more: the step's other arguments.
    payloads: uint8 [M, fsdp, bytes], sent before the step.

  Returns:
    The result of the step, and the payloads of all replicas.
  """
  shapes = jax.eval_shape(train_step, params_M, opt_state_M, *more)[2]
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  once = lambda _, carry: train_step(carry[0], carry[1], *more)
  carry = (params_M, opt_state_M, zeros)
  steps = lambda: jax.lax.fori_loop(0, count, once, carry)
  return behind(mesh, payloads, steps)


def replicate(params: PyTree, replicas: int, mesh: Mesh | None = None) -> PyTree:
  """Copies one model's parameters to M replicas: leaves (...) become (M, ...).

  Args:
    params: parameters of one model.
    replicas: M.
    mesh: from `diloco.replica_mesh`; the replicas are sharded over its axis `replica`.
      None: the replicas stay on the device of the parameters.

  Raises:
    ConfigError: a leaf is no array, or `replicas` is no number that fits the mesh.
  """
  replicas = check_some({"replicas": replicas}).replicas

  def copies(path: KeyPath, x: PyTree) -> jax.Array:
    try:
      return jnp.broadcast_to(jnp.asarray(x)[None], (replicas, *jnp.shape(x)))
    except TypeError as error:
      raise ConfigError(
        f"the leaf {path_of(path)} of params is {x!r}, which is no array; keep this"
        " leaf outside of params."
      ) from error

  params_M = jax.tree.map_with_path(copies, params)
  if mesh is None:
    return params_M
  arguments.check_mesh(mesh, replicas)
  return jax.device_put(params_M, NamedSharding(mesh, P(REPLICA)))


def _digest(x: object) -> int:
  return zlib.crc32(repr(x).encode())
