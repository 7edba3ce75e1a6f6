"""The papers' decoder: Chinchilla-style as in NanoDO, with QK-LayerNorm.

It has pre-LayerNorm, learned positions, a GELU feed-forward, a tied head and no biases.
The stack of blocks, the cache and the losses are in `diloco.model.transformer`.

Parameters: `diloco.spec.shapes.decoder`. Letters: B sequences, L positions, D width, H
heads, K head size, F feed-forward width, V vocabulary.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from diloco.model import transformer
from diloco.model.transformer import Cache, Part, Place, by_sequence, linear, table
from diloco.spec.fields import ModelConfig

# An export's config.json contains this text for programs that rebuild the model.
DESCRIPTION = {
  "embedding": "embed.tokens (V, D) + embed.positions (L, D); BOS (id 2) comes first",
  "blocks": (
    "the first axis of `blocks.*` is the layer; x += out(attention(norm(x))), then"
    " x += down(gelu_tanh(up(norm(x)))); matrices are (in, out), there are no biases"
  ),
  "attention": (
    "causal, num_heads heads of dim / num_heads, scores over sqrt(head size); with"
    " qk_norm, LayerNorm over each head of queries and keys (q_norm, k_norm)"
  ),
  "norm": "LayerNorm with mean and scale, without bias, epsilon 1e-6",
  "head": "logits = norm(x) @ embed.tokens^T, with embed.norm; float32",
}


def _norm(m: ModelConfig, name: str) -> nn.LayerNorm:
  return nn.LayerNorm(
    use_bias=False,
    dtype=jnp.dtype(m.dtype),
    param_dtype=jnp.dtype(m.param_dtype),
    name=name,
  )


class Attention(Part):
  """Causal self-attention with LayerNorm on queries and keys."""

  @nn.compact
  def __call__(
    self, x_BxLxD: jax.Array, cache: Cache | None, place: Place
  ) -> tuple[jax.Array, Cache | None]:
    m = self.m
    split = (*x_BxLxD.shape[:-1], m.num_heads, m.dim // m.num_heads)
    q_BxLxHxK, k_BxLxHxK, v_BxLxHxK = (
      linear(self, name, x_BxLxD, m.dim).reshape(split) for name in ("q", "k", "v")
    )
    if m.qk_norm:
      q_BxLxHxK = _norm(m, "q_norm")(q_BxLxHxK)
      k_BxLxHxK = _norm(m, "k_norm")(k_BxLxHxK)
    y_BxLxHxK, cache = transformer.attention(
      m, q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, cache, place, self.batch_axes
    )
    return linear(self, "out", y_BxLxHxK.reshape(x_BxLxD.shape), m.dim), cache


class FeedForward(Part):
  """GELU feed-forward of width F."""

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    y_BxLxF = jax.nn.gelu(linear(self, "up", x_BxLxD, self.m.ff_dim))
    return linear(self, "down", y_BxLxF, self.m.dim)


class Block(transformer.Block):
  """The block that `Decoder` repeats: attention and feed-forward of this file."""

  Attention, FeedForward, norm = Attention, FeedForward, staticmethod(_norm)


class Embed(Part):
  """Token embedding, positions and final norm: everything outside the blocks."""

  def setup(self) -> None:
    m = self.m
    self.tokens_VxD = table(self, "tokens", m.vocab_size)
    self.positions_LxD = table(self, "positions", m.seq_len)
    self.norm = _norm(m, "norm")

  def __call__(self, ids_BxL: jax.Array, place: Place) -> tuple[jax.Array, Place]:
    dtype = jnp.dtype(self.m.dtype)
    length = ids_BxL.shape[1]
    x_BxLxD = jnp.take(self.tokens_VxD, ids_BxL, axis=0).astype(dtype)
    if place.position_BxL is not None:
      positions = jnp.take(self.positions_LxD, place.position_BxL, axis=0)
    elif place.start is None:
      positions = self.positions_LxD[:length]
    else:
      positions = jax.lax.dynamic_slice_in_dim(self.positions_LxD, place.start, length)
    x_BxLxD += positions.astype(dtype)
    return by_sequence(self, x_BxLxD), place


class Decoder(transformer.Transformer):
  """Maps input ids to the hidden states before the head."""

  Embed, Block = Embed, Block


init = functools.partial(transformer.init, Decoder)
losses = functools.partial(transformer.losses, Decoder)
objective = functools.partial(transformer.objective, Decoder)
init_cache = transformer.init_cache
logits = functools.partial(transformer.logits, Decoder)
