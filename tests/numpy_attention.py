"""Causal attention and its gradient in NumPy, float64; and cuDNN's kernel for a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir


def attention(q, k, v, segment=None, dy=None) -> list[np.ndarray]:
  """Returns y, or with `dy` the list y, dq, dk, dv; all (..., L, H, K)."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  size, length = q.shape[-1], q.shape[-3]
  seen = np.tril(np.ones((length, length), bool))
  if segment is not None:
    seen = seen & (segment[..., None, :, None] == segment[..., None, None, :])
  scores = np.einsum("...lhk,...mhk->...hlm", q, k) / np.sqrt(size)
  scores = np.where(seen, scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  y = np.einsum("...hlm,...mhk->...lhk", weights, v)
  if dy is None:
    return [y]
  dy = np.asarray(dy, np.float64)
  dweights = np.einsum("...lhk,...mhk->...hlm", dy, v)
  dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
  dscores /= np.sqrt(size)
  dq = np.einsum("...hlm,...mhk->...lhk", dscores, k)
  dk = np.einsum("...hlm,...lhk->...mhk", dscores, q)
  return [y, dq, dk, np.einsum("...hlm,...lhk->...mhk", weights, dy)]


def run_cudnn_on_cpu() -> None:
  """Gives the CPU a program for the two kernels that cuDNN computes on a GPU.

  Everything around the kernels stays JAX's own: the rules for vmap, gradients and
  shards.
  """
  cudnn.check_cudnn_version = lambda: 91_000
  # Only a device that exists tells its compute capability.
  for primitive, kernel in (
    (cudnn._dot_product_attention_fwd_p, _forward),
    (cudnn._dot_product_attention_bwd_p, _backward),
  ):
    rule = mlir.lower_fun(kernel, multiple_results=True)
    mlir.register_lowering(primitive, rule, platform="cpu")


def _weights(q, k, scale, mask_type):
  assert mask_type == cudnn.MaskType.CAUSAL
  scores = scale * jnp.einsum("blhk,bmhk->bhlm", q, k)
  seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
  log_z = jax.nn.logsumexp(scores, axis=-1, where=seen)
  return jnp.where(seen, jnp.exp(scores - log_z[..., None]), 0), log_z


def _forward(q, k, v, *_, scale, mask_type, layout, is_training, **__):
  assert layout == cudnn.AttentionLayout.BTNH.value
  dtype, (q, k, v) = q.dtype, (x.astype(jnp.float32) for x in (q, k, v))
  weights, log_z = _weights(q, k, scale, mask_type)
  y = jnp.einsum("bhlm,bmhk->blhk", weights, v).astype(dtype)
  return (y, log_z) if is_training else (y,)


def _backward(q, k, v, *rest, scale, mask_type, **_):
  log_z, y, dy = rest[-3:]
  dtype = q.dtype
  q, k, v, y, dy = (x.astype(jnp.float32) for x in (q, k, v, y, dy))
  weights, same = _weights(q, k, scale, mask_type)
  # cuDNN takes both from the forward pass, so both must be those of this sequence.
  weights *= jnp.exp(same - log_z)[..., None]
  dweights = jnp.einsum("blhk,bmhk->bhlm", dy, v)
  dscores = weights * (dweights - jnp.einsum("blhk,blhk->bhl", dy, y)[..., None])
  grads = (
    scale * jnp.einsum("bhlm,bmhk->blhk", dscores, k),
    scale * jnp.einsum("bhlm,blhk->bmhk", dscores, q),
    jnp.einsum("bhlm,blhk->bmhk", weights, dy),
  )
  return tuple(x.astype(dtype) for x in grads)
