"""Defines the method that takes the state of a run from step to step.

The training loop calls the method, which runs the inner steps of all replicas and has a
`Streaming` that synchronises the replicas. A subclass trains several runs at once
(`diloco.together`), or a part of a run.

An exchange overlaps with inner steps only if one program contains the exchange and the
steps: a device runs separate programs one after the other. In such a program,
XLA for TPUs and GPUs overlaps the two (docs/aot.md), XLA for CPUs does not. With
`overlap.transport=host` the hosts exchange payloads while the devices train.

Steps are numbered from 1; t counts finished inner steps.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh

from diloco.algorithm.inner import InnerMetrics, inner_step
from diloco.algorithm.optimizers import Tuned, judged, tuned
from diloco.algorithm.state import (
  Event,
  TrainState,
  abstract_inner,
  first_replica,
  init_inner,
)
from diloco.algorithm.streaming import Streaming, make_streaming
from diloco.config import Config
from diloco.util.types import Json, PyTree
from diloco.wire import transport


@dataclasses.dataclass
class Method:
  """Trains the replicas of a config by its inner steps, and synchronises them.

  Data-parallel has no fragments: its outer step does nothing, and its inner step
  averages the gradient over all devices.

  Attributes:
    c: the config of the training.
    sync: synchronises the replicas.
  """

  c: Config
  sync: Streaming

  def connect(self) -> None:
    """Opens the connections that the outer step needs; all processes call this."""
    self.sync.connect()

  def init(
    self, seed: jax.Array | None = None, params: PyTree | None = None
  ) -> TrainState:
    """Makes the first state: all replicas start from the same parameters.

    Args:
      seed: int32 []; None: the seed of the config.
      params: one replica's parameters, sharded over fsdp; None: the seed draws them.
    """
    places = jax.tree.map(lambda x: x.sharding, abstract_inner(self.c, self.sync.mesh))
    init = jax.jit(functools.partial(init_inner, self.c), out_shardings=places)
    key = jax.random.key(self.c.seed if seed is None else seed)
    params_M, opt_state_M = init(key, params)
    return TrainState(params_M, opt_state_M, self.sync.init(params_M))

  def abstract(
    self, t: int = 0, fsdp: Mapping[int, int] = {}, drained: bool = False
  ) -> TrainState:
    """Describes shapes, dtypes and shardings of the state after step t.

    Computes nothing. Code that restores a checkpoint needs this description.

    Args:
      fsdp: see `Streaming.abstract`.
      drained: whether nothing is in flight.
    """
    params_M, opt_state_M = abstract_inner(self.c, self.sync.mesh)
    in_flight = () if drained else self.sync.schedule.in_flight(t)
    outer = self.sync.abstract(params_M, in_flight, fsdp)
    return TrainState(params_M, opt_state_M, outer)

  def enter(self, t: int, state: TrainState) -> tuple[int, TrainState]:
    """Joins the run after step t; returns the step and state from which to go on."""
    return t, state

  def span(self, t: int, last: int, periods: Sequence[int]) -> range:
    """Returns the inner steps after step t that are launched together.

    The range has one inner step, or inner steps that overlap the same exchange.
    Evaluations and checkpoints come only at the end of the range.

    Args:
      t: number of finished inner steps, less than `last`.
      last: the last inner step.
      periods: a range ends at every multiple of a period; 0 means never.
    """
    ends = [last - t, *(period - t % period for period in periods if period)]
    return range(t + 1, t + 1 + min(max(self.sync.overlap_steps(t), 1), *ends))

  def inner(
    self, steps: range, state: TrainState, tokens: list[jax.Array]
  ) -> tuple[TrainState, list[InnerMetrics]]:
    """Runs inner steps (lines 3 to 5 of Algorithm 2) and the exchange they overlap.

    Args:
      steps: a range from `span`.
      state: the state before the steps; params and opt_state are donated.
      tokens: int32 [M, B, L] for each step.

    Returns:
      The state after the steps, and the metrics of each step; does not wait for the
      devices to compute them.
    """
    c, sync, numbers = self.c, self.sync, tuned(self.c)
    if not self.sync.overlap_steps(steps[0] - 1):
      [tokens_MxBxL] = tokens
      params_M, opt_state_M, metrics = inner_step(
        state.params,
        state.opt_state,
        tokens_MxBxL,
        numbers,
        c=c,
        averaged=steps[-1] <= c.joint_steps,
      )
      return TrainState(params_M, opt_state_M, state.outer), [metrics]
    sent = sync.schedule.sends(steps[0] - 1)
    # The list of tokens has a fixed length, so that one program serves any count.
    spare = sync.schedule.longest_overlap - len(tokens)
    params_M, opt_state_M, by_step, arrived = overlapped_exchange(
      np.int32(len(tokens)),
      state.params,
      state.opt_state,
      [*tokens, *tokens[:1] * spare],
      numbers,
      [state.outer.in_flight[p].payload for p in sent],
      c=c,
      mesh=sync.mesh,
    )
    outer = state.outer.with_arrived(sent, arrived)
    return TrainState(params_M, opt_state_M, outer), by_step[: len(tokens)]

  def outer(self, t: int, state: TrainState) -> tuple[int, TrainState, list[Event]]:
    """Runs plug-ins' averages after inner step t, then lines 6 to 12 of Algorithm 2.

    Returns:
      The step after which training goes on, the new state, and the events.
    """
    state, averages = self.average(t, state)
    params, outer, events = self.sync.step(t, state.params, state.outer)
    return t, TrainState(params, state.opt_state, outer), averages + events

  def average(self, t: int, state: TrainState) -> tuple[TrainState, list[Event]]:
    """Runs the averages over replicas that plug-ins define, after inner step t."""
    events = list[Event]()
    for kind in self.c.averages_after(t):
      with TraceAnnotation(kind):
        state, sent = self.c.averages[kind].run(t, self.sync, state)
      events.append(Event("average", kind, t, sent, {}))
    return state, events

  def drain(self, t: int, state: TrainState) -> tuple[TrainState, list[Event]]:
    """Receives the fragments in flight after the last inner step t.

    Raises:
      Stopped: a signal came while a part of a run waited for the other parts.
    """
    final_sync = self.c.outer.final_sync
    params, outer, events = self.sync.drain(t, state.params, state.outer, final_sync)
    return TrainState(params, state.opt_state, outer), events

  def params(self, state: TrainState) -> PyTree:
    """Returns the parameters to evaluate, one replica's tree, float32.

    For DiLoCo these are the outer parameters, as in the papers (2501.18512, Table 3).
    For data-parallel they are the model's parameters, or the inner optimizer's average
    of the parameters if it keeps an average.
    """
    if self.sync.fragments:
      return self.sync.params(state.outer)
    return first_replica(judged(state.params, state.opt_state), mesh=self.sync.mesh)

  def after_drain(self, t: int) -> Self:
    """Returns this method for a run that finished after step t and is now extended."""
    return dataclasses.replace(self, sync=self.sync.after_drain(t))

  def recovers(self, t: int) -> bool:
    """Returns whether training goes on, although a loss up to step t is not finite."""
    del t
    return False

  def account(self, summary: Json) -> Json:
    """Returns the fields of a run's summary that this method adds or changes."""
    del summary
    return {}

  def of_run(self, arrays: PyTree, r: int) -> PyTree:
    """Takes the arrays of run r out of the arrays of all runs that train together."""
    del r
    return arrays

  def close(self, reason: str) -> None:
    """Leaves the run; further calls do nothing.

    Args:
      reason: finished, stopped (and saved), or ended (by an error).
    """
    del reason


def make_method(c: Config, mesh: Mesh) -> Method:
  """Makes the method of a config.

  Raises:
    ConfigError: inner.optimizer cannot update the parameters; see `make_streaming` too.
  """
  abstract_inner(c, mesh)  # Finds mistakes in inner.optimizer; computes nothing.
  return Method(c, make_streaming(c, mesh))


@functools.partial(jax.jit, static_argnames=("c", "mesh"), donate_argnums=(1, 2))
def overlapped_exchange(
  count: jax.Array,
  params_M: PyTree,
  opt_state_M: PyTree,
  tokens: list[jax.Array],
  tuned: Tuned,
  payloads: list[jax.Array],
  *,
  c: Config,
  mesh: Mesh,
) -> tuple[PyTree, PyTree, list[InnerMetrics], list[jax.Array]]:
  """Runs `count` inner steps while the payloads are exchanged.

  Args:
    count: int32 [], at most the length of `tokens`.
    params_M: parameters of all replicas.
    opt_state_M: states of their inner optimizers.
    tuned: learning rate and weight decay.
    tokens: int32 [M, B, L] for each step; steps beyond `count` do not run.
    payloads: uint8 [M, fsdp, bytes], sent before the first step.

  Returns:
    Parameters, optimizer state, metrics of each step (zeros beyond `count`), and the
    payloads of all replicas.
  """
  tokens_K = jnp.stack(tokens)
  args = (params_M, opt_state_M, tokens[0], tuned)
  shapes = jax.eval_shape(functools.partial(inner_step, c=c), *args)[2]
  zeros = lambda x: jnp.zeros((len(tokens), *x.shape), x.dtype)
  at = lambda tree_K, k: jax.tree.map(lambda x_K: x_K[k], tree_K)

  def step(
    k: jax.Array, carry: tuple[PyTree, PyTree, InnerMetrics]
  ) -> tuple[PyTree, PyTree, InnerMetrics]:
    params_M, opt_state_M, metrics_K = carry
    params_M, opt_state_M, metrics = inner_step(
      params_M, opt_state_M, at(tokens_K, k), tuned, c=c
    )
    put = lambda x_K, x: x_K.at[k].set(x)
    return params_M, opt_state_M, jax.tree.map(put, metrics_K, metrics)

  carry = (params_M, opt_state_M, jax.tree.map(zeros, shapes))
  steps = lambda: jax.lax.fori_loop(0, count, step, carry)
  carry, arrived = transport.behind(mesh, payloads, steps)
  params_M, opt_state_M, metrics_K = carry
  return params_M, opt_state_M, [at(metrics_K, k) for k in range(len(tokens))], arrived
