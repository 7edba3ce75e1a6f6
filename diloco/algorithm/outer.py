"""The outer step: Algorithm 2 of Streaming DiLoCo (arXiv 2501.18512), line by line.

  lines 3-5   H inner steps of every replica               inner.inner_step
  line 6      is it fragment p's turn?                     Schedule.sends
  line 7      outer gradient of every replica              send
  line 8      encode it and put it on the wire             send
  line 9      was fragment p sent tau steps ago?           Schedule.arrivals
  line 10     receive all payloads, decode, average        update
  line 11     step the outer optimizer                     update
  line 12     mix the outer parameters into the replicas   merge

DiLoCo is the case of one fragment, tau = 0, alpha = 0. Every fragment has its own outer
parameters and optimizer state. `send` and `update` define the computation. `fused.py`
has faster forms of these two functions; the results differ by rounding only.
"""

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from diloco.algorithm import optimizers, sync_metrics
from diloco.algorithm.optimizers import Outer, OuterTuned
from diloco.algorithm.slices import outer_gradient, put, take
from diloco.algorithm.state import Event, OuterState
from diloco.algorithm.sync_metrics import Metrics
from diloco.mesh.sharding import REPLICA
from diloco.spec import plugins
from diloco.spec.fields import WireConfig
from diloco.util.types import PyTree
from diloco.wire import exchange

if TYPE_CHECKING:
  from diloco.algorithm.streaming import Streaming


def outer_step(
  sync: "Streaming",
  t: int,
  params_M: PyTree,
  state: OuterState,
  last_send: int | None = None,
) -> tuple[PyTree, OuterState, list[Event]]:
  """Runs lines 6 to 12 after inner step t.

  `params_M` and `state` are donated: use only the returned parameters and state.

  Args:
    sync: its `send`, `receive` and `merge` know where the arrays lie.
    last_send: the last step after which fragments are sent; None: no last step.
  """
  events = list[Event]()
  for p in sync.schedule.sends(t, last_send):  # Line 6.
    state, sent = sync.send(t, p, params_M, state)  # Lines 7 and 8.
    events.append(Event("send", p, t, sync.sync_bytes(p), sent))
  for i, (p, mask) in enumerate(sync.schedule.arrivals(t, last_send)):  # Line 9.
    if i and sync.transport.waits:  # In a final sync, all fragments arrive at once.
      jax.block_until_ready(params_M)
    theta = state.theta[p]
    if sync.schedule.is_outer_step(p, t):  # True only at p's first arrival.
      state, theta, received = sync.receive(p, state)  # Lines 10 and 11.
      events.append(Event("receive", p, t, 0, received))
    params_M = sync.merge(p, params_M, theta, mask)  # Line 12.
  return params_M, state, events


@partial(jax.jit, static_argnames=("wire", "mesh"), donate_argnums=2)
def send(
  params_M: PyTree,
  theta: PyTree,
  codec_state: PyTree,
  layers: np.ndarray,
  key: jax.Array,
  first: int = 0,
  *,
  wire: WireConfig,
  mesh: Mesh,
) -> tuple[jax.Array, PyTree, Metrics]:
  """Lines 7 and 8: encodes every replica's outer gradient; replicas exchange nothing.

  Args:
    params_M: parameters of all replicas.
    theta: outer parameters of the fragment, on the devices.
    codec_state: compressor state of the fragment; donated.
    layers: int32 (n,), the fragment's layers.
    key: PRNG key of this step and fragment.
    first: index of params_M's first replica among all replicas of the run.

  Returns:
    Payload uint8 [M, fsdp, bytes], new codec_state, metrics float32 [M].
  """
  # Line 7: outer parameters minus inner parameters, float32.
  delta_M = jax.tree.map(outer_gradient, theta, take(params_M, theta, layers))
  # Line 8 of Algorithm 2. Each replica draws its own random numbers.
  numbers = first + jnp.arange(len(jax.tree.leaves(delta_M)[0]))
  keys_M = jax.vmap(partial(jax.random.fold_in, key))(numbers)
  payload, codec_state = exchange.encode(wire, mesh, delta_M, codec_state, keys_M)
  return payload, codec_state, sync_metrics.of_send(wire, mesh, delta_M, payload)


def _update(
  theta: PyTree,
  opt_state: PyTree,
  payload: jax.Array,
  tuned: OuterTuned,
  weights_M: jax.Array | None = None,
  *,
  wire: WireConfig,
  outer: Outer,
  mesh: Mesh,
) -> tuple[PyTree, PyTree, Metrics]:
  """Lines 10 and 11: decodes, averages in float32, runs the outer optimizer.

  Args:
    theta: outer parameters of the fragment.
    opt_state: outer optimizer state of the fragment.
    payload: the payloads of all replicas, from `transport.carry`.
    tuned: learning rate and momentum.
    weights_M: weights of the mean, float32 [M]; None: the plain mean. An absent
      replica has the weight 0.
    mesh: `Streaming.place.mesh`, on which the outer state lies.

  Returns:
    New theta, new opt_state, metrics float32 [].
  """
  # Line 10.
  if wire.exchange == "psum":  # The simplest form: an all-reduce of decoded values.
    delta_M = exchange.decode(wire, mesh, payload, theta, (REPLICA,))
    delta, cosine = exchange.all_reduce(mesh, delta_M), None
  else:
    delta_M = exchange.decode(wire, mesh, payload, theta, (None,))
    delta = average(delta_M, weights_M, outer)
    plain = weights_M is None
    cosine = sync_metrics.mean_cosine(sync_metrics.products(delta_M)) if plain else None
  # Line 11.
  step, opt_state = optimizers.make_outer(outer, tuned).update(delta, opt_state, theta)
  theta = optax.apply_updates(theta, step)
  places = optimizers.outer_shardings(outer, theta, mesh)
  theta, opt_state = jax.lax.with_sharding_constraint((theta, opt_state), places)
  norms = optax.tree.norm(delta), optax.tree.norm(step)
  return theta, opt_state, sync_metrics.of_update(*norms, cosine)


def average(delta_M: PyTree, weights_M: jax.Array | None, outer: Outer) -> PyTree:
  """Averages outer gradients over the replicas as the field outer.average says.

  Args:
    delta_M: decoded outer gradients of a fragment, float32, leaves (M, ...).
    weights_M: float32 [M], 0 for an absent replica; None: all replicas count equally.

  Returns:
    Float32 leaves (...).
  """
  registered = plugins.NAMES["outer.average"].get(getattr(outer, "average", "mean"))
  plain = partial(mean, weights_M=weights_M)
  return registered(delta_M, weights_M) if registered else jax.tree.map(plain, delta_M)


def mean(x_M: jax.Array, weights_M: jax.Array | None) -> jax.Array:
  """Averages float32 (M, ...) over M, with weights float32 [M] if they are given."""
  if weights_M is None:
    return x_M.mean(axis=0)
  return jnp.tensordot(weights_M / weights_M.sum(), present(x_M, weights_M), axes=1)


def present(x_M: jax.Array, weights_M: jax.Array) -> jax.Array:
  """Sets an absent replica's values to 0: its payload may decode to any values."""
  return jnp.where((weights_M > 0).reshape(-1, *[1] * (x_M.ndim - 1)), x_M, 0)


# `update` donates nothing: a host's thread runs it while the old state is in use.
_jit = partial(jax.jit, static_argnames=("wire", "outer", "mesh"))
update, update_in_place = _jit(_update), _jit(_update, donate_argnums=(0, 1))


@partial(jax.jit, static_argnames="alpha", donate_argnames="params_M")
def merge(
  params_M: PyTree,
  theta: PyTree,
  layers: np.ndarray,
  mask_M: np.ndarray,
  *,
  alpha: float,
) -> PyTree:
  """Line 12: if mask_M[m], theta_m <- alpha theta_m + (1 - alpha) theta.

  Args:
    params_M: parameters of all replicas, leaves (M, N, ...) and (M, ...); donated.
    theta: the fragment's outer parameters, float32, leaves (n, ...) and (...).
    layers: int32 (n,), the fragment's layers.
    mask_M: bool [M].

  Returns:
    The parameters of all replicas, with the dtypes of `params_M`.
  """

  def mix(x_M: jax.Array, t: jax.Array) -> jax.Array:
    mixed = alpha * x_M.astype(jnp.float32) + (1 - alpha) * t if alpha else t
    mask = mask_M.reshape(-1, *[1] * (t.ndim - 1))
    return jnp.where(mask, mixed.astype(x_M.dtype), x_M)

  return put(params_M, jax.tree.map(lambda t: t[None], theta), layers, mix)
