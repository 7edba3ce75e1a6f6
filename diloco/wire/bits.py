"""Packing of b-bit codes into bytes: n codes take exactly ceil(n b / 8) bytes."""

import math

import jax
import jax.numpy as jnp


def packed_size(n: int, bits: int) -> int:
  """Bytes of n codes of `bits` bits."""
  return -(-n * bits // 8)


def pack(codes: jax.Array, bits: int) -> jax.Array:
  """Packs the last axis, first code in the lowest bits (little endian).

  Args:
    codes: uint8 (..., n), each below 2^bits.
    bits: width from 1 to 8.

  Returns:
    uint8 (..., ceil(n * bits / 8)).
  """
  n = codes.shape[-1]
  if bits == 8:
    return codes
  # Eight codes, `bits` bytes of them, as two words of four: this keeps what computes
  # the codes out of the loop over bytes, where XLA could not vectorise it on CPU.
  codes = _pad(codes, -n % 8)
  words = codes.reshape(*codes.shape[:-1], -1, 2, 4)
  words = jax.lax.bitcast_convert_type(words, jnp.uint32)
  mask = (1 << bits) - 1
  a, b, c, d = ((words >> 8 * i & mask) << bits * i for i in range(4))
  words = a | b | c | d
  low, high = words[..., 0], words[..., 1]
  out = []
  for byte in range(bits):
    # Where the high word's bits begin, counted from this byte.
    start = 4 * bits - 8 * byte
    value = low >> 8 * byte if start > 0 else jnp.zeros_like(low)
    if start < 8:
      value |= high << start if start >= 0 else high >> -start
    out.append(value.astype(jnp.uint8))
  packed = jnp.stack(out, axis=-1)
  packed = packed.reshape(*packed.shape[:-2], -1)
  return packed[..., : packed_size(n, bits)]


def unpack(packed: jax.Array, bits: int, n: int) -> jax.Array:
  """The inverse of `pack`: uint8 (..., ceil(n * bits / 8)) -> uint8 (..., n)."""
  if bits == 8:
    return packed
  group, size = _group(bits)
  packed = _pad(packed, -packed.shape[-1] % size)
  packed = packed.reshape(*packed.shape[:-1], -1, size)
  mask = jnp.uint8((1 << bits) - 1)
  out = []
  for i in range(group):
    byte, shift = divmod(i * bits, 8)
    code = packed[..., byte] >> shift
    if shift + bits > 8:
      code |= packed[..., byte + 1] << (8 - shift)
    out.append(code & mask)
  codes = jnp.stack(out, axis=-1)
  return codes.reshape(*codes.shape[:-2], -1)[..., :n]


def _group(bits: int) -> tuple[int, int]:
  """The smallest number of codes that fill whole bytes, and those bytes."""
  common = math.gcd(bits, 8)
  return 8 // common, bits // common


def _pad(x: jax.Array, amount: int) -> jax.Array:
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, amount)]) if amount else x
