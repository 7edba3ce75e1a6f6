"""Compressors: each encodes and decodes the tensors of an outer gradient.

`plugins.register("wire.compressor", name, Compressor(...))` adds a compressor.
If fsdp shards a parameter, each device encodes its shard as a separate tensor. Devices
gather nothing, because blocks, subsets and largest values are chosen within a shard.

Letters: N layers of S values, in rows of R values; each layer has K kept values, or K
blocks of B values.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from diloco.spec import formats, plugins, sizes
from diloco.spec.fields import WireConfig
from diloco.spec.plugins import Compressor, register
from diloco.util.types import PyTree
from diloco.wire import codes as codes_lib

_PLAIN = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


get = sizes.compressor_of


def quantize(
  wire: WireConfig, x_NxS: Array, state: PyTree, row: int, key: Array
) -> tuple[Array, PyTree]:
  """Encodes every value, with one scale byte per block (2501.18512, section 2.4).

  A block is `block_size` consecutive values of one layer's tensor; the last block of a
  layer may be shorter. The payload holds all codes, then all scales.
  """
  if wire.format in formats.PLAIN:
    return to_bytes(x_NxS.astype(_PLAIN[wire.format]).reshape(-1)), state
  n, s = x_NxS.shape
  block = sizes.block_length(wire, s, row)
  x_NxKxB = blocks(x_NxS, block)
  plugin = plugins.NAMES["wire.format"].get(wire.format)
  codes, tail = plugin.encode(x_NxKxB, s) if plugin else _scaled(wire, x_NxKxB)
  # Without this barrier, XLA for TPU recomputes the codes for every plane (`codes.py`).
  codes = jax.lax.optimization_barrier(codes)
  if s % block:
    codes = codes.reshape(n, -1)[:, :s]
  code = codes_lib.pack(codes, formats.code_bits(wire.format))
  return jnp.concatenate([code, tail]), state


def _dequantize(wire: WireConfig, payload: Array, n: int, s: int, row: int) -> Array:
  if wire.format in formats.PLAIN:
    return from_bytes(payload, _PLAIN[wire.format]).reshape(n, s).astype(jnp.float32)
  bits, block = formats.code_bits(wire.format), sizes.block_length(wire, s, row)
  size = sizes.packed(n * s, bits)
  codes = codes_lib.unpack(payload[:size], bits, n * s)
  # Without this barrier, XLA for GPU and TPU writes the decoded values to memory
  # instead of the codes, which are smaller.
  codes_NxS = jax.lax.optimization_barrier(codes).reshape(n, s)
  codes_NxKxB, tail = blocks(codes_NxS, block), payload[size:]
  plugin = plugins.NAMES["wire.format"].get(wire.format)
  x = plugin.decode(codes_NxKxB, tail) if plugin else _unscaled(wire, codes_NxKxB, tail)
  return x.reshape(n, -1)[:, :s]


def _scaled(wire: WireConfig, x_NxKxB: Array) -> tuple[Array, Array]:
  """Encodes blocks in an eXmY format; returns codes, and a uint8 scale per block."""
  fmt = formats.parse_format(wire.format)
  amax_NxK = codes_lib.largest_magnitude(x_NxKxB)
  finite_NxK = jnp.isfinite(amax_NxK)
  k_NxK = codes_lib.scale_exponents(fmt, jnp.where(finite_NxK, amax_NxK, 0))
  codes = codes_lib.encode(fmt, x_NxKxB, k_NxK[..., None])
  scales = jnp.where(finite_NxK, k_NxK + codes_lib.SCALE_BIAS, codes_lib.NAN_SCALE)
  return codes, scales.astype(jnp.uint8).reshape(-1)


def _unscaled(wire: WireConfig, codes_NxKxB: Array, scales: Array) -> Array:
  """Inverts `_scaled`, except for the rounding."""
  fmt = formats.parse_format(wire.format)
  scales_NxKx1 = scales.reshape(len(codes_NxKxB), -1, 1).astype(jnp.int32)
  x = codes_lib.decode(fmt, codes_NxKxB, scales_NxKx1 - codes_lib.SCALE_BIAS)
  return jnp.where(scales_NxKx1 == codes_lib.NAN_SCALE, jnp.nan, x)


def topk(
  wire: WireConfig, x_NxS: Array, state: PyTree, row: int, key: Array
) -> tuple[Array, PyTree]:
  """Keeps the values of largest magnitude in each layer (2501.18512, figure 11).

  At equal bytes, the paper finds topk significantly worse than 4-bit codes of all
  values.

  Per layer, K = ceil(density S) values are kept. The payload first holds their indices,
  ascending, in ceil(log2 S) bits each, then the kept values in wire.format.
  """
  s = x_NxS.shape[1]
  _, index_NxK = jax.lax.top_k(jnp.abs(x_NxS), sizes.kept(wire, s))
  index_NxK = jnp.sort(index_NxK, axis=-1)
  kept_NxK = jnp.take_along_axis(x_NxS, index_NxK, axis=-1)
  index_bits = (index_NxK[..., None] >> jnp.arange(sizes.index_bits(s))) & 1
  index = codes_lib.pack(index_bits.astype(jnp.uint8), 1)
  code, state = quantize(wire, kept_NxK, state, row, key)
  return jnp.concatenate([index, code]), state


def decode_topk(wire: WireConfig, payload: Array, n: int, s: int, row: int) -> Array:
  k, width = sizes.kept(wire, s), sizes.index_bits(s)
  size = sizes.packed(n * k * width, 1)
  index_bits = codes_lib.unpack(payload[:size], 1, n * k * width)
  index_bits = index_bits.reshape(n, k, width).astype(jnp.int32)
  index_NxK = (index_bits << jnp.arange(width)).sum(axis=-1)
  return _scatter(_dequantize(wire, payload[size:], n, k, row), index_NxK, s)


def random(
  wire: WireConfig,
  x_NxS: Array,
  state: PyTree,
  row: int,
  key: Array,
  rescale: bool = False,
) -> tuple[Array, PyTree]:
  """Keeps a random subset of each layer's values (FedDropout; 2501.18512, figure 11).

  At equal bytes, the paper finds random and dare worse than topk.

  The payload holds a seed instead of indices: the receiver draws the same subset from
  the seed. With `rescale` the decoded tensor is unbiased (DARE).
  """
  n, s = x_NxS.shape
  k = sizes.kept(wire, s)
  seed = jax.random.bits(key, (2,), jnp.uint32)
  kept_NxK = jnp.take_along_axis(x_NxS, _subset(seed, n, s, k), axis=-1)
  if rescale:
    kept_NxK = kept_NxK * (s / k)
  code, state = quantize(wire, kept_NxK, state, row, key)
  return jnp.concatenate([to_bytes(seed), code]), state


def _decode_random(wire: WireConfig, payload: Array, n: int, s: int, row: int) -> Array:
  seed = from_bytes(payload[: sizes.SEED], jnp.uint32)
  k = sizes.kept(wire, s)
  kept_NxK = _dequantize(wire, payload[sizes.SEED :], n, k, row)
  return _scatter(kept_NxK, _subset(seed, n, s, k), s)


dare = functools.partial(random, rescale=True)

register(
  "wire.compressor", "quantize", Compressor(quantize, _dequantize, sizes.quantize)
)
register("wire.compressor", "topk", Compressor(topk, decode_topk, sizes.topk))
register("wire.compressor", "random", Compressor(random, _decode_random, sizes.random))
register("wire.compressor", "dare", Compressor(dare, _decode_random, sizes.random))


def to_bytes(x: Array) -> Array:
  """Splits n values of w bytes into uint8 (w n,): lowest bytes of all values first."""
  width = x.dtype.itemsize
  word = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}"))
  starts = 8 * jnp.arange(width, dtype=word.dtype)
  return (word >> starts[:, None]).astype(jnp.uint8).reshape(-1)


def from_bytes(x: Array, dtype: DTypeLike) -> Array:
  """Inverts `to_bytes`."""
  width = jnp.dtype(dtype).itemsize
  planes = [plane.astype(f"uint{8 * width}") for plane in jnp.split(x, width)]
  word = functools.reduce(jnp.bitwise_or, [p << 8 * i for i, p in enumerate(planes)])
  return jax.lax.bitcast_convert_type(word, dtype)


def blocks(x_NxS: Array, block: int) -> Array:
  """Splits (N, S) into blocks (N, K, block); pads a layer's last block with zeros."""
  n, s = x_NxS.shape
  if s % block:
    x_NxS = jnp.pad(x_NxS, ((0, 0), (0, -s % block)))
  return x_NxS.reshape(n, -1, block)


def _subset(seed: Array, n: int, s: int, k: int) -> Array:
  """Draws the indices (N, K) of the values to keep, from a seed uint32 (2,)."""
  key = jax.random.wrap_key_data(seed, impl="threefry2x32")
  draw = lambda key: jax.random.permutation(key, s)[:k]
  return jax.vmap(draw)(jax.random.split(key, n))


def _scatter(kept_NxK: Array, index_NxK: Array, s: int) -> Array:
  place = lambda kept, index: jnp.zeros(s, jnp.float32).at[index].set(kept)
  return jax.vmap(place)(kept_NxK, index_NxK)
