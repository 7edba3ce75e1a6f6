"""Computes cross entropy and z-loss of every token, in chunks of positions.

Letters: B sequences, L positions, C positions per chunk, T = B*C tokens, D width, V
vocabulary.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from diloco.mesh import sharding

Axes = tuple[str, ...]


def token_losses(
  x_BxLxD: jax.Array,
  head_VxD: jax.Array,
  targets_BxL: jax.Array,
  chunk: int = 0,
  batch_axes: Axes = (),
) -> tuple[jax.Array, jax.Array]:
  """Computes cross entropy and squared log-partition of every token.

  Logits are float32 for every compute dtype. With `chunk`, at most B*C*V logits exist
  at once. To train, use `objective`: its gradient needs no second forward pass.

  Args:
    x_BxLxD: hidden states.
    head_VxD: weights of the head; cast to the dtype of the hidden states.
    targets_BxL: int32 ids to predict.
    chunk: positions C per chunk, a divisor of L; 0: all positions are one chunk.
    batch_axes: mesh axes that shard B; the logits keep this sharding. Without it, XLA
      may shard the vocabulary over the replicas, with an all-to-all per chunk.

  Returns:
    (-log p(target) in nats, log(Z)^2), float32 [B, L] each.
  """
  head_VxD = head_VxD.astype(x_BxLxD.dtype)

  def losses(x_BxCxD: jax.Array, targets_BxC: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits_TxV, target_T = _logits(x_BxCxD, head_VxD, targets_BxC, batch_axes)
    log_z_T = jax.nn.logsumexp(logits_TxV, axis=-1)
    shape = targets_BxC.shape
    return (log_z_T - target_T).reshape(shape), jnp.square(log_z_T).reshape(shape)

  chunks = _chunks(x_BxLxD, chunk), _chunks(targets_BxL, chunk)
  nll, z2 = jax.lax.map(lambda args: losses(*args), chunks)
  return _join(nll), _join(z2)


def mean_objective(
  nll_BxL: jax.Array, z2_BxL: jax.Array, z_loss: float
) -> tuple[jax.Array, jax.Array]:
  """Returns two means over the tokens: of nll + z_loss * log(Z)^2, and of nll."""
  nll = nll_BxL.mean()
  return nll + z_loss * z2_BxL.mean(), nll


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def objective(
  x_BxLxD: jax.Array,
  head_VxD: jax.Array,
  targets_BxL: jax.Array,
  z_loss: float,
  chunk: int = 0,
  batch_axes: Axes = (),
) -> tuple[jax.Array, jax.Array]:
  """Computes the objective of training: `mean_objective` of `token_losses`.

  The forward pass also forms the gradient of the logits, chunk by chunk, and multiplies
  it by the head and by the hidden states: three matrix products per chunk. A backward
  pass that starts from the losses would compute the logits again. Products accumulate
  in float32. The mean cross entropy has no gradient.

  Args:
    x_BxLxD, head_VxD, targets_BxL, chunk, batch_axes: as in `token_losses`.
    z_loss: weight of log(Z)^2.

  Returns:
    Mean objective and mean cross entropy, float32 [] each.
  """
  losses = token_losses(x_BxLxD, head_VxD, targets_BxL, chunk, batch_axes)
  return mean_objective(*losses, z_loss)


# ((objective, mean cross entropy), the objective's gradients by hidden states and head)
WithGradients = tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _forward(
  x_BxLxD: jax.Array,
  head_VxD: jax.Array,
  targets_BxL: jax.Array,
  z_loss: float,
  chunk: int,
  batch_axes: Axes,
) -> WithGradients:
  rest = (targets_BxL.size, z_loss, chunk, batch_axes)
  local: Callable[..., WithGradients] = functools.partial(_local, *rest)
  if batch_axes:
    # Each device adds up its chunks; then one reduction adds up the devices' sums.
    one, rows = P(), P(batch_axes)
    specs = (rows, one, rows), ((one, one), (rows, one))
    local = sharding.on_each_device(local, *specs)
  return local(x_BxLxD, head_VxD, targets_BxL)


def _local(
  tokens: int,
  z_loss: float,
  chunk: int,
  axes: Axes,
  x_BxLxD: jax.Array,
  head_VxD: jax.Array,
  targets_BxL: jax.Array,
) -> WithGradients:
  """Returns the outputs and the gradients of `objective` for one shard of B.

  Args: as in `objective`, and `tokens`, the number of tokens of all shards.
  """
  w_VxD = head_VxD.astype(x_BxLxD.dtype)
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def body(
    grad_DxV: jax.Array, args: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, tuple[tuple[jax.Array, jax.Array], jax.Array]]:
    x_BxCxD, targets_BxC = args
    logits_TxV, target_T = _logits(x_BxCxD, w_VxD, targets_BxC)
    highest_T = logits_TxV.max(axis=-1)
    exp_TxV = _kept(jnp.exp(logits_TxV - highest_T[:, None]))
    z_T = exp_TxV.sum(axis=-1)
    log_z_T = jnp.log(z_T) + highest_T
    # d nll / d logits is p - onehot, and d log(Z)^2 / d logits is 2 log(Z) p.
    p_TxV = exp_TxV * ((1 + 2 * z_loss * log_z_T) / z_T)[:, None]
    hit_TxV = jnp.arange(len(w_VxD)) == targets_BxC.reshape(-1, 1)
    g_TxV = ((p_TxV - hit_TxV) / tokens).astype(w_VxD.dtype)
    grad_TxD = dot("tv,vd->td", g_TxV, w_VxD).astype(w_VxD.dtype)
    # XLA for CPU is fast at this product only if the transposed arrays, here and after
    # the loop, are separate arrays in memory.
    x_DxT = jax.lax.optimization_barrier(x_BxCxD.reshape(grad_TxD.shape).T)
    grad_DxV += dot("dt,tv->dv", x_DxT, g_TxV)
    sums = (log_z_T - target_T).sum(), jnp.square(log_z_T).sum()
    return grad_DxV, (sums, grad_TxD.reshape(x_BxCxD.shape))

  grad_DxV = jnp.zeros(w_VxD.shape[::-1], jnp.float32)
  chunks = _chunks(x_BxLxD, chunk), _chunks(targets_BxL, chunk)
  grad_DxV, (sums, grad_x) = jax.lax.scan(body, grad_DxV, chunks)
  nll, z2 = (jnp.sum(a) / tokens for a in sums)
  if axes:
    nll, z2, grad_DxV = jax.lax.psum((nll, z2, grad_DxV), axes)
  grad_VxD = jax.lax.optimization_barrier(grad_DxV).T
  grads = _join(grad_x), grad_VxD.astype(head_VxD.dtype)
  return (nll + z_loss * z2, nll), grads


def _backward(
  z_loss: float,
  chunk: int,
  batch_axes: Axes,
  grads: tuple[jax.Array, jax.Array],
  cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array | None, ...]:
  del z_loss, chunk, batch_axes
  scale, _ = cotangents
  return *((scale * g).astype(g.dtype) for g in grads), None


objective.defvjp(_forward, _backward)


def _logits(
  x_BxCxD: jax.Array, w_VxD: jax.Array, targets_BxC: jax.Array, batch_axes: Axes = ()
) -> tuple[jax.Array, jax.Array]:
  """Returns the logits of all ids (T, V) and of the targets (T,), float32."""
  # XLA for CPU is slow at the gradients of products with more than two axes.
  x_TxD, targets_T = x_BxCxD.reshape(-1, x_BxCxD.shape[-1]), targets_BxC.reshape(-1)
  logits_TxV = jnp.einsum("td,vd->tv", x_TxD, w_VxD, preferred_element_type=jnp.float32)
  if batch_axes:
    logits_TxV = jax.lax.with_sharding_constraint(logits_TxV, P(batch_axes))
  return logits_TxV, jnp.take_along_axis(logits_TxV, targets_T[:, None], axis=-1)[:, 0]


def _kept(a: jax.Array) -> jax.Array:
  """On CPUs, keeps values that XLA would compute again for each use."""
  barrier = jax.lax.optimization_barrier
  return jax.lax.platform_dependent(a, cpu=barrier, default=lambda a: a)


def _chunks(a: jax.Array, chunk: int) -> jax.Array:
  """Splits (B, L, ...) into (L / C, B, C, ...); B stays whole, as it may be sharded."""
  split = a.reshape(a.shape[0], -1, chunk or a.shape[1], *a.shape[2:])
  return jnp.moveaxis(split, 1, 0)


def _join(a: jax.Array) -> jax.Array:
  """Joins (L / C, B, C, ...) to (B, L, ...)."""
  return jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:])
