"""Cross entropy and z-loss of every token, in chunks of positions.

Letters: B sequences, L positions, C positions per chunk, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def token_losses(
  x_BxLxD: jax.Array,
  head_VxD: jax.Array,
  targets_BxL: jax.Array,
  chunk: int = 0,
  batch_axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
  """Computes cross entropy and squared log-partition of every token.

  Logits are float32 for every compute dtype. With `chunk`, at most B*C*V logits exist
  at once; the backward pass recomputes them.

  Args:
    x_BxLxD: hidden states.
    head_VxD: weights of the head; cast to the dtype of the hidden states.
    targets_BxL: int32 ids to predict.
    chunk: positions C per chunk, a divisor of L; 0 takes all at once.
    batch_axes: mesh axes that shard B; the logits keep this sharding. Otherwise XLA may
      shard the vocabulary over the replicas, with an all-to-all per chunk.

  Returns:
    (-log p(target) in nats, log(Z)^2), float32 [B, L] each.
  """
  head_VxD = head_VxD.astype(x_BxLxD.dtype)

  def losses(x_BxCxD, targets_BxC):
    logits_BxCxV = jnp.einsum(
      "bcd,vd->bcv", x_BxCxD, head_VxD, preferred_element_type=jnp.float32
    )
    if batch_axes:
      logits_BxCxV = jax.lax.with_sharding_constraint(logits_BxCxV, P(batch_axes))
    log_z_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1)
    target_BxC = jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], axis=-1)
    return log_z_BxC - target_BxC[..., 0], log_z_BxC**2

  length = x_BxLxD.shape[1]
  if not chunk or chunk == length:
    return losses(x_BxLxD, targets_BxL)

  def chunks(a):  # Splits the positions; the sequences are sharded.
    split = a.reshape(a.shape[0], length // chunk, chunk, *a.shape[2:])
    return jnp.moveaxis(split, 1, 0)

  def body(_, args):
    return None, jax.checkpoint(losses)(*args)

  _, by_chunk = jax.lax.scan(body, None, (chunks(x_BxLxD), chunks(targets_BxL)))
  join = lambda a: jnp.moveaxis(a, 0, 1).reshape(targets_BxL.shape)
  nll, z2 = by_chunk
  return join(nll), join(z2)
