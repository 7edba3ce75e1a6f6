"""The outer step: Algorithm 2 of Streaming DiLoCo (arXiv 2501.18512), line by line.

  lines 3-5   H inner steps of every replica               inner.inner_step
  line 6      is it fragment p's turn?                     Schedule.sends
  line 7      outer gradient of every replica              send
  line 8      encode it and put it on the wire             send
  line 9      was fragment p sent tau steps ago?           Schedule.arrivals
  line 10     receive all payloads, decode, average        receive, update
  line 11     step the outer optimizer                     update
  line 12     mix the outer parameters into the replicas   merge

DiLoCo is the case of one fragment, tau = 0, alpha = 0. Every fragment has its own outer
parameters and optimizer state. Fragments of equal shapes share their programs.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh

from diloco.algorithm import diagnostics, optimizers, pieces
from diloco.algorithm.fragments import outer_gradient, put, take
from diloco.algorithm.methods import warm_start
from diloco.algorithm.methods.own_outer import one_of
from diloco.algorithm.methods.radial import average
from diloco.algorithm.norms import mean_cosine, norms, products
from diloco.algorithm.optimizers import Outer, OuterTuned
from diloco.algorithm.plan import Plan
from diloco.algorithm.state import Event, OuterState
from diloco.mesh.sharding import REPLICA
from diloco.spec.fields import WireConfig
from diloco.spec.schedule import Schedule
from diloco.wire import exchange

Tree = Any


@partial(jax.jit, static_argnames=("wire", "mesh", "each"), donate_argnums=2)
def send(
  params_M: Tree,
  theta: Tree,
  codec_state: Tree,
  layers: np.ndarray,
  key: jax.Array,
  first: int = 0,
  *,
  wire: WireConfig,
  mesh: Mesh,
  each: bool = False,
) -> tuple[jax.Array, Tree, dict[str, jax.Array]]:
  """Lines 7 and 8: encodes the outer gradient of every replica; reduces nothing.

  Args:
    params_M: parameters of all replicas.
    theta: outer parameters of the fragment, on the devices.
    codec_state: compressor state of the fragment; donated.
    layers: int32 (n,), the fragment's layers.
    key: PRNG key of this step and fragment.
    first: number of the first replica; a site has only some of the replicas.
    each: whether every replica has its own theta, leaves (M, ...).

  Returns:
    Payload uint8 [M, fsdp, bytes], new codec_state, metrics float32 [M].
  """
  if not each and pieces.can_send(wire, mesh):
    payload, squares = pieces.send(params_M, theta, layers, wire, mesh)
    return payload, codec_state, _send_metrics(*jnp.sqrt(squares))
  # Line 7: outer parameters minus inner parameters, float32.
  delta_M = jax.tree.map(outer_gradient, theta, take(params_M, theta, layers))
  delta_norm_M = norms(delta_M)
  # Line 8. Each replica draws its own random numbers.
  numbers = first + jnp.arange(len(delta_norm_M))
  keys_M = jax.vmap(partial(jax.random.fold_in, key))(numbers)
  payload, codec_state = exchange.encode(wire, mesh, delta_M, codec_state, keys_M)
  # Every sender decodes its own codes to find their error; nothing is exchanged.
  like = one_of(theta) if each else theta
  sent_M = exchange.decode(wire, mesh, payload, like, (REPLICA,))
  error_norm_M = norms(jax.tree.map(jnp.subtract, sent_M, delta_M))
  return payload, codec_state, _send_metrics(delta_norm_M, error_norm_M)


def _send_metrics(
  delta_norm_M: jax.Array, error_norm_M: jax.Array
) -> dict[str, jax.Array]:
  return {
    "outer_grad_norm": delta_norm_M,
    "quantization_error": error_norm_M / jnp.maximum(delta_norm_M, 1e-30),
  }


def _update(
  theta: Tree,
  opt_state: Tree,
  payload: jax.Array,
  tuned: OuterTuned,
  weights_M: jax.Array | None = None,
  *,
  wire: WireConfig,
  outer: Outer,
  mesh: Mesh,
) -> tuple[Tree, Tree, dict[str, jax.Array]]:
  """Lines 10 and 11: decode, average in float32, step the outer optimizer.

  Args:
    theta: outer parameters of the fragment.
    opt_state: outer optimizer state of the fragment.
    payload: everyone's payloads, from `Transport.carry`.
    tuned: learning rate and momentum.
    weights_M: weights of the mean, float32 [M]; None: the plain mean. An absent site
      has the weight 0.
    mesh: `Home.mesh`, on which the outer state lies.

  Returns:
    New theta, new opt_state, metrics float32 [].
  """
  if weights_M is None and pieces.can_update(wire, outer, mesh, payload.shape[1]):
    args = (theta, opt_state, payload, tuned, wire, outer, mesh)
    theta, opt_state, products_MxM, squares = pieces.update(*args)
    (delta_norm, update_norm), cosine = jnp.sqrt(squares), mean_cosine(products_MxM)
  else:
    # Line 10.
    if wire.exchange == "psum":  # The plainest form: all-reduce decoded values.
      delta_M = exchange.decode(wire, mesh, payload, theta, (REPLICA,))
      delta, cosine = exchange.all_reduce(mesh, delta_M), jnp.float32(jnp.nan)
    else:
      delta_M = exchange.decode(wire, mesh, payload, theta, (None,))
      delta = average(delta_M, weights_M, outer)
      cosine = jnp.float32(jnp.nan)
      if weights_M is None:
        cosine = mean_cosine(products(delta_M))
    # Line 11.
    optimizer = optimizers.make_outer(outer, tuned)
    updates, opt_state = optimizer.update(delta, opt_state, theta)
    theta = optax.apply_updates(theta, updates)
    delta_norm, update_norm = optax.tree.norm(delta), optax.tree.norm(updates)
  places = optimizers.outer_shardings(outer, theta, mesh)
  theta, opt_state = jax.lax.with_sharding_constraint((theta, opt_state), places)
  metrics = {
    "outer_grad_mean_norm": delta_norm,
    "outer_update_norm": update_norm,
    "outer_grad_cosine": cosine,
  }
  return theta, opt_state, metrics


# On hosts, a thread updates a copy while the old state is in use.
update = jax.jit(_update, static_argnames=("wire", "outer", "mesh"))
update_in_place = jax.jit(
  _update, static_argnames=("wire", "outer", "mesh"), donate_argnums=(0, 1)
)


@partial(jax.jit, static_argnames="alpha", donate_argnames="params_M")
def merge(
  params_M: Tree, theta: Tree, layers: np.ndarray, mask_M: np.ndarray, *, alpha: float
) -> Tree:
  """Line 12: theta_m <- alpha theta_m + (1 - alpha) theta if mask_M[m], bool [M]."""

  def mix(x_M, t):
    mixed = t
    if alpha:
      mixed = alpha * x_M.astype(jnp.float32) + (1 - alpha) * mixed
    mask = mask_M.reshape(-1, *[1] * (t.ndim - 1))
    return jnp.where(mask, mixed.astype(x_M.dtype), x_M)

  return put(params_M, jax.tree.map(lambda t: t[None], theta), layers, mix)


def receive(plan: Plan, payload: jax.Array, theta: Tree, opt_state: Tree) -> tuple:
  """Lines 10 and 11 as one job: carries the payloads, then updates the fragment.

  Donates theta and opt_state, except on hosts.
  """
  with TraceAnnotation("exchange"):
    payload, mesh = plan.transport.carry(payload), plan.home.mesh
  step = update if plan.home.at_hosts else update_in_place
  # On devices, the mesh is set already; `jax.vmap` forbids to set it again.
  place = jax.set_mesh(mesh) if plan.home.at_hosts else contextlib.nullcontext()
  with TraceAnnotation("receive"), place:
    return step(
      theta, opt_state, payload, plan.tuned, wire=plan.wire, outer=plan.outer, mesh=mesh
    )


def send_fragment(
  plan: Plan,
  t: int,
  p: int,
  params_M: Tree,
  theta: Tree,
  codec_state: Tree,
  first: int = 0,
) -> tuple[jax.Array, Tree, dict[str, jax.Array]]:
  """Runs `send` for fragment p after step t; theta lies at home or on `home.mesh`."""
  key = plan.key(t, p)
  theta, layers = plan.home.fetch(theta), plan.layers[p]
  kind = {"wire": plan.wire, "mesh": plan.mesh}
  with TraceAnnotation("send"):
    payload, codec_state, metrics = send(
      params_M, theta, codec_state, layers, key, first, each=plan.own_outer, **kind
    )
    if plan.is_diagnosed(p, t):
      metrics |= diagnostics.of_send(params_M, theta, payload, layers, **kind)
  return payload, codec_state, metrics


def merge_fragment(
  plan: Plan, p: int, params_M: Tree, theta: Tree, mask: Sequence[bool]
) -> Tree:
  """Runs `merge` for fragment p; theta lies at home or on `home.mesh`."""
  theta, mask_M = plan.home.fetch(theta), np.asarray(mask)
  with TraceAnnotation("merge"):
    return merge(params_M, theta, plan.layers[p], mask_M, alpha=plan.alpha)


def outer_step(
  plan: Plan, t: int, params_M: Tree, state: OuterState, last_send: int | None = None
) -> tuple[Tree, OuterState, list[Event]]:
  """Runs lines 6 to 12 after inner step t.

  `params_M` and `state` are donated: use only what is returned.

  If `last_send` is given, no fragment is sent after that step, and none follows a warm
  start.
  """
  home, events, sends = plan.home, list[Event](), list[int]()
  # Line 6.
  if last_send is None or t <= last_send:
    state, events = warm_start.follow(plan, t, params_M, state)
    sends = plan.schedule.sends(t)
  for p in sends:
    # Lines 7 and 8; fragment p is in flight until it is updated.
    theta, opt_state = home.bring((state.theta[p], state.opt_state[p]))
    payload, codec_state, metrics = send_fragment(
      plan, t, p, params_M, theta, state.codec_state[p]
    )
    plan.jobs.start(p, receive, plan, payload, theta, opt_state)
    state = state.after_send(p, theta, opt_state, codec_state, payload)
    events.append(Event("send", p, t, plan.sync_bytes(p), metrics))
  # Line 9: mask says which replicas receive fragment p now.
  for p, mask in plan.schedule.arrivals(t, last_send):
    theta = state.theta[p]
    if plan.schedule.is_outer_step(p, t):
      # Lines 10 and 11, once, at the earliest arrival.
      theta, opt_state = home.bring((theta, state.opt_state[p]))
      diagnosed = plan.is_diagnosed(p, t - min(plan.schedule.taus))
      before = jax.tree.map(jnp.copy, theta) if diagnosed else None
      theta, opt_state, metrics = plan.jobs.finish(
        p, receive, plan, state.in_flight[str(p)], theta, opt_state
      )
      if diagnosed:
        metrics |= diagnostics.of_update(before, theta)
      state = state.after_update(p, *home.keep((theta, opt_state)))
      events.append(Event("receive", p, t, 0, metrics | plan.jobs.waited()))
    # Line 12.
    params_M = merge_fragment(plan, p, params_M, theta, mask)
  return params_M, state, events


def drain(
  plan: Plan,
  last: int,
  params_M: Tree,
  state: OuterState,
  final_sync: bool = False,
  step: Callable[..., tuple[Tree, OuterState, list[Event]]] = outer_step,
) -> tuple[Tree, OuterState, list[Event]]:
  """Receives the fragments in flight after the last step; then may sync all again.

  Args:
    step: the method's outer step.
  """
  events, t = list[Event](), last
  for t in range(last + 1, last + max(plan.schedule.taus) + 1):
    params_M, state, more = step(plan, t, params_M, state, last_send=last)
    events += more
  if final_sync:
    # The step t + 1 gives random numbers that no other send has used.
    now = Schedule(len(plan.fragments), 1, (0,) * plan.replicas)
    plan = dataclasses.replace(plan, schedule=now, diagnostics_every=0)
    params_M, state, more = step(plan, t + 1, params_M, state)
    events += more
  return params_M, state, events
