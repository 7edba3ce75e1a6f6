"""The parts that all decoders share: the stack of blocks, its cache, and the losses.

Layers are stacked on a leading axis and scanned. So compile time does not grow with
depth, and a fragment is a set of layer indices. Logits and softmax are in float32.

A file such as `diloco.model.decoder` gives two modules: `Embed` has everything outside
the blocks, and `Block` is the block that the stack repeats.

Letters: B sequences, L positions, D width, H query heads, G heads of keys and values,
K head size, V vocabulary, N layers, S cached positions.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from diloco.model import loss
from diloco.model.attention import attend
from diloco.spec.fields import ModelConfig
from diloco.spec.shapes import BOS_ID, EOS_ID
from diloco.util.types import PyTree

Params = dict[str, PyTree]
Cache = dict[str, jax.Array]


class Place(NamedTuple):
  """The positions of the given ids in their text.

  Attributes:
    start: int32, position of the first id in the cache; None if there is no cache.
    segment_BxL: int32 index of each position's document; None: one document.
    position_BxL: int32 positions in the documents; None: counted from `start` or 0.
    rotation: cosines and sines of the angles by which queries and keys are rotated.
  """

  start: jax.Array | int | None = None
  segment_BxL: jax.Array | None = None
  position_BxL: jax.Array | None = None
  rotation: tuple[jax.Array, jax.Array] | None = None


class Part(nn.Module):
  """A part of a decoder.

  Attributes:
    m: the architecture.
    batch_axes: mesh axes that shard the sequences.
  """

  m: ModelConfig
  batch_axes: tuple[str, ...] = ()


class Block(Part):
  """Pre-norm transformer block, made of the parts that a subclass names.

  `Attention`, a module, takes (x_BxLxD, cache, place) and returns hidden states and the
  new cache, like `Block.__call__`. `FeedForward`, a module, takes and returns x_BxLxD.
  """

  Attention: ClassVar[type[nn.Module]]
  FeedForward: ClassVar[type[nn.Module]]

  @staticmethod
  def norm(m: ModelConfig, name: str) -> nn.Module:
    """Makes one of the block's norms."""
    raise NotImplementedError

  @nn.compact
  def __call__(
    self, x_BxLxD: jax.Array, cache: Cache | None, place: Place
  ) -> tuple[jax.Array, Cache | None]:
    m = self.m
    y_BxLxD, cache = self.Attention(m, self.batch_axes, name="attention")(
      self.norm(m, "attention_norm")(x_BxLxD), cache, place
    )
    x_BxLxD = by_sequence(self, x_BxLxD + y_BxLxD)
    x_BxLxD += self.FeedForward(m, name="ff")(self.norm(m, "ff_norm")(x_BxLxD))
    return by_sequence(self, x_BxLxD), cache


class Transformer(Part):
  """Maps input ids to the hidden states before the head.

  `Embed` takes (ids_BxL, place). It returns hidden states, and `place` with all that
  the blocks need to know about positions. `Embed.norm` is the final norm.
  """

  Embed: ClassVar[type[nn.Module]]
  Block: ClassVar[type[Block]]

  def setup(self) -> None:
    self.embed = self.Embed(self.m, self.batch_axes)
    unroll = self.m.unroll or self.m.num_layers
    policy = _is_product if self.m.remat == "dots" else None
    # Without prevent_cse, XLA would merge the recomputation of unrolled layers with the
    # forward pass.
    remat = functools.partial(nn.remat, prevent_cse=unroll > 1, policy=policy)
    block = self.Block if self.m.remat == "none" else remat(self.Block)
    stack = nn.scan(
      block,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      # Each layer has its own cache; all layers share the place.
      in_axes=(0, nn.broadcast),
      length=self.m.num_layers,
      unroll=unroll,
    )
    self.blocks = stack(self.m, self.batch_axes)

  def __call__(
    self,
    ids_BxL: jax.Array,
    cache: Cache | None = None,
    start: jax.Array | int | None = None,
  ) -> tuple[jax.Array, Cache | None]:
    """Computes the hidden states.

    Args:
      ids_BxL: int32 input ids, already shifted right.
      cache: from `init_cache`, to read and extend; None: no cache.
      start: int32, position of the first id; None if there is no cache.

    Returns:
      x_BxLxD after the final norm, in the compute dtype, and the new cache.
    """
    place = Place(start)
    if self.m.segment_masks and cache is None:
      ids_BxL, segment_BxL, position_BxL = _documents(ids_BxL)
      place = Place(start, segment_BxL, position_BxL)
    x_BxLxD, place = self.embed(ids_BxL, place)
    x_BxLxD, cache = self.blocks(x_BxLxD, cache, place)
    return self.embed.norm(x_BxLxD), cache


def _is_product(primitive: Primitive, *args: Any, **params: Any) -> bool:
  """Returns whether `remat=dots` keeps the results of an operation.

  It keeps results of matrix products, and of the kernels of cudnn and splash, which
  contain matrix products.
  """
  kernels = ("dot_product_attention_fwd", "pallas_call")
  dots = jax.checkpoint_policies.dots_saveable
  return primitive.name.startswith(kernels) or dots(primitive, *args, **params)


def init(module: type[Transformer], m: ModelConfig, key: jax.Array) -> Params:
  """Draws the first parameters of one replica."""
  ids_BxL = jnp.zeros((1, m.seq_len), jnp.int32)
  m = dataclasses.replace(m, unroll=1)  # Draws the same values, but compiles faster.
  return dict(module(m).init(key, ids_BxL)["params"])


def losses(
  module: type[Transformer],
  m: ModelConfig,
  params: Params,
  tokens_BxL: jax.Array,
  batch_axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
  """Computes the cross entropy and squared log-partition of every token.

  Args:
    module: the decoder.
    m: the sizes of the decoder.
    params: parameters of one replica.
    tokens_BxL: int32; BOS is put before the first token.
    batch_axes: mesh axes that shard B. Activations keep this sharding, so XLA gathers
      weights instead of resharding activations.

  Returns:
    float32 [B, L] each, in nats and nats^2.
  """
  x_BxLxD, head_VxD, chunk = _before_loss(module, m, params, tokens_BxL, batch_axes)
  return loss.token_losses(x_BxLxD, head_VxD, tokens_BxL, chunk, batch_axes)


def objective(
  module: type[Transformer],
  m: ModelConfig,
  params: Params,
  tokens_BxL: jax.Array,
  batch_axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
  """Computes the objective of training: the mean of nll + z_loss * log(Z)^2.

  Args: as in `losses`.

  Returns:
    The objective, and the mean cross entropy, which has no gradient; float32 [] each.
  """
  x_BxLxD, head_VxD, chunk = _before_loss(module, m, params, tokens_BxL, batch_axes)
  return loss.objective(x_BxLxD, head_VxD, tokens_BxL, m.z_loss, chunk, batch_axes)


def _before_loss(
  module: type[Transformer],
  m: ModelConfig,
  params: Params,
  tokens_BxL: jax.Array,
  batch_axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array, int]:
  """Returns the hidden states, the head, and the chunk of the loss."""
  ids_BxL = jnp.pad(tokens_BxL[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)
  x_BxLxD, _ = module(m, batch_axes).apply({"params": params}, ids_BxL)
  # Sequences of tasks may be shorter than seq_len. A chunk must divide their length.
  return x_BxLxD, _head(params), math.gcd(m.loss_chunk, tokens_BxL.shape[1])


def _head(params: Params) -> jax.Array:
  """Returns the head (V, D); without a tensor of its own, it is the token embedding."""
  return params["embed"].get("head", params["embed"]["tokens"])


def init_cache(m: ModelConfig, batch: int, heads: int = 0) -> Cache:
  """Makes an empty key-value cache {'k', 'v'}, each (N, B, S, G, K) in m.dtype.

  Args:
    heads: G; 0: the number of query heads.
  """
  shape = (m.num_layers, batch, m.seq_len, heads or m.num_heads, m.head_size)
  return {name: jnp.zeros(shape, jnp.dtype(m.dtype)) for name in ("k", "v")}


def logits(
  module: type[Transformer],
  m: ModelConfig,
  params: Params,
  ids_BxL: jax.Array,
  cache: Cache,
  start: jax.Array | int,
  at: jax.Array | int,
) -> tuple[jax.Array, Cache]:
  """Computes the logits of the token that follows one of the given ids.

  Args:
    module: the decoder.
    m: the sizes of the decoder.
    params: parameters of one replica.
    ids_BxL: int32 input ids at positions start, ..., start + L - 1.
    cache: from `init_cache` or the last call; old entries from `start` on are unused.
    start: int32; start + L must not exceed seq_len (not checked).
    at: int32, index of this given id among the L ids.

  Returns:
    Logits float32 [B, V], and the extended cache.
  """
  outputs: Any = module(m).apply({"params": params}, ids_BxL, cache, start)
  x_BxLxD, cache = outputs
  head_VxD = _head(params).astype(x_BxLxD.dtype)
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


def attention(
  m: ModelConfig,
  q_BxLxHxK: jax.Array,
  k_BxLxGxK: jax.Array,
  v_BxLxGxK: jax.Array,
  cache: Cache | None,
  place: Place,
  batch_axes: tuple[str, ...],
) -> tuple[jax.Array, Cache | None]:
  """Computes causal self-attention, over the cache if there is one.

  Returns:
    (B, L, H, K), and the cache with the new keys and values.
  """
  if cache is None:
    segment_BxL = place.segment_BxL
    return attend(m, q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, segment_BxL, batch_axes), None
  start, length = place.start, q_BxLxHxK.shape[1]
  assert start is not None  # There is a cache.
  cache = {
    "k": jax.lax.dynamic_update_slice_in_dim(cache["k"], k_BxLxGxK, start, 1),
    "v": jax.lax.dynamic_update_slice_in_dim(cache["v"], v_BxLxGxK, start, 1),
  }
  k_BxSxGxK, v_BxSxGxK = cache["k"], cache["v"]
  query_L = start + jnp.arange(length)
  mask = query_L[:, None] >= jnp.arange(k_BxSxGxK.shape[1])
  y = jax.nn.dot_product_attention(q_BxLxHxK, k_BxSxGxK, v_BxSxGxK, mask=mask)
  return y, cache


def by_sequence(module: Part, x_BxLxD: jax.Array) -> jax.Array:
  """Keeps activations sharded like the batch."""
  if not module.batch_axes:
    return x_BxLxD
  return jax.lax.with_sharding_constraint(x_BxLxD, P(module.batch_axes))


def linear(module: Part, name: str, x: jax.Array, features: int) -> jax.Array:
  """Computes x @ W without a bias; W (in, out) is cast to the dtype of x."""
  kernel = module.param(
    name,
    nn.initializers.xavier_uniform(),
    (x.shape[-1], features),
    jnp.dtype(module.m.param_dtype),
  )
  # XLA for CPU is slow at the gradients of products with more than two axes.
  y = x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)
  return y.reshape(*x.shape[:-1], features)


def table(module: Part, name: str, rows: int) -> jax.Array:
  """Makes an embedding (rows, D); each row has an expected norm of one."""
  m = module.m
  init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
  return module.param(name, init, (rows, m.dim), jnp.dtype(m.param_dtype))
