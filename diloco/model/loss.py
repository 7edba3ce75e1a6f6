"""Cross entropy with z-loss against the tied head, in chunks of positions.

Letters: B sequences, L positions, C positions per chunk, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def token_losses(
  x_BxLxD: jax.Array,
  head_VxD: jax.Array,
  targets_BxL: jax.Array,
  weights_BxL: jax.Array,
  chunk: int = 0,
  batch_axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
  """Sums of the cross entropy and of the squared log-partition over tokens.

  Logits are float32 whatever the compute dtype. With `chunk`, at most B*C*V of them
  exist at once, in the backward pass too: they are computed again there.

  Args:
    x_BxLxD: hidden states.
    head_VxD: embedding that serves as the head.
    targets_BxL: int32 ids to predict.
    weights_BxL: float32 weight of each token.
    chunk: positions C per chunk, a divisor of L; 0 takes all at once.
    batch_axes: mesh axes over which B lies; logits are held to them. Without it XLA
      may split the vocabulary of a chunk over the replicas, an all-to-all per chunk.

  Returns:
    (sum of -log p(target) in nats, sum of log(Z)^2), float32 scalars.
  """
  head_VxD = head_VxD.astype(x_BxLxD.dtype)

  def sums(x_BxCxD, targets_BxC, weights_BxC):
    logits_BxCxV = jnp.einsum(
      "bcd,vd->bcv", x_BxCxD, head_VxD, preferred_element_type=jnp.float32
    )
    if batch_axes:
      logits_BxCxV = jax.lax.with_sharding_constraint(logits_BxCxV, P(batch_axes))
    log_z_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1)
    target_BxC = jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], axis=-1)
    nll_BxC = log_z_BxC - target_BxC[..., 0]
    return (nll_BxC * weights_BxC).sum(), (log_z_BxC**2 * weights_BxC).sum()

  length = x_BxLxD.shape[1]
  if not chunk or chunk == length:
    return sums(x_BxLxD, targets_BxL, weights_BxL)

  def chunks(a):  # Positions are split, sequences stay where they are sharded.
    split = a.reshape(a.shape[0], length // chunk, chunk, *a.shape[2:])
    return jnp.moveaxis(split, 1, 0)

  def body(carry, args):
    nll, z2 = jax.checkpoint(sums)(*args)
    return (carry[0] + nll, carry[1] + z2), None

  zero = jnp.zeros((), jnp.float32)
  total, _ = jax.lax.scan(
    body, (zero, zero), (chunks(x_BxLxD), chunks(targets_BxL), chunks(weights_BxL))
  )
  return total
