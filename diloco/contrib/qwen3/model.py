"""The model functions of the architecture qwen3.

Pre-RMSNorm, rotary positions (RoPE), RMSNorm on each head of queries and keys,
grouped-query attention, SwiGLU feed-forward, no biases. The head is the token embedding
or a matrix of its own (Qwen3 technical report, arXiv 2505.09388, section 2). The stack
of blocks, the cache and the losses are in `diloco.model.transformer`.

`parameters` of the package lists the parameters. Letters: B sequences, L positions, D
width, H query heads, G heads of keys and values, K head size, F feed-forward width, V
vocabulary.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from diloco.contrib.qwen3 import Qwen3, folder
from diloco.model import transformer
from diloco.model.transformer import Cache, Part, Place, by_sequence, linear, table
from diloco.spec.fields import ModelConfig

# An export's config.json contains this, for programs that rebuild the model.
DESCRIPTION = {
  "embedding": "embed.tokens (V, D); BOS (id 2) comes first",
  "blocks": (
    "the first axis of `blocks.*` is the layer; x += out(attention(norm(x))), then"
    " x += down(silu(gate(norm(x))) * up(norm(x))); matrices are (in, out), there are"
    " no biases"
  ),
  "attention": (
    "causal, num_heads heads of head_dim, scores over sqrt(head_dim); kv_heads heads of"
    " keys and values, each for the next num_heads / kv_heads query heads; RMSNorm over"
    " each head of queries and keys (q_norm, k_norm), then rotation: the halves (a, b)"
    " of a head at position p become (a cos - b sin, b cos + a sin) of the angles"
    " p / rope_theta^(2 i / head_dim)"
  ),
  "norm": "RMSNorm with scale, epsilon norm_eps",
  "head": "logits = norm(x) @ head^T, head: embed.head, else embed.tokens; float32",
}


def _norm(m: ModelConfig, name: str) -> nn.RMSNorm:
  return nn.RMSNorm(
    epsilon=m.of(Qwen3).norm_eps,
    dtype=jnp.dtype(m.dtype),
    param_dtype=jnp.dtype(m.param_dtype),
    name=name,
  )


class Attention(Part):
  """Causal grouped-query attention with QK RMSNorm and rotary positions (RoPE)."""

  @nn.compact
  def __call__(
    self, x_BxLxD: jax.Array, cache: Cache | None, place: Place
  ) -> tuple[jax.Array, Cache | None]:
    m = self.m
    kv_heads = m.of(Qwen3).kv_heads
    heads = {"q": m.num_heads, "k": kv_heads, "v": kv_heads}
    q_BxLxHxK, k_BxLxGxK, v_BxLxGxK = (
      linear(self, name, x_BxLxD, count * m.head_size).reshape(
        *x_BxLxD.shape[:-1], count, m.head_size
      )
      for name, count in heads.items()
    )
    assert place.rotation is not None  # `Embed` has computed it.
    q_BxLxHxK = _rotated(_norm(m, "q_norm")(q_BxLxHxK), place.rotation)
    k_BxLxGxK = _rotated(_norm(m, "k_norm")(k_BxLxGxK), place.rotation)
    y_BxLxHxK, cache = transformer.attention(
      m, q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, cache, place, self.batch_axes
    )
    y_BxLxHK = y_BxLxHxK.reshape(*x_BxLxD.shape[:-1], -1)
    return linear(self, "out", y_BxLxHK, m.dim), cache


class FeedForward(Part):
  """SwiGLU feed-forward of width F."""

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    gate_BxLxF = jax.nn.silu(linear(self, "gate", x_BxLxD, self.m.ff_dim))
    up_BxLxF = linear(self, "up", x_BxLxD, self.m.ff_dim)
    return linear(self, "down", gate_BxLxF * up_BxLxF, self.m.dim)


class Block(transformer.Block):
  """The block that `Decoder` repeats: attention and feed-forward of this file."""

  Attention, FeedForward, norm = Attention, FeedForward, staticmethod(_norm)


class Embed(Part):
  """Token embedding, head and final norm: everything outside the blocks."""

  def setup(self) -> None:
    m = self.m
    self.tokens_VxD = table(self, "tokens", m.vocab_size)
    if not m.of(Qwen3).tie_embeddings:
      self.head_VxD = table(self, "head", m.vocab_size)
    self.norm = _norm(m, "norm")

  def __call__(self, ids_BxL: jax.Array, place: Place) -> tuple[jax.Array, Place]:
    x_BxLxD = jnp.take(self.tokens_VxD, ids_BxL, axis=0)
    place = place._replace(rotation=_rotation(self.m, place, ids_BxL.shape[1]))
    return by_sequence(self, x_BxLxD.astype(jnp.dtype(self.m.dtype))), place


class Decoder(transformer.Transformer):
  """Maps input ids to the hidden states before the head."""

  Embed, Block = Embed, Block


def _rotation(m: ModelConfig, place: Place, length: int) -> tuple[jax.Array, jax.Array]:
  """Computes cosines and sines for all blocks, float32 [1 or B, L, 1, K / 2] each."""
  position_BxL = place.position_BxL
  if position_BxL is None:
    first = 0 if place.start is None else place.start
    position_BxL = (first + jnp.arange(length))[None]
  frequencies = m.of(Qwen3).rope_theta ** (-jnp.arange(0, m.head_size, 2) / m.head_size)
  angles = position_BxL[:, :, None, None] * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def _rotated(x_BxLxHxK: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Rotates pairs (a, b) of each head's two halves by the angles of the positions."""
  cos, sin = rotation
  a, b = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x_BxLxHxK.dtype)


def init_cache(m: ModelConfig, batch: int) -> Cache:
  """Makes an empty cache; see `transformer.init_cache`."""
  return transformer.init_cache(m, batch, m.of(Qwen3).kv_heads)


init = functools.partial(transformer.init, Decoder)
losses = functools.partial(transformer.losses, Decoder)
objective = functools.partial(transformer.objective, Decoder)
logits = functools.partial(transformer.logits, Decoder)
read, FORMATS = folder.read, {"hf": folder.write}
