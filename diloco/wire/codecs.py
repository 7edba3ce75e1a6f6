"""Compressors by name: what one tensor of an outer gradient becomes on the wire.

A `Codec` is a pair of pure functions on a tensor of N layers with S values each,
and the exact size of what it sends, side information included. To add a compressor,
write the pair and name it in `COMPRESSORS`.

A tensor is here what one device holds of it. Where `mesh.fsdp` divides a parameter,
each shard is coded by itself, so that nothing is gathered: blocks, rows, subsets and
the largest values are a shard's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from diloco.wire import bits, formats

WHOLE_TENSOR, ROW = 0, -1
# Width of a plain (scaleless) format in bytes, and its type.
PLAIN = {"fp32": (4, jnp.float32), "bf16": (2, jnp.bfloat16)}


class Codec(NamedTuple):
  """What becomes of one tensor of N layers with S values each.

  Attributes:
    encode: float32 (N, S) and a PRNG key -> uint8 (nbytes(N, S),).
    decode: uint8 (nbytes(N, S),), N, S -> float32 (N, S).
    nbytes: N, S -> bytes on the wire.
  """

  encode: Callable[[jax.Array, jax.Array], jax.Array]
  decode: Callable[[jax.Array, int, int], jax.Array]
  nbytes: Callable[[int, int], int]


# From the length of a tensor's rows, see `wire.block_size`.
MakeCodec = Callable[[int], Codec]


@dataclasses.dataclass(frozen=True)
class Options:
  """Fields as in `config.wire`."""

  format: str = "e3m0"
  block_size: int = 128
  rounding: str = "nearest"
  density: float = 0.1


def make_codec(name: str, options: Options, row: int) -> Codec:
  """The compressor `name` for tensors whose rows have `row` values.

  Raises:
    ValueError: the compressor or the format is unknown.
  """
  if name not in COMPRESSORS:
    raise ValueError(
      f"wire.compressor is {name!r}; choose one of {', '.join(COMPRESSORS)}."
    )
  return COMPRESSORS[name](options, row)


def quantize(options: Options, row: int) -> Codec:
  """Every value in a small format, one scale byte per block (2501.18512, 2.4).

  A block is `block_size` consecutive values of one layer's tensor; the last one of
  a layer may be shorter. The scales follow the codes.
  """
  if options.format in PLAIN:
    return _plain(*PLAIN[options.format])
  fmt = formats.parse_format(options.format)
  stochastic = options.rounding == "stochastic"

  def block_of(s: int) -> int:
    named = {WHOLE_TENSOR: s, ROW: row}
    return min(named.get(options.block_size, options.block_size), s)

  def sizes(n: int, s: int) -> tuple[int, int]:
    return bits.packed_size(n * s, fmt.bits), n * -(-s // block_of(s))

  def encode(x_NxS, key):
    n, s = x_NxS.shape
    block = block_of(s)
    x_NxKxB = _blocks(x_NxS, block)
    amax_NxK = formats.largest_magnitude(x_NxKxB)
    finite_NxK = jnp.isfinite(amax_NxK)
    k_NxK = formats.scale_exponents(fmt, jnp.where(finite_NxK, amax_NxK, 0), stochastic)
    noise = jax.random.bits(key, x_NxKxB.shape) if stochastic else None
    codes = formats.encode(fmt, x_NxKxB, k_NxK[..., None], noise)
    # At once in XLA for TPU, which else computes them for each plane of the packing.
    codes = jax.lax.optimization_barrier(codes)
    if s % block:
      codes = codes.reshape(n, -1)[:, :s]
    scales = jnp.where(finite_NxK, k_NxK + formats.SCALE_BIAS, formats.NAN_SCALE)
    return jnp.concatenate(
      [bits.pack(codes, fmt.bits), scales.astype(jnp.uint8).reshape(-1)]
    )

  def decode(payload, n, s):
    block = block_of(s)
    size = sizes(n, s)[0]
    codes_NxS = bits.unpack(payload[:size], fmt.bits, n * s).reshape(n, s)
    scales_NxKx1 = payload[size:].reshape(n, -1, 1).astype(jnp.int32)
    k_NxKx1 = scales_NxKx1 - formats.SCALE_BIAS
    x = formats.decode(fmt, _blocks(codes_NxS, block), k_NxKx1)
    x = jnp.where(scales_NxKx1 == formats.NAN_SCALE, jnp.nan, x)
    return x.reshape(n, -1)[:, :s]

  return Codec(encode, decode, lambda n, s: sum(sizes(n, s)))


def topk(options: Options, row: int) -> Codec:
  """The largest magnitudes of each layer's tensor, with their indices (figure 11).

  k = ceil(density S) values per layer in `format`, and ceil(log2 S) bits each for
  where they stood, ascending.
  """
  values = quantize(options, row)

  def index_bytes(n: int, s: int) -> int:
    width = max(math.ceil(math.log2(s)), 1)
    return bits.packed_size(n * _kept(options, s) * width, 1)

  def encode(x_NxS, key):
    s = x_NxS.shape[1]
    _, index_NxK = jax.lax.top_k(jnp.abs(x_NxS), _kept(options, s))
    index_NxK = jnp.sort(index_NxK, axis=-1)
    kept_NxK = jnp.take_along_axis(x_NxS, index_NxK, axis=-1)
    width = max(math.ceil(math.log2(s)), 1)
    index_bits = (index_NxK[..., None] >> jnp.arange(width)) & 1
    index = bits.pack(index_bits.astype(jnp.uint8), 1)
    return jnp.concatenate([index, values.encode(kept_NxK, key)])

  def decode(payload, n, s):
    kept, size = _kept(options, s), index_bytes(n, s)
    width = max(math.ceil(math.log2(s)), 1)
    index_bits = bits.unpack(payload[:size], 1, n * kept * width)
    index_bits = index_bits.reshape(n, kept, width).astype(jnp.int32)
    index_NxK = (index_bits << jnp.arange(width)).sum(axis=-1)
    return _scatter(values.decode(payload[size:], n, kept), index_NxK, s)

  def nbytes(n, s):
    return index_bytes(n, s) + values.nbytes(n, _kept(options, s))

  return Codec(encode, decode, nbytes)


def random(options: Options, row: int, rescale: bool = False) -> Codec:
  """A random subset of each layer's tensor (FedDropout, figure 11).

  The receiver draws the same subset from a seed of 8 bytes that travels along, so
  no index is sent.
  """
  values = quantize(options, row)
  seed_bytes = 8

  def subset(seed, n: int, s: int):
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    draw = lambda k: jax.random.permutation(k, s)[: _kept(options, s)]
    return jax.vmap(draw)(jax.random.split(key, n))

  def encode(x_NxS, key):
    n, s = x_NxS.shape
    seed = jax.random.bits(key, (2,), jnp.uint32)
    kept_NxK = jnp.take_along_axis(x_NxS, subset(seed, n, s), axis=-1)
    if rescale:
      kept_NxK = kept_NxK * (s / _kept(options, s))
    code = values.encode(kept_NxK, jax.random.fold_in(key, 1))
    return jnp.concatenate([_to_bytes(seed), code])

  def decode(payload, n, s):
    seed = _from_bytes(payload[:seed_bytes], jnp.uint32)
    kept_NxK = values.decode(payload[seed_bytes:], n, _kept(options, s))
    return _scatter(kept_NxK, subset(seed, n, s), s)

  def nbytes(n, s):
    return seed_bytes + values.nbytes(n, _kept(options, s))

  return Codec(encode, decode, nbytes)


def dare(options: Options, row: int) -> Codec:
  """A random subset, rescaled so that its expectation is the tensor (DARE)."""
  return random(options, row, rescale=True)


COMPRESSORS: dict[str, Callable[[Options, int], Codec]] = {
  "quantize": quantize,
  "topk": topk,
  "random": random,
  "dare": dare,
}


def _plain(width: int, dtype) -> Codec:
  def encode(x_NxS, key):
    del key
    return _to_bytes(x_NxS.astype(dtype).reshape(-1))

  def decode(payload, n, s):
    return _from_bytes(payload, dtype).reshape(n, s).astype(jnp.float32)

  return Codec(encode, decode, lambda n, s: n * s * width)


def _to_bytes(x: jax.Array) -> jax.Array:
  """(n,) of w bytes each -> uint8 (w n,): all lowest bytes first, see `bits`."""
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


def _kept(options: Options, s: int) -> int:
  # Rounded before the ceiling: 0.1 * 30 is 3.0000000000000004.
  return max(math.ceil(round(options.density * s, 6)), 1)


def _scatter(kept_NxK: jax.Array, index_NxK: jax.Array, s: int) -> jax.Array:
  place = lambda kept, index: jnp.zeros(s, jnp.float32).at[index].set(kept)
  return jax.vmap(place)(kept_NxK, index_NxK)
