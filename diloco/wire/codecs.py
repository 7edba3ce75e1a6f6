"""Compressors by name: what one tensor of an outer gradient becomes on the wire.

To add one, write its functions and `register` it; nothing else has to change. If fsdp
shards a parameter, each device codes its own shard as a tensor, so nothing is gathered:
blocks, rows, subsets and largest values are those of a shard.

Letters: a tensor has N layers with S values each, in rows of R values; K are kept.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from diloco.config.fields import WireConfig
from diloco.wire import codes as codes_lib
from diloco.wire import formats, sizes

Tree = Any


class Encode(Protocol):
  def __call__(
    self, wire: WireConfig, x_NxS: jax.Array, state: Tree, row: int, key: jax.Array
  ) -> tuple[jax.Array, Tree]: ...


class Decode(Protocol):
  def __call__(
    self, wire: WireConfig, payload: jax.Array, n: int, s: int, row: int
  ) -> jax.Array: ...


class Compressor(NamedTuple):
  """A compressor; pure functions.

  Attributes:
    encode: float32 (N, S), state, R and a PRNG key -> uint8 (size,) and the new state.
    decode: uint8 (size,), N, S and R -> float32 (N, S).
    size: N, S and R -> bytes, exactly; no JAX.
    init: a tensor of any shape -> its first state, a tree of float32 arrays of the same
      shape, such as the error that error feedback keeps; () for none. Every replica has
      its own, which is sharded and saved with the parameters.
  """

  encode: Encode
  decode: Decode
  size: sizes.Size
  init: Callable[[jax.Array], Tree] = lambda x: ()


COMPRESSORS: dict[str, Compressor] = {}


def register(name: str, compressor: Compressor) -> None:
  """Makes a compressor known as `wire.compressor`, to trainer and simulators."""
  COMPRESSORS[name] = compressor
  sizes.SIZES[name] = compressor.size


def _quantize(wire: WireConfig, x_NxS: jax.Array, row: int, key: jax.Array):
  if wire.format in formats.PLAIN:
    return _to_bytes(x_NxS.astype(_plain(wire)).reshape(-1))
  fmt, stochastic = formats.parse_format(wire.format), wire.rounding == "stochastic"
  n, s = x_NxS.shape
  block = sizes.block_length(wire, s, row)
  x_NxKxB = _blocks(x_NxS, block)
  amax_NxK = codes_lib.largest_magnitude(x_NxKxB)
  finite_NxK = jnp.isfinite(amax_NxK)
  k_NxK = codes_lib.scale_exponents(fmt, jnp.where(finite_NxK, amax_NxK, 0), stochastic)
  noise = jax.random.bits(key, x_NxKxB.shape) if stochastic else None
  codes = codes_lib.encode(fmt, x_NxKxB, k_NxK[..., None], noise)
  # Without this barrier XLA for TPU computes the codes again for every bit plane.
  codes = jax.lax.optimization_barrier(codes)
  if s % block:
    codes = codes.reshape(n, -1)[:, :s]
  scales = jnp.where(finite_NxK, k_NxK + codes_lib.SCALE_BIAS, codes_lib.NAN_SCALE)
  return jnp.concatenate(
    [codes_lib.pack(codes, fmt.bits), scales.astype(jnp.uint8).reshape(-1)]
  )


def _dequantize(wire: WireConfig, payload: jax.Array, n: int, s: int, row: int):
  if wire.format in formats.PLAIN:
    return _from_bytes(payload, _plain(wire)).reshape(n, s).astype(jnp.float32)
  fmt, block = formats.parse_format(wire.format), sizes.block_length(wire, s, row)
  size = sizes.packed(n * s, fmt.bits)
  codes_NxS = codes_lib.unpack(payload[:size], fmt.bits, n * s).reshape(n, s)
  scales_NxKx1 = payload[size:].reshape(n, -1, 1).astype(jnp.int32)
  x = codes_lib.decode(
    fmt, _blocks(codes_NxS, block), scales_NxKx1 - codes_lib.SCALE_BIAS
  )
  x = jnp.where(scales_NxKx1 == codes_lib.NAN_SCALE, jnp.nan, x)
  return x.reshape(n, -1)[:, :s]


def quantize(wire: WireConfig, x_NxS: jax.Array, state: Tree, row: int, key: jax.Array):
  """Every value in a small format, one scale byte per block (2501.18512, 2.4).

  A block is `block_size` consecutive values of one layer's tensor; the last block of a
  layer may be shorter. The scales follow the codes.
  """
  return _quantize(wire, x_NxS, row, key), state


def topk(wire: WireConfig, x_NxS: jax.Array, state: Tree, row: int, key: jax.Array):
  """The largest magnitudes of each layer's tensor, with their indices (figure 11).

  Sends k = ceil(density S) values per layer in `format`, and before them the indices,
  ascending, in ceil(log2 S) bits each.
  """
  s = x_NxS.shape[1]
  _, index_NxK = jax.lax.top_k(jnp.abs(x_NxS), sizes.kept(wire, s))
  index_NxK = jnp.sort(index_NxK, axis=-1)
  kept_NxK = jnp.take_along_axis(x_NxS, index_NxK, axis=-1)
  index_bits = (index_NxK[..., None] >> jnp.arange(sizes.index_bits(s))) & 1
  index = codes_lib.pack(index_bits.astype(jnp.uint8), 1)
  return jnp.concatenate([index, _quantize(wire, kept_NxK, row, key)]), state


def _decode_topk(wire: WireConfig, payload: jax.Array, n: int, s: int, row: int):
  k, size, width = (
    sizes.kept(wire, s),
    sizes.topk_indices(wire, n, s),
    sizes.index_bits(s),
  )
  index_bits = codes_lib.unpack(payload[:size], 1, n * k * width)
  index_bits = index_bits.reshape(n, k, width).astype(jnp.int32)
  index_NxK = (index_bits << jnp.arange(width)).sum(axis=-1)
  return _scatter(_dequantize(wire, payload[size:], n, k, row), index_NxK, s)


def random(
  wire: WireConfig,
  x_NxS: jax.Array,
  state: Tree,
  row: int,
  key: jax.Array,
  rescale: bool = False,
):
  """A random subset of each layer's tensor (FedDropout, figure 11).

  The receiver draws the same subset from a seed that travels along, so no index is
  sent. With `rescale` the expectation of the decoded tensor is the tensor (DARE).
  """
  n, s = x_NxS.shape
  k = sizes.kept(wire, s)
  seed = jax.random.bits(key, (2,), jnp.uint32)
  kept_NxK = jnp.take_along_axis(x_NxS, _subset(seed, n, s, k), axis=-1)
  if rescale:
    kept_NxK = kept_NxK * (s / k)
  code = _quantize(wire, kept_NxK, row, jax.random.fold_in(key, 1))
  return jnp.concatenate([_to_bytes(seed), code]), state


def _decode_random(wire: WireConfig, payload: jax.Array, n: int, s: int, row: int):
  seed = _from_bytes(payload[: sizes.SEED], jnp.uint32)
  k = sizes.kept(wire, s)
  kept_NxK = _dequantize(wire, payload[sizes.SEED :], n, k, row)
  return _scatter(kept_NxK, _subset(seed, n, s, k), s)


dare = functools.partial(random, rescale=True)

register("quantize", Compressor(quantize, _dequantize, sizes.quantize))
register("topk", Compressor(topk, _decode_topk, sizes.topk))
register("random", Compressor(random, _decode_random, sizes.random))
register("dare", Compressor(dare, _decode_random, sizes.random))


def _plain(wire: WireConfig):
  return {"fp32": jnp.float32, "bf16": jnp.bfloat16}[wire.format]


def _to_bytes(x: jax.Array) -> jax.Array:
  """(n,) of w bytes each -> uint8 (w n,): all lowest bytes first, see `codes`."""
  width = x.dtype.itemsize
  word = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}"))
  starts = 8 * jnp.arange(width, dtype=word.dtype)
  return (word >> starts[:, None]).astype(jnp.uint8).reshape(-1)


def _from_bytes(x: jax.Array, dtype) -> jax.Array:
  """The inverse of `_to_bytes`."""
  width = jnp.dtype(dtype).itemsize
  planes = [plane.astype(f"uint{8 * width}") for plane in jnp.split(x, width)]
  word = functools.reduce(jnp.bitwise_or, [p << 8 * i for i, p in enumerate(planes)])
  return jax.lax.bitcast_convert_type(word, dtype)


def _blocks(x_NxS: jax.Array, block: int) -> jax.Array:
  """(N, S) -> (N, K, block), the last block padded with zeros."""
  n, s = x_NxS.shape
  if s % block:
    x_NxS = jnp.pad(x_NxS, ((0, 0), (0, -s % block)))
  return x_NxS.reshape(n, -1, block)


def _subset(seed: jax.Array, n: int, s: int, k: int) -> jax.Array:
  """Indices (N, K) of the values that are kept, from a seed uint32 (2,)."""
  key = jax.random.wrap_key_data(seed, impl="threefry2x32")
  draw = lambda key: jax.random.permutation(key, s)[:k]
  return jax.vmap(draw)(jax.random.split(key, n))


def _scatter(kept_NxK: jax.Array, index_NxK: jax.Array, s: int) -> jax.Array:
  place = lambda kept, index: jnp.zeros(s, jnp.float32).at[index].set(kept)
  return jax.vmap(place)(kept_NxK, index_NxK)
