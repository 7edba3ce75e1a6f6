"""Overlaps an exchange with inner steps: one program runs both.

A device runs separate programs one after the other. So an exchange overlaps with inner
steps only inside one program. XLA for TPUs and GPUs overlaps them (docs/aot.md), XLA
for CPUs does not.
With `overlap.transport=host` the hosts exchange payloads, and this file does nothing.
"""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from diloco.algorithm.inner import InnerMetrics, inner_step
from diloco.algorithm.optimizers import Tuned, tuned
from diloco.algorithm.state import InFlight, TrainState
from diloco.algorithm.streaming import Streaming
from diloco.config import Config
from diloco.util.types import PyTree
from diloco.wire import transport


def overlap_steps(sync: Streaming, t: int) -> int:
  """Counts the inner steps that share a program with the exchange after step t."""
  return sync.schedule.overlap_steps(t) if sync.transport.overlaps else 0


def span(sync: Streaming, t: int, last: int, periods: Iterable[int]) -> range:
  """Returns the inner steps after step t that are launched together.

  These are one inner step, or the inner steps that overlap one exchange. No evaluation
  and no checkpoint falls inside the range.

  Args:
    sync: how replicas are synchronised.
    t: number of finished inner steps, less than `last`.
    last: the last inner step.
    periods: a range ends at every multiple of a period; 0 means never.
  """
  ends = [last - t, *(period - t % period for period in periods if period)]
  return range(t + 1, t + 1 + min(max(overlap_steps(sync, t), 1), *ends))


def inner_steps(
  c: Config, sync: Streaming, steps: range, state: TrainState, tokens: list[jax.Array]
) -> tuple[TrainState, list[InnerMetrics]]:
  """Runs a range of inner steps, together with the exchange that they overlap.

  Args:
    sync: how replicas are synchronised.
    steps: a range from `span`.
    state: the state before the steps; params and opt_state are donated.
    tokens: int32 [M, B, L] for each step.

  Returns:
    The state after the steps and the metrics of each step; waits for neither.
  """
  arrays, numbers = (state.params, state.opt_state), tuned(c)
  if not overlap_steps(sync, steps[0] - 1):
    params_M, opt_state_M, metrics = inner_step(
      *arrays, *tokens, numbers, c=c, averaged=steps[-1] <= c.joint_steps
    )
    return TrainState(params_M, opt_state_M, state.outer), [metrics]
  sent = sync.schedule.sends(steps[0] - 1)
  # The list of tokens has a fixed length, so that one program serves every count.
  spare = sync.schedule.longest_overlap - len(tokens)
  params_M, opt_state_M, by_step, arrived = overlapped_exchange(
    np.int32(len(tokens)),
    *arrays,
    [*tokens, *tokens[:1] * spare],
    numbers,
    [state.outer.in_flight[p].payload for p in sent],
    c=c,
    mesh=sync.mesh,
  )
  received = {p: InFlight(x, arrived=True) for p, x in zip(sent, arrived)}
  in_flight = {**state.outer.in_flight, **received}
  outer = dataclasses.replace(state.outer, in_flight=in_flight)
  return TrainState(params_M, opt_state_M, outer), by_step[: len(tokens)]


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
    params_M, opt_state_M, tuned: as for `inner_step`.
    tokens: int32 [M, B, L] for each step; steps beyond `count` do not run.
    payloads: uint8 [M, fsdp, bytes], sent before the first step.

  Returns:
    Parameters, optimizer state, metrics of each step (zeros beyond `count`) and
    everyone's payloads.
  """
  with jax.named_scope("exchange_start"):
    received = transport.start(mesh, payloads)

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

  # `count` is an argument, not a constant. If XLA knew that it is 1, XLA would unroll
  # the loop and begin the exchange only after the layers of that step.
  carry = (params_M, opt_state_M, jax.tree.map(zeros, shapes))
  with jax.named_scope("inner_steps"):
    carry = jax.lax.fori_loop(0, count, step, carry)
  # Barrier: without it XLA may wait for the exchange before it runs the steps.
  carry, received = jax.lax.optimization_barrier((carry, received))
  with jax.named_scope("exchange_finish"):
    arrived = transport.finish(mesh, payloads, received)
  params_M, opt_state_M, metrics_K = carry
  return params_M, opt_state_M, [at(metrics_K, k) for k in range(len(tokens))], arrived
