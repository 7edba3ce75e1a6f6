"""What the training loop calls: a method takes the state of a run from step to step.

`DiLoCo` is DiLoCo and Streaming DiLoCo, and says what every method has; `DataParallel`
is the baseline. A `Wrapper` adds something to another method, such as a measurement
around its outer step. Runs that train together (`diloco.together`) are a wrapper, too.

Steps are numbered from 1; t counts finished inner steps.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import jax
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh

from diloco.algorithm import overlap
from diloco.algorithm.inner import InnerMetrics
from diloco.algorithm.optimizers import OuterTuned, judged
from diloco.algorithm.state import (
  Event,
  TrainState,
  abstract_inner,
  first_replica,
  init_inner,
)
from diloco.algorithm.streaming import Streaming, make_streaming
from diloco.config import Config
from diloco.util.types import PyTree


@dataclasses.dataclass(frozen=True)
class DiLoCo:
  """DiLoCo and Streaming DiLoCo, with the trainer's inner step.

  Attributes:
    c: the config by which the method trains.
    mesh: the device mesh.
    sync: synchronises the replicas.
  """

  c: Config
  mesh: Mesh
  sync: Streaming

  def connect(self) -> None:
    """Opens the connections that the outer step needs; all processes call this."""
    self.sync.transport.connect()

  def init(
    self, seed: jax.Array | None = None, params: PyTree | None = None
  ) -> TrainState:
    """Makes the first state; see `init_state`."""
    return init_state(self.c, self.mesh, self.sync, seed, params)

  def abstract(self, t: int, fsdp: int, drained: bool) -> TrainState:
    """Describes the state after step t, without computing it, for a checkpoint.

    Args:
      fsdp: size of the fsdp axis that encoded the payloads in flight.
      drained: whether nothing is in flight.
    """
    in_flight = () if drained else self.sync.schedule.in_flight(t)
    return abstract_state(self.c, self.mesh, self.sync, in_flight, fsdp)

  def enter(self, t: int, state: TrainState) -> tuple[int, TrainState]:
    """Joins the run with the state after step t; returns where training goes on."""
    return t, state

  def span(self, t: int, last: int, periods: Sequence[int]) -> range:
    """Returns the inner steps after step t of one launch; see `overlap.span`."""
    return overlap.span(self.sync, t, last, periods)

  def inner(
    self, steps: range, state: TrainState, tokens: list[jax.Array]
  ) -> tuple[TrainState, list[InnerMetrics]]:
    """Runs inner steps: lines 3 to 5 of Algorithm 2.

    Args:
      steps: from `span`.
      state: donated.
      tokens: int32 [M, B, L] for each step.

    Returns:
      The new state, and the metrics of each step; waits for neither.
    """
    return overlap.inner_steps(self.c, self.sync, steps, state, tokens)

  def outer(self, t: int, state: TrainState) -> tuple[int, TrainState, list[Event]]:
    """Runs what is due after inner step t: averages, then lines 6 to 12 of Algorithm 2.

    Returns:
      The step after which training goes on, the new state, and what happened.
    """
    state, averages = self.average(t, state)
    params, outer, events = self.sync.step(t, state.params, state.outer)
    return t, TrainState(params, state.opt_state, outer), averages + events

  def average(self, t: int, state: TrainState) -> tuple[TrainState, list[Event]]:
    """Averages over the replicas what plug-ins average after inner step t."""
    events = list[Event]()
    for kind in self.c.averages_after(t):
      with TraceAnnotation(kind):
        state, sent = self.c.averages[kind].run(t, self.sync, state)
      events.append(Event("average", kind, t, sent, {}))
    return state, events

  def drain(self, t: int, state: TrainState) -> tuple[TrainState, list[Event]]:
    """Receives what is in flight after the last step t.

    Raises:
      Stopped: a signal came while this process waited for others.
    """
    final_sync = self.c.outer.final_sync
    params, outer, events = self.sync.drain(t, state.params, state.outer, final_sync)
    return TrainState(params, state.opt_state, outer), events

  def params(self, state: TrainState) -> PyTree:
    """Returns the parameters to evaluate, one replica's tree, float32.

    These are the outer parameters, as in the papers (2501.18512, Table 3).
    """
    return self.sync.params(state.outer)

  def after_drain(self, t: int) -> "DiLoCo":
    """Returns the method of a run that finished after step t and is now extended."""
    return dataclasses.replace(self, sync=self.sync.after_drain(t))

  def tune(self, seed: jax.Array | int, tuned: OuterTuned) -> "DiLoCo":
    """Returns the method with another seed and tuned numbers; tracers are allowed."""
    sync = dataclasses.replace(self.sync, seed=seed, tuned=tuned)
    return dataclasses.replace(self, sync=sync)

  def recovers(self, t: int) -> bool:
    """Returns whether training goes on, although a loss up to step t is not finite."""
    del t
    return False

  def note(self) -> str:
    """Returns more text for the progress line."""
    return ""

  def account(self, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields that this method adds to a run's summary, or replaces there."""
    del summary
    return {}

  def of_run(self, arrays: PyTree, r: int) -> PyTree:
    """Returns the arrays of run r from those of all runs that train together."""
    del r
    return arrays

  def close(self, reason: str) -> None:
    """Leaves the run; only the first call does something.

    Args:
      reason: finished, stopped (and saved), or ended (by an error).
    """
    del reason
    self.sync.close()


class DataParallel(DiLoCo):
  """The baseline: one model, whose gradient is averaged over all devices.

  It has no fragments, so its outer step does nothing.
  """

  def params(self, state: TrainState) -> PyTree:
    """Returns the parameters, or the average that the inner optimizer keeps."""
    return first_replica(judged(state.params, state.opt_state), mesh=self.mesh)


@dataclasses.dataclass
class Wrapper:
  """Another method, to which a subclass adds something."""

  method: "Method"

  def __getattr__(self, name: str) -> Any:
    return getattr(self.method, name)

  def after_drain(self, t: int) -> Self:
    return dataclasses.replace(self, method=self.method.after_drain(t))

  def tune(self, seed: jax.Array | int, tuned: OuterTuned) -> Self:
    return dataclasses.replace(self, method=self.method.tune(seed, tuned))


Method: TypeAlias = DiLoCo | Wrapper


def make_method(c: Config, mesh: Mesh) -> Method:
  """Makes the method of a config.

  Raises:
    ConfigError: inner.optimizer cannot step the parameters, or see `make_streaming`.
  """
  abstract_inner(c, mesh)  # Finds mistakes in inner.optimizer; computes nothing.
  sync = make_streaming(c, mesh)
  return (DiLoCo if sync.fragments else DataParallel)(c, mesh, sync)


def init_state(
  c: Config,
  mesh: Mesh,
  sync: Streaming,
  seed: jax.Array | None = None,
  params: PyTree | None = None,
) -> TrainState:
  """Makes the first state: all replicas start from the same parameters.

  Args:
    seed: int32 []; None: the seed of the config.
    params: one replica's parameters, sharded over fsdp; None: the seed draws them.
  """
  places = jax.tree.map(lambda x: x.sharding, abstract_inner(c, mesh))
  init = jax.jit(functools.partial(init_inner, c), out_shardings=places)
  key = jax.random.key(c.seed if seed is None else seed)
  params_M, opt_state_M = init(key, params)
  return TrainState(params_M, opt_state_M, sync.init(params_M))


def abstract_state(
  c: Config,
  mesh: Mesh,
  sync: Streaming,
  in_flight: Iterable[int] = (),
  fsdp: int | None = None,
) -> TrainState:
  """Describes shapes, dtypes and shardings of a state, without computing it.

  Args:
    sync: how replicas are synchronised.
    in_flight: fragments whose payloads the state holds.
    fsdp: size of the fsdp axis that encoded the payloads; None: as in this mesh.
  """
  params_M, opt_state_M = abstract_inner(c, mesh)
  outer = sync.abstract(params_M, in_flight, fsdp)
  return TrainState(params_M, opt_state_M, outer)
