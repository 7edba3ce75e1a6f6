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
  group, size = _group(bits)
  codes = _pad(codes, -n % group)
  codes = codes.reshape(*codes.shape[:-1], -1, group)
  out = []
  for byte in range(size):
    # All codes that have bits in this byte, shifted to their place in it.
    value = jnp.zeros(codes.shape[:-1], jnp.uint8)
    for i in range(byte * 8 // bits, min(-(-(byte + 1) * 8 // bits), group)):
      shift = i * bits - byte * 8
      code = codes[..., i]
      value |= code << shift if shift >= 0 else code >> -shift
    out.append(value)
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
