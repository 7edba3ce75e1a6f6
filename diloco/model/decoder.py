"""The decoder: Chinchilla-style as in NanoDO, with QK-LayerNorm.

Pre-LayerNorm without bias, learned positions, GELU feed-forward, no biases, tied
head; logits and softmax in float32. Layers are stacked on a leading axis and
scanned, so compile time does not grow with depth and a fragment is a set of indices.

Parameters: {'embed': {tokens_VxD, positions_LxD, norm_D}, 'blocks': {name: NxAxB}}.
Letters: B sequences, L positions, D width, H heads, K head size, F feed-forward
width, V vocabulary, N layers.
"""

import dataclasses
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

# NanoDO's ids: pad 0, eos 1, bos 2, unk 3.
EOS_ID, BOS_ID = 1, 2


@dataclasses.dataclass(frozen=True)
class ModelDims:
  """The numbers that define the model; fields as in `config.model`.

  `batch_axes` names the mesh axes over which sequences lie; activations are held to
  them, so that weights are gathered and not activations resharded.
  """

  num_layers: int
  dim: int
  num_heads: int
  ff_dim: int
  vocab_size: int
  seq_len: int
  qk_norm: bool = True
  dtype: str = "bfloat16"
  param_dtype: str = "float32"
  remat: bool = False
  segment_masks: bool = False
  batch_axes: tuple[str, ...] = ()

  @classmethod
  def from_config(cls, c, batch_axes: tuple[str, ...] = ()) -> "ModelDims":
    names = {f.name for f in dataclasses.fields(cls)} - {"batch_axes"}
    return cls(**{name: c.model[name] for name in names}, batch_axes=batch_axes)


class Attention(nn.Module):
  """Causal self-attention with LayerNorm on queries and keys."""

  dims: ModelDims

  @nn.compact
  def __call__(self, x_BxLxD, cache=None, start=None, segment_BxL=None):
    m = self.dims
    split = (*x_BxLxD.shape[:-1], m.num_heads, m.dim // m.num_heads)
    q_BxLxHxK, k_BxLxHxK, v_BxLxHxK = (
      _linear(self, name, x_BxLxD, m.dim).reshape(split) for name in ("q", "k", "v")
    )
    if m.qk_norm:
      q_BxLxHxK = _norm(m, "q_norm")(q_BxLxHxK)
      k_BxLxHxK = _norm(m, "k_norm")(k_BxLxHxK)
    seen = None if segment_BxL is None else _same_segment(segment_BxL)
    if cache is not None:
      cache = {
        "k": jax.lax.dynamic_update_slice_in_dim(cache["k"], k_BxLxHxK, start, 1),
        "v": jax.lax.dynamic_update_slice_in_dim(cache["v"], v_BxLxHxK, start, 1),
      }
      k_BxLxHxK, v_BxLxHxK = cache["k"], cache["v"]  # All S positions of the cache.
      query_L = start + jnp.arange(x_BxLxD.shape[1])
      seen = query_L[:, None] >= jnp.arange(k_BxLxHxK.shape[1])
    # Scores are scaled by 1/sqrt(K) and their softmax is taken in float32.
    y_BxLxHxK = jax.nn.dot_product_attention(
      q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, mask=seen, is_causal=cache is None
    )
    return _linear(self, "out", y_BxLxHxK.reshape(x_BxLxD.shape), m.dim), cache


class FeedForward(nn.Module):
  """GELU feed-forward of width F."""

  dims: ModelDims

  @nn.compact
  def __call__(self, x_BxLxD):
    y_BxLxF = jax.nn.gelu(_linear(self, "up", x_BxLxD, self.dims.ff_dim))
    return _linear(self, "down", y_BxLxF, self.dims.dim)


class Block(nn.Module):
  """Pre-norm transformer block; a scan carries the activations through N of them."""

  dims: ModelDims

  @nn.compact
  def __call__(self, x_BxLxD, cache, start, segment_BxL):
    m = self.dims
    y_BxLxD, cache = Attention(m, name="attention")(
      _norm(m, "attention_norm")(x_BxLxD), cache, start, segment_BxL
    )
    x_BxLxD = _by_sequence(m, x_BxLxD + y_BxLxD)
    x_BxLxD += FeedForward(m, name="ff")(_norm(m, "ff_norm")(x_BxLxD))
    return _by_sequence(m, x_BxLxD), cache


class Embed(nn.Module):
  """Token embedding, positions and final norm: what is not in a block."""

  dims: ModelDims

  def setup(self):
    m = self.dims
    init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    dtype = jnp.dtype(m.param_dtype)
    self.tokens_VxD = self.param("tokens", init, (m.vocab_size, m.dim), dtype)
    self.positions_LxD = self.param("positions", init, (m.seq_len, m.dim), dtype)
    self.norm = _norm(m, "norm")

  def __call__(self, ids_BxL, start, position_BxL=None):
    dtype = jnp.dtype(self.dims.dtype)
    length = ids_BxL.shape[1]
    x_BxLxD = jnp.take(self.tokens_VxD, ids_BxL, axis=0).astype(dtype)
    if position_BxL is not None:
      positions = jnp.take(self.positions_LxD, position_BxL, axis=0)
    elif start is None:
      positions = self.positions_LxD[:length]
    else:
      positions = jax.lax.dynamic_slice_in_dim(self.positions_LxD, start, length)
    x_BxLxD += positions.astype(dtype)
    return _by_sequence(self.dims, x_BxLxD)

  def final_norm(self, x_BxLxD):
    return self.norm(x_BxLxD)


class Decoder(nn.Module):
  """Maps input ids to the hidden states before the tied head."""

  dims: ModelDims

  def setup(self):
    self.embed = Embed(self.dims)
    block = Block
    if self.dims.remat:
      block = nn.remat(Block, prevent_cse=False)
    stack = nn.scan(
      block,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      # Each layer's cache; position and segments are for all.
      in_axes=(0, nn.broadcast, nn.broadcast),
      length=self.dims.num_layers,
    )
    self.blocks = stack(self.dims)

  def __call__(self, ids_BxL, cache=None, start=None):
    """Hidden states.

    Args:
      ids_BxL: int32 input ids, already shifted right.
      cache: from `init_cache`, to read and extend; None without one.
      start: int32, the position of the first id; None with no cache.

    Returns:
      x_BxLxD after the final norm, in the compute dtype, and the new cache.
    """
    segment_BxL = position_BxL = None
    if self.dims.segment_masks and cache is None:
      ids_BxL, segment_BxL, position_BxL = _documents(ids_BxL)
    x_BxLxD = self.embed(ids_BxL, start, position_BxL)
    x_BxLxD, cache = self.blocks(x_BxLxD, cache, start, segment_BxL)
    return self.embed.final_norm(x_BxLxD), cache


def init_params(dims: ModelDims, key: jax.Array) -> dict:
  """Parameters of one replica: {'embed': ..., 'blocks': leaves with layer axis N}."""
  ids_BxL = jnp.zeros((1, dims.seq_len), jnp.int32)
  return dict(Decoder(dims).init(key, ids_BxL)["params"])


def hidden_states(dims: ModelDims, params: dict, ids_BxL: jax.Array) -> jax.Array:
  """x_BxLxD after the final norm, in the compute dtype."""
  x_BxLxD, _ = Decoder(dims).apply({"params": params}, ids_BxL)
  return cast(jax.Array, x_BxLxD)


def init_cache(dims: ModelDims, batch: int) -> dict[str, jax.Array]:
  """An empty key-value cache: {'k', 'v'}, each (N, B, seq_len, H, K), compute dtype."""
  m = dims
  shape = (m.num_layers, batch, m.seq_len, m.num_heads, m.dim // m.num_heads)
  return {name: jnp.zeros(shape, jnp.dtype(m.dtype)) for name in ("k", "v")}


def decode(dims: ModelDims, params: dict, ids_BxL: jax.Array, cache: dict, start):
  """`hidden_states` of ids that follow those already in the cache.

  Args:
    dims: the model.
    params: of one replica.
    ids_BxL: int32 input ids at positions start, ..., start + L - 1.
    cache: from `init_cache` or the last call; what it holds from `start` on is not
      seen and is overwritten.
    start: int32; start + L must not exceed seq_len (it is not checked).

  Returns:
    x_BxLxD as `hidden_states` gives for these positions, and the extended cache.
  """
  return Decoder(dims).apply({"params": params}, ids_BxL, cache, start)


def shift_right(tokens_BxL: jax.Array) -> jax.Array:
  """Inputs that predict `tokens_BxL`: BOS, then all tokens but the last."""
  return jnp.pad(tokens_BxL[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)


def _documents(ids_BxL: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Inputs in which every document begins as it would alone.

  The EOS of a document is the input for the first token of the next one, so there the
  next one begins: with BOS instead, at position 0, in a segment of its own.

  Returns:
    int32 ids, index of the document within the sequence, and position in it.
  """
  begins_BxL = ids_BxL == EOS_ID
  index_BxL = jax.lax.broadcasted_iota(jnp.int32, ids_BxL.shape, 1)
  first_BxL = jax.lax.cummax(jnp.where(begins_BxL, index_BxL, 0), axis=1)
  segment_BxL = jnp.cumsum(begins_BxL, axis=1, dtype=jnp.int32)
  return jnp.where(begins_BxL, BOS_ID, ids_BxL), segment_BxL, index_BxL - first_BxL


def _same_segment(segment_BxL: jax.Array) -> jax.Array:
  """Bool (B, 1, L, L): which positions belong to one document."""
  return segment_BxL[:, None, :, None] == segment_BxL[:, None, None, :]


def flops_per_token(c) -> float:
  """Training FLOPs per token: 6 N and the attention scores, 12 N_layers D L.

  Forward and backward, matrix products only (PaLM, appendix B); the causal half
  of the scores is counted in full, positions and norms are not.
  """
  m = c.model
  blocks = m.num_layers * (4 * m.dim**2 + 2 * m.dim * m.ff_dim)
  return 6.0 * (blocks + m.vocab_size * m.dim) + 12.0 * m.num_layers * m.dim * m.seq_len


def _by_sequence(m: ModelDims, x_BxLxD: jax.Array) -> jax.Array:
  """Holds activations to the layout of the batch."""
  if not m.batch_axes:
    return x_BxLxD
  return jax.lax.with_sharding_constraint(x_BxLxD, P(m.batch_axes))


def _norm(m: ModelDims, name: str) -> nn.LayerNorm:
  return nn.LayerNorm(
    use_bias=False,
    dtype=jnp.dtype(m.dtype),
    param_dtype=jnp.dtype(m.param_dtype),
    name=name,
  )


def _linear(module: nn.Module, name: str, x, features: int):
  """x @ W without bias; weights are stored (in, out) and cast to x's dtype."""
  m = module.dims
  kernel = module.param(
    name,
    nn.initializers.xavier_uniform(),
    (x.shape[-1], features),
    jnp.dtype(m.param_dtype),
  )
  return jnp.einsum("...a,ab->...b", x, kernel.astype(x.dtype))
