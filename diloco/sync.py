"""When the outer step happens: the walk over the schedule (2501.18512, Algorithm 2).

After every inner step fragments are sent and received as `diloco.fragments.Schedule`
says; what that computes is in `diloco.outer`.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from diloco.outer import Outer, OuterState

Tree = Any


@dataclasses.dataclass(frozen=True)
class Event:
  """A send or a receive of one fragment, with its device-side metrics."""

  kind: str  # "send" or "receive"
  fragment: int
  step: int
  payload_bytes: int  # Of one replica; 0 for a receive.
  metrics: dict[str, jax.Array]


def outer_step(
  outer: Outer,
  t: int,
  params_M: Tree,
  state: OuterState,
  last_send: int | None = None,
) -> tuple[Tree, OuterState, list[Event]]:
  """What happens between replicas after inner step t (Algorithm 2, lines 6-12).

  Args:
    outer: from `make_outer`.
    t: finished inner steps.
    params_M: parameters of all replicas; donated if a fragment arrives.
    state: outer state; the fragments that arrive are donated.
    last_send: step after which nothing is sent, None while training.

  Returns:
    New parameters, new outer state, and what happened.
  """
  events = []
  if last_send is None or t <= last_send:
    for p in outer.schedule.sends(t):
      state, event = send_fragment(outer, t, p, params_M, state)
      events.append(event)
  for p, mask in outer.schedule.arrivals(t, last_send):
    if outer.schedule.is_outer_step(p, t):
      state, event = receive_fragment(outer, t, p, state)
      events.append(event)
    params_M = outer.merge(params_M, state.theta[p], outer.layers[p], np.asarray(mask))
  return params_M, state, events


def drain(
  outer: Outer, last: int, params_M: Tree, state: OuterState
) -> tuple[Tree, OuterState, list[Event]]:
  """Receives what is still in flight after the last inner step."""
  events = []
  for t in range(last + 1, last + max(outer.schedule.taus) + 1):
    params_M, state, more = outer_step(outer, t, params_M, state, last_send=last)
    events += more
  return params_M, state, events


def sync_all(
  outer: Outer, t: int, params_M: Tree, state: OuterState
) -> tuple[Tree, OuterState, list[Event]]:
  """Synchronises every fragment at once, after `drain` (outer.final_sync)."""
  events = []
  everyone = np.ones(len(outer.schedule.taus), bool)
  for p in range(len(outer.fragments)):
    state, sent = send_fragment(outer, t, p, params_M, state)
    state, received = receive_fragment(outer, t, p, state)
    params_M = outer.merge(params_M, state.theta[p], outer.layers[p], everyone)
    events += [sent, received]
  return params_M, state, events


def send_fragment(
  outer: Outer, t: int, p: int, params_M: Tree, state: OuterState
) -> tuple[OuterState, Event]:
  """Puts fragment p's outer gradients on the wire."""
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(outer.seed), t), p)
  payload, metrics = outer.send(params_M, state.theta[p], outer.layers[p], key)
  in_flight = {**state.in_flight, str(p): payload}
  state = OuterState(state.theta, state.opt_state, in_flight)
  size = payload.nbytes // payload.shape[0]
  return state, Event("send", p, t, size, metrics)


def receive_fragment(
  outer: Outer, t: int, p: int, state: OuterState
) -> tuple[OuterState, Event]:
  """Applies fragment p's mean outer gradient to its outer parameters."""
  in_flight = dict(state.in_flight)
  theta, opt_state, metrics = outer.update(
    state.theta[p], state.opt_state[p], in_flight.pop(str(p))
  )
  state = OuterState(
    theta=_replace(state.theta, p, theta),
    opt_state=_replace(state.opt_state, p, opt_state),
    in_flight=in_flight,
  )
  return state, Event("receive", p, t, 0, metrics)


def payload_struct(outer: Outer, p: int, params_M: Tree, state: OuterState):
  """Shape, type and sharding of fragment p's payload; nothing is computed."""
  key = jax.eval_shape(lambda: jax.random.key(0))
  payload, _ = jax.eval_shape(
    outer.send, params_M, state.theta[p], outer.layers[p], key
  )
  return jax.ShapeDtypeStruct(
    payload.shape, payload.dtype, sharding=outer.payload_sharding
  )


def _replace(items: tuple, index: int, item) -> tuple:
  return (*items[:index], item, *items[index + 1 :])
