"""The inner step: AdamW on every replica by itself, one jitted program.

Replicas are a leading axis that DrJAX maps; nothing is exchanged between them. Of
data-parallel this axis is 1, and the gradient is reduced over the whole mesh.
"""

from collections.abc import Sequence
from typing import NamedTuple

import drjax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from diloco.algorithm.schedule import Fragment
from diloco.model import decoder as model_lib
from diloco.model import loss as loss_lib
from diloco.model.sharding import FSDP, REPLICA


class InnerMetrics(NamedTuple):
  """What every replica says of its step; each float32[M], sharded by replica."""

  loss: jax.Array  # Mean cross entropy over the replica's tokens, nats.
  grad_norm: jax.Array  # Global L2 norm before clipping.
  update_norm: jax.Array  # Global L2 norm of the parameters' change.


class Tuned(NamedTuple):
  """What a sweep varies, as arguments of the compiled step: runs share one program."""

  learning_rate: jax.Array | float  # Peak.
  weight_decay: jax.Array | float  # What decays, relative to the common factor.


def tuned(c) -> Tuned:
  """The config's values of them."""
  decay = c.inner.weight_decay
  if c.inner.weight_decay_scaling == "schedule" and c.inner.learning_rate:
    decay /= c.inner.learning_rate
  return Tuned(c.inner.learning_rate, decay)


def learning_rate(c, peak: jax.Array | float | None = None) -> optax.Schedule:
  """Linear warm-up, then a cosine to `final_fraction` of the peak at step T.

  The step that finishes as number t is taken with the rate at t - 1, so the first
  step of a warm-up has rate 0 only if warmup_steps > 0.
  """
  peak, steps = c.inner.learning_rate if peak is None else peak, c.train.steps
  warmup = min(c.inner.warmup_steps, steps)
  return optax.join_schedules(
    [
      optax.linear_schedule(0.0, peak, warmup),
      optax.cosine_decay_schedule(
        peak, max(steps - warmup, 1), alpha=c.inner.final_fraction
      ),
    ],
    [warmup],
  )


def make_optimizer(c, values: Tuned | None = None) -> optax.GradientTransformation:
  """AdamW on clipped gradients (2501.18512, 3.2; 2503.09799, 3).

  Decoupled weight decay, by default lambda = 1/T multiplied by the schedule
  relative to its peak: dividing it by the peak before the common factor of the
  rate does that (Wang & Aitchison, 2024). With `rate` it is multiplied by the rate.
  """
  values = values or tuned(c)
  clip = optax.clip_by_global_norm(c.inner.clip_norm)
  return optax.chain(
    clip if c.inner.clip_norm else optax.identity(),
    optax.scale_by_adam(c.inner.b1, c.inner.b2, c.inner.eps),
    optax.add_decayed_weights(values.weight_decay),
    optax.scale_by_learning_rate(learning_rate(c, values.learning_rate)),
  )


def make_inner_step(c):
  """Builds the jitted step of all replicas.

  Args:
    c: resolved config.

  Returns:
    step(params, opt_state, tokens_MxBxL, trainable, values=None) -> (params,
    opt_state, InnerMetrics). Params and optimizer state lead with M and are donated.
    `trainable` is None or FedPart's mask, see `fedpart_mask`; `values` are `Tuned`,
    the config's if None.
  """
  dims = model_lib.ModelDims.from_config(c, batch_axes=(FSDP,))
  accumulate = c.train.accumulate

  def loss_fn(params, tokens_BxL):
    x_BxLxD = model_lib.hidden_states(dims, params, model_lib.shift_right(tokens_BxL))
    weights_BxL = jnp.ones(tokens_BxL.shape, jnp.float32)
    nll, z2 = loss_lib.token_losses(
      x_BxLxD,
      params["embed"]["tokens"],
      tokens_BxL,
      weights_BxL,
      c.model.loss_chunk,
      batch_axes=(FSDP,),
    )
    return (nll + c.model.z_loss * z2) / tokens_BxL.size, nll / tokens_BxL.size

  def gradients(params, tokens_BxL):
    grad_fn = jax.grad(loss_fn, has_aux=True)
    if accumulate == 1:
      return grad_fn(params, tokens_BxL)
    # Every `accumulate`-th sequence forms a microbatch, so that each of them has its
    # share of every fsdp shard of B.
    micro = tokens_BxL.reshape(-1, accumulate, tokens_BxL.shape[1]).swapaxes(0, 1)

    def body(total, tokens):
      return jax.tree.map(jnp.add, total, grad_fn(params, tokens)), None

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(grad_fn, params, micro[0]))
    total, _ = jax.lax.scan(body, zeros, micro)
    return jax.tree.map(lambda x: x / accumulate, total)

  def mean_of(sent, nll):
    means, nll = jax.lax.pmean((sent, nll), REPLICA)
    return jax.tree.map(lambda x: x.astype(c.model.param_dtype), means), nll

  def mean_widened(sent, nll):
    # XLA for CPUs widens what is reduced in 16 bits itself, and aborts doing so here.
    return mean_of(jax.tree.map(jnp.float32, sent), nll)

  def mean_gradients(params, tokens_BxL):
    # By hand: left to itself, XLA reduces the tied embedding's two gradients apart.
    def mean(params, tokens_BxL):
      grads, nll = gradients(params, tokens_BxL)
      sent = jax.tree.map(lambda g: g.astype(c.inner.gradient_dtype), grads)
      return jax.lax.platform_dependent(sent, nll, cpu=mean_widened, default=mean_of)

    whole, rows = P(), P(REPLICA)
    return jax.shard_map(
      mean,
      in_specs=(whole, rows),
      out_specs=whole,
      axis_names={REPLICA},
      check_vma=False,
    )(params, tokens_BxL)

  data_parallel = c.algorithm == "data_parallel"
  gradients_of_step = mean_gradients if data_parallel else gradients

  def replica_step(params, opt_state, tokens_BxL, trainable, values):
    grads, nll = gradients_of_step(params, tokens_BxL)
    optimizer = make_optimizer(c, values)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    if trainable is not None:
      updates = jax.tree.map(jnp.multiply, updates, trainable)
    metrics = InnerMetrics(nll, optax.tree.norm(grads), optax.tree.norm(updates))
    return optax.apply_updates(params, updates), opt_state, metrics

  def step(params, opt_state, tokens_MxBxL, trainable, values=None):
    def one(params, opt_state, tokens_BxL):
      return replica_step(params, opt_state, tokens_BxL, trainable, values)

    args = (params, opt_state, tokens_MxBxL)
    # The one model of data-parallel is not placed on a replica.
    return jax.vmap(one)(*args) if data_parallel else drjax.map_fn(one, args)

  if not data_parallel:
    step = drjax.program(placements={REPLICA: c.replicas})(step)
  return jax.jit(step, donate_argnums=(0, 1))


def fedpart_mask(params, fragments: Sequence[Fragment]) -> dict:
  """FedPart's mask (2501.18512, 3.3.1): 1 where a fragment trains, else 0.

  Args:
    params: one replica's parameters or their shapes.
    fragments: those that are sent next, together.

  Returns:
    A tree like `params` of NumPy arrays; under `blocks` float32 (N, 1, ...), else a
    scalar. The program takes it as an argument, so it is compiled once for all.
  """
  layers_N = np.zeros(jax.tree.leaves(params["blocks"])[0].shape[0], np.float32)
  layers_N[[n for fragment in fragments for n in fragment.layers]] = 1
  embed = np.float32(any(fragment.embed for fragment in fragments))
  return {
    "blocks": jax.tree.map(
      lambda x: layers_N.reshape(-1, *[1] * (x.ndim - 1)), params["blocks"]
    ),
    "embed": jax.tree.map(lambda _: embed, params["embed"]),
  }
