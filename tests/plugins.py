"""Two compressors and a model, as a user would register them.

Importing this file registers them. `signs` sends the sign of every value and the mean
magnitude of every layer's tensor. `feedback` keeps what the codes of earlier sends
lost, and adds it to the next send. `bigram` predicts a token from the one before it.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from diloco.model import loss
from diloco.spec import sizes
from diloco.spec.plugins import Compressor, register
from diloco.spec.shapes import BOS_ID, Architecture
from diloco.wire import compressors


def encode_signs(wire, x_NxS, state, row, key):
  del wire, row, key
  mean_N = jnp.abs(x_NxS).mean(axis=1)
  scales = jax.lax.bitcast_convert_type(mean_N, jnp.uint8).reshape(-1)
  negative = (x_NxS < 0).astype(jnp.uint8).reshape(-1)
  negative = jnp.pad(negative, (0, -negative.size % 8)).reshape(-1, 8)
  packed = (negative << jnp.arange(8, dtype=jnp.uint8)).sum(axis=1, dtype=jnp.uint8)
  return jnp.concatenate([scales, packed]), state


def decode_signs(wire, payload, n, s, row):
  del wire, row
  mean_N = jax.lax.bitcast_convert_type(payload[: 4 * n].reshape(n, 4), jnp.float32)
  negative = (payload[4 * n :, None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
  negative = negative.reshape(-1)[: n * s].reshape(n, s)
  return jnp.where(negative == 1, -1.0, 1.0) * mean_N[:, None]


def size_signs(wire, n, s, row):
  del wire, row
  return 4 * n + -(-n * s // 8)


def encode_feedback(wire, x_NxS, state, row, key):
  x_NxS = x_NxS + state
  code, _ = compressors.quantize(wire, x_NxS, (), row, key)
  return code, x_NxS - decode_feedback(wire, code, *x_NxS.shape, row)


decode_feedback = compressors.get("quantize").decode

signs = Compressor(encode_signs, decode_signs, size_signs)
register("wire.compressor", "signs", signs)
own = encode_feedback, decode_feedback, sizes.quantize, jnp.zeros_like
register("wire.compressor", "feedback", Compressor(*own))


class Bigram:
  """A model without attention."""

  DESCRIPTION: ClassVar[dict[str, str]] = {"blocks": "x += tanh(x @ w)"}

  @staticmethod
  def parameters(m):
    return {
      "embed": {"tokens": (m.vocab_size, m.dim)},
      "blocks": {"w": (m.num_layers, m.dim, m.dim)},
    }

  @staticmethod
  def init(m, key):
    is_shape = lambda x: isinstance(x, tuple)
    draw = lambda shape: 0.1 * jax.random.normal(key, shape)
    return jax.tree.map(draw, Bigram.parameters(m), is_leaf=is_shape)

  @staticmethod
  def _logits(params, ids_BxL):
    x = params["embed"]["tokens"][ids_BxL]
    for w in params["blocks"]["w"]:
      x = x + jnp.tanh(x @ w)
    return x @ params["embed"]["tokens"].T

  @staticmethod
  def losses(m, params, tokens_BxL, batch_axes=()):
    del m, batch_axes
    ids = jnp.pad(tokens_BxL[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)
    logits = Bigram._logits(params, ids)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, tokens_BxL[..., None], axis=-1)[..., 0]
    return log_z - target, log_z**2

  @staticmethod
  def objective(m, params, tokens_BxL, batch_axes=()):
    losses = Bigram.losses(m, params, tokens_BxL, batch_axes)
    return loss.mean_objective(*losses, m.z_loss)

  @staticmethod
  def init_cache(m, batch):
    del m, batch
    return {}

  @staticmethod
  def logits(m, params, ids_BxL, cache, start, at):
    del m, start
    ids = jax.lax.dynamic_index_in_dim(ids_BxL, at, axis=1)
    return Bigram._logits(params, ids)[:, 0], cache


register("model.name", "bigram", Architecture(Bigram, Bigram.parameters))
