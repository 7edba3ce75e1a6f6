"""The papers' decoder: Chinchilla-style as in NanoDO, with QK-LayerNorm.

Pre-LayerNorm, learned positions, GELU feed-forward, tied head, no biases; logits and
softmax in float32. Layers are stacked on a leading axis and scanned. So compile time
does not grow with depth, and a fragment is a set of layer indices.

Parameters: `diloco.model.shapes.decoder`. Letters: B sequences, L positions, D width, H
heads, K head size, F feed-forward width, V vocabulary, N layers, S cached positions.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from diloco.config.fields import ModelConfig
from diloco.model import loss
from diloco.model.attention import attend
from diloco.model.shapes import BOS_ID, EOS_ID

Params = dict[str, Any]
Cache = dict[str, jax.Array]
# An export's config.json contains this, for programs that rebuild the model.
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


class Attention(nn.Module):
  """Causal self-attention with LayerNorm on queries and keys."""

  m: ModelConfig
  batch_axes: tuple[str, ...] = ()

  @nn.compact
  def __call__(self, x_BxLxD, cache=None, start=None, segment_BxL=None):
    m = self.m
    split = (*x_BxLxD.shape[:-1], m.num_heads, m.dim // m.num_heads)
    q_BxLxHxK, k_BxLxHxK, v_BxLxHxK = (
      _linear(self, name, x_BxLxD, m.dim).reshape(split) for name in ("q", "k", "v")
    )
    if m.qk_norm:
      q_BxLxHxK = _norm(m, "q_norm")(q_BxLxHxK)
      k_BxLxHxK = _norm(m, "k_norm")(k_BxLxHxK)
    if cache is None:
      y_BxLxHxK = attend(
        m, q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, segment_BxL, self.batch_axes
      )
    else:
      cache = {
        "k": jax.lax.dynamic_update_slice_in_dim(cache["k"], k_BxLxHxK, start, 1),
        "v": jax.lax.dynamic_update_slice_in_dim(cache["v"], v_BxLxHxK, start, 1),
      }
      k_BxLxHxK, v_BxLxHxK = cache["k"], cache["v"]  # All S positions of the cache.
      query_L = start + jnp.arange(x_BxLxD.shape[1])
      mask = query_L[:, None] >= jnp.arange(k_BxLxHxK.shape[1])
      y_BxLxHxK = jax.nn.dot_product_attention(
        q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, mask=mask
      )
    return _linear(self, "out", y_BxLxHxK.reshape(x_BxLxD.shape), m.dim), cache


class FeedForward(nn.Module):
  """GELU feed-forward of width F."""

  m: ModelConfig

  @nn.compact
  def __call__(self, x_BxLxD):
    y_BxLxF = jax.nn.gelu(_linear(self, "up", x_BxLxD, self.m.ff_dim))
    return _linear(self, "down", y_BxLxF, self.m.dim)


class Block(nn.Module):
  """Pre-norm transformer block; `Decoder` scans over N blocks."""

  m: ModelConfig
  batch_axes: tuple[str, ...] = ()

  @nn.compact
  def __call__(self, x_BxLxD, cache, start, segment_BxL):
    m = self.m
    y_BxLxD, cache = Attention(m, self.batch_axes, name="attention")(
      _norm(m, "attention_norm")(x_BxLxD), cache, start, segment_BxL
    )
    x_BxLxD = _by_sequence(self, x_BxLxD + y_BxLxD)
    x_BxLxD += FeedForward(m, name="ff")(_norm(m, "ff_norm")(x_BxLxD))
    return _by_sequence(self, x_BxLxD), cache


class Embed(nn.Module):
  """Token embedding, positions and final norm: everything outside the blocks."""

  m: ModelConfig
  batch_axes: tuple[str, ...] = ()

  def setup(self):
    m = self.m
    init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    dtype = jnp.dtype(m.param_dtype)
    self.tokens_VxD = self.param("tokens", init, (m.vocab_size, m.dim), dtype)
    self.positions_LxD = self.param("positions", init, (m.seq_len, m.dim), dtype)
    self.norm = _norm(m, "norm")

  def __call__(self, ids_BxL, start, position_BxL=None):
    dtype = jnp.dtype(self.m.dtype)
    length = ids_BxL.shape[1]
    x_BxLxD = jnp.take(self.tokens_VxD, ids_BxL, axis=0).astype(dtype)
    if position_BxL is not None:
      positions = jnp.take(self.positions_LxD, position_BxL, axis=0)
    elif start is None:
      positions = self.positions_LxD[:length]
    else:
      positions = jax.lax.dynamic_slice_in_dim(self.positions_LxD, start, length)
    x_BxLxD += positions.astype(dtype)
    return _by_sequence(self, x_BxLxD)

  def final_norm(self, x_BxLxD):
    return self.norm(x_BxLxD)


class Decoder(nn.Module):
  """Maps input ids to the hidden states before the head."""

  m: ModelConfig
  batch_axes: tuple[str, ...] = ()

  def setup(self):
    self.embed = Embed(self.m, self.batch_axes)
    policy = {"dots": jax.checkpoint_policies.dots_saveable}.get(self.m.remat)
    remat = functools.partial(nn.remat, prevent_cse=False, policy=policy)
    block = Block if self.m.remat == "none" else remat(Block)
    stack = nn.scan(
      block,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      # Each layer has its own cache; all layers share the position and the segments.
      in_axes=(0, nn.broadcast, nn.broadcast),
      length=self.m.num_layers,
    )
    self.blocks = stack(self.m, self.batch_axes)

  def __call__(self, ids_BxL, cache=None, start=None):
    """Computes the hidden states.

    Args:
      ids_BxL: int32 input ids, already shifted right.
      cache: from `init_cache`, to read and extend; None: no cache.
      start: int32, position of the first id; None if there is no cache.

    Returns:
      x_BxLxD after the final norm, in the compute dtype, and the new cache.
    """
    segment_BxL = position_BxL = None
    if self.m.segment_masks and cache is None:
      ids_BxL, segment_BxL, position_BxL = _documents(ids_BxL)
    x_BxLxD = self.embed(ids_BxL, start, position_BxL)
    x_BxLxD, cache = self.blocks(x_BxLxD, cache, start, segment_BxL)
    return self.embed.final_norm(x_BxLxD), cache


def init(m: ModelConfig, key: jax.Array) -> Params:
  """Draws the first parameters of one replica."""
  ids_BxL = jnp.zeros((1, m.seq_len), jnp.int32)
  return dict(Decoder(m).init(key, ids_BxL)["params"])


def losses(
  m: ModelConfig,
  params: Params,
  tokens_BxL: jax.Array,
  batch_axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
  """Computes every token's cross entropy and squared log-partition, given its past.

  Args:
    params: parameters of one replica.
    tokens_BxL: int32; the decoder puts BOS before the first token.
    batch_axes: mesh axes that shard B. Activations keep this sharding, so XLA gathers
      weights instead of resharding activations.

  Returns:
    float32 [B, L] each, in nats and nats^2.
  """
  x_BxLxD, head_VxD, chunk = _before_loss(m, params, tokens_BxL, batch_axes)
  return loss.token_losses(x_BxLxD, head_VxD, tokens_BxL, chunk, batch_axes)


def objective(
  m: ModelConfig,
  params: Params,
  tokens_BxL: jax.Array,
  batch_axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
  """Computes what training minimises: the mean of nll + z_loss * log(Z)^2.

  Args: as in `losses`.

  Returns:
    The objective, and the mean cross entropy, which has no gradient; float32 [] each.
  """
  x_BxLxD, head_VxD, chunk = _before_loss(m, params, tokens_BxL, batch_axes)
  return loss.objective(x_BxLxD, head_VxD, tokens_BxL, m.z_loss, chunk, batch_axes)


def _before_loss(m: ModelConfig, params: Params, tokens_BxL, batch_axes):
  """Returns hidden states, head and the loss's chunk."""
  ids_BxL = jnp.pad(tokens_BxL[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)
  x_BxLxD, _ = Decoder(m, batch_axes).apply({"params": params}, ids_BxL)
  # Sequences of tasks may be shorter than seq_len. A chunk must divide their length.
  return x_BxLxD, params["embed"]["tokens"], math.gcd(m.loss_chunk, tokens_BxL.shape[1])


def init_cache(m: ModelConfig, batch: int) -> Cache:
  """Makes an empty key-value cache {'k', 'v'}, each (N, B, S, H, K) in m.dtype."""
  shape = (m.num_layers, batch, m.seq_len, m.num_heads, m.dim // m.num_heads)
  return {name: jnp.zeros(shape, jnp.dtype(m.dtype)) for name in ("k", "v")}


def logits(
  m: ModelConfig,
  params: Params,
  ids_BxL: jax.Array,
  cache: Cache,
  start: jax.Array | int,
  at: jax.Array | int,
) -> tuple[jax.Array, Cache]:
  """Computes the logits of the token that follows one of the given ids.

  Args:
    params: parameters of one replica.
    ids_BxL: int32 input ids at positions start, ..., start + L - 1.
    cache: from `init_cache` or the last call; old entries from `start` on are unused.
    start: int32; start + L must not exceed seq_len (not checked).
    at: int32, index of the id before that token, among the L ids.

  Returns:
    Logits float32 [B, V], and the extended cache.
  """
  found: Any = Decoder(m).apply({"params": params}, ids_BxL, cache, start)
  x_BxLxD, cache = found
  head_VxD = params["embed"]["tokens"].astype(x_BxLxD.dtype)
  x_BxD = jax.lax.dynamic_index_in_dim(x_BxLxD, at, axis=1, keepdims=False)
  return jnp.einsum(
    "bd,vd->bv", x_BxD, head_VxD, preferred_element_type=jnp.float32
  ), cache


def _documents(ids_BxL: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Makes each document of a sequence begin with BOS and at position 0.

  Returns:
    int32 [B, L] each: ids (BOS instead of EOS), document index, position in document.
  """
  begins_BxL = ids_BxL == EOS_ID
  index_BxL = jax.lax.broadcasted_iota(jnp.int32, ids_BxL.shape, 1)
  first_BxL = jax.lax.cummax(jnp.where(begins_BxL, index_BxL, 0), axis=1)
  segment_BxL = jnp.cumsum(begins_BxL, axis=1, dtype=jnp.int32)
  return jnp.where(begins_BxL, BOS_ID, ids_BxL), segment_BxL, index_BxL - first_BxL


def _by_sequence(module: Block | Embed, x_BxLxD: jax.Array) -> jax.Array:
  """Keeps activations sharded like the batch."""
  if not module.batch_axes:
    return x_BxLxD
  return jax.lax.with_sharding_constraint(x_BxLxD, P(module.batch_axes))


def _norm(m: ModelConfig, name: str) -> nn.LayerNorm:
  return nn.LayerNorm(
    use_bias=False,
    dtype=jnp.dtype(m.dtype),
    param_dtype=jnp.dtype(m.param_dtype),
    name=name,
  )


def _linear(module: nn.Module, name: str, x: jax.Array, features: int) -> jax.Array:
  """Computes x @ W, W (in, out) cast to x's dtype; there is no bias."""
  kernel = module.param(
    name,
    nn.initializers.xavier_uniform(),
    (x.shape[-1], features),
    jnp.dtype(module.m.param_dtype),
  )
  # Two axes, because XLA for CPU is slow at the gradients of products with more.
  y = x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)
  return y.reshape(*x.shape[:-1], features)
