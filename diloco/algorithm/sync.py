"""When the outer step happens: the walk over the schedule (2501.18512, Algorithm 2).

After every inner step fragments are sent and received as `diloco.fragments.Schedule`
says; what that computes is in `diloco.outer`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.algorithm.outer import Outer, OuterState
from diloco.wire import exchange

Tree = Any


@dataclasses.dataclass(frozen=True)
class Event:
  """A send or a receive of one fragment, with its device-side metrics."""

  kind: str  # "send" or "receive"
  fragment: int
  step: int
  payload_bytes: int  # One replica's part in the exchange; 0 for a receive.
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
      state, theta, event = receive_fragment(outer, t, p, state)
      events.append(event)
    else:  # A replica with a larger tau: the update was at an earlier step.
      theta = outer.transport.fetch(state.theta[p])
    params_M = outer.merge(params_M, theta, outer.layers[p], np.asarray(mask))
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
  outer: Outer, last: int, params_M: Tree, state: OuterState
) -> tuple[Tree, OuterState, list[Event]]:
  """Synchronises every fragment at once, after `drain` (outer.final_sync).

  It has a step of its own, the one after the last arrival: at `last` fragments may
  have been sent by the schedule, whose random numbers and records these are not.
  """
  events = []
  t = last + max(outer.schedule.taus) + 1
  everyone = np.ones(len(outer.schedule.taus), bool)
  for p in range(len(outer.fragments)):
    state, sent = send_fragment(outer, t, p, params_M, state)
    state, theta, received = receive_fragment(outer, t, p, state)
    params_M = outer.merge(params_M, theta, outer.layers[p], everyone)
    events += [sent, received]
  return params_M, state, events


def send_fragment(
  outer: Outer, t: int, p: int, params_M: Tree, state: OuterState
) -> tuple[OuterState, Event]:
  """Puts fragment p's outer gradients on the wire."""
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(outer.seed), t), p)
  theta = outer.transport.fetch(state.theta[p])
  payload, metrics = outer.send(params_M, theta, outer.layers[p], key)
  outer.transport.start(p, payload, theta, state.theta[p], state.opt_state[p])
  in_flight = {**state.in_flight, str(p): payload}
  state = OuterState(state.theta, state.opt_state, in_flight)
  size = payload.nbytes // payload.shape[0]
  if outer.exchange == "psum":
    size = exchange.reduced_bytes(outer.transport.mesh, theta)
  return state, Event("send", p, t, size, metrics)


def receive_fragment(
  outer: Outer, t: int, p: int, state: OuterState
) -> tuple[OuterState, Tree, Event]:
  """Applies fragment p's mean outer gradient to its outer parameters.

  Returns:
    The new outer state, the fragment's outer parameters on the devices, and the event.
  """
  in_flight = dict(state.in_flight)
  payload = in_flight.pop(str(p))
  theta, opt_state, on_devices, metrics = outer.transport.finish(
    p, payload, state.theta[p], state.opt_state[p]
  )
  state = OuterState(
    theta=_replace(state.theta, p, theta),
    opt_state=_replace(state.opt_state, p, opt_state),
    in_flight=in_flight,
  )
  return state, on_devices, Event("receive", p, t, 0, metrics)


def make_hidden_exchange(inner_step, mesh):
  """Builds the program that runs inner steps while payloads are exchanged.

  Nothing waits for the exchange until the steps are done, so that XLA can run it
  beside them.

  Args:
    inner_step: from `diloco.inner.make_inner_step`.
    mesh: the device mesh.

  Returns:
    steps(count, params, opt_state, tokens, trainable, payloads, values=None) ->
    (params, opt_state, [InnerMetrics of each step], transmitted payloads). `tokens`
    holds [M, B, L] of each of `count` steps and, that one program does for all counts,
    of any others after them; as many metrics come back. `payloads` is what was sent
    just before the first step. Params and optimizer state are donated.
  """

  def steps(count, params, opt_state, tokens, trainable, payloads, values=None):
    received = [exchange.start(mesh, payload) for payload in payloads]

    tokens_K = jnp.stack(tokens)
    shapes = jax.eval_shape(inner_step, params, opt_state, tokens[0], trainable)[2]
    zeros = lambda x: jnp.zeros((len(tokens), *x.shape), x.dtype)
    metrics = jax.tree.map(zeros, shapes)

    def step(k, carry):
      params, opt_state, metrics = carry
      tokens_MxBxL = at(tokens_K, k)
      params, opt_state, of_step = inner_step(
        params, opt_state, tokens_MxBxL, trainable, values
      )
      put = lambda x_K, x: x_K.at[k].set(x)
      return params, opt_state, jax.tree.map(put, metrics, of_step)

    # XLA must not see how many steps there are: it would dissolve a loop of one, and
    # begin the exchange when its layers are done.
    carry = jax.lax.fori_loop(0, count, step, (params, opt_state, metrics))
    # Without it XLA may wait for the exchange before the steps.
    carry, received = jax.lax.optimization_barrier((carry, received))
    arrived = [exchange.finish(mesh, x, r) for x, r in zip(payloads, received)]
    params, opt_state, metrics = carry
    by_step = [at(metrics, k) for k in range(len(tokens))]
    return params, opt_state, by_step, arrived

  def at(tree_K, k):
    return jax.tree.map(lambda x_K: x_K[k], tree_K)

  return jax.jit(steps, donate_argnums=(1, 2))


def hide_exchange(outer: Outer, t: int, state: OuterState, program):
  """Runs inner steps after t beside the exchange of what was sent at the end of t.

  Args:
    outer: from `make_outer`.
    t: finished inner steps.
    state: outer state, with payloads uint8 [M, fsdp, bytes] that were just encoded.
    program: function from payloads to (params, opt_state, metrics, transmitted
      payloads): that of `make_hidden_exchange`, given all else.

  Returns:
    (params, opt_state, metrics, outer state with the transmitted payloads).
  """
  sent = [str(p) for p in outer.schedule.sends(t)]
  params_M, opt_state_M, metrics, arrived = program([state.in_flight[p] for p in sent])
  in_flight = {**state.in_flight, **dict(zip(sent, arrived))}
  state = dataclasses.replace(state, in_flight=in_flight)
  return params_M, opt_state_M, metrics, state


def publish(outer: Outer, state: OuterState) -> OuterState:
  """Outer state as all processes can save it together, once nothing is exchanged."""
  outer.transport.settle()
  theta, opt_state = outer.transport.publish((state.theta, state.opt_state))
  return OuterState(theta, opt_state, state.in_flight)


def published(outer: Outer, shapes: OuterState) -> OuterState:
  """Shapes of what `publish` returns, of outer state as it lies on the devices."""
  theta, opt_state = outer.transport.published((shapes.theta, shapes.opt_state))
  return OuterState(theta, opt_state, shapes.in_flight)


def adopt(outer: Outer, state: OuterState) -> OuterState:
  """The inverse of `publish`."""
  theta, opt_state = outer.transport.adopt((state.theta, state.opt_state))
  return OuterState(theta, opt_state, state.in_flight)


def payload_struct(outer: Outer, p: int, params_M: Tree, theta: Tree):
  """Shape, type and sharding of fragment p's payload; nothing is computed.

  Args:
    outer: from `make_outer`.
    p: the fragment.
    params_M: parameters of all replicas, or their shapes.
    theta: the outer parameters of the fragment, or their shapes.
  """

  def send(params_M, theta):
    return outer.send(params_M, theta, outer.layers[p], jax.random.key(0))[0]

  # Shapes alone: outer parameters may lie at the host.
  shapes = lambda tree: jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree
  )
  payload = jax.eval_shape(send, shapes(params_M), shapes(theta))
  place = outer.transport.encoded
  return jax.ShapeDtypeStruct(payload.shape, payload.dtype, sharding=place)


def _replace(items: tuple, index: int, item) -> tuple:
  return (*items[:index], item, *items[index + 1 :])
