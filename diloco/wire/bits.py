"""Packing of b-bit codes into bytes: n codes take exactly ceil(n b / 8) bytes.

Codes are packed in planes. Where g codes fill s whole bytes, code i of every group is
in the i-th of g equal slices of the codes, byte j in the j-th of s equal slices of the
bytes. All work is then elementwise on long slices, which a CPU vectorises and which
fits a TPU's tiles: there an axis of two neighbouring codes is padded to 128 lanes.
"""

import functools
import math

import jax
import jax.numpy as jnp


def packed_size(n: int, bits: int) -> int:
  """Bytes of n codes of `bits` bits."""
  return -(-n * bits // 8)


def pack(codes: jax.Array, bits: int) -> jax.Array:
  """Packs codes in the order of the flattened array.

  First the codes that fill whole groups, in planes, the first code of a group in its
  lowest bits; then those that remain, in their order.

  Args:
    codes: uint8 of any shape with n elements, each below 2^bits.
    bits: width from 1 to 8.

  Returns:
    uint8 (ceil(n * bits / 8),).
  """
  group, _ = _group(bits)
  rest = codes.size % group
  if not rest:
    return _in_words(lambda x: _pack_groups(x, bits), codes, group)
  codes = codes.reshape(-1)
  # One group, of which the last codes are missing.
  last = _pack_groups(jnp.pad(codes[-rest:], (0, group - rest)), bits)
  whole = _pack_groups(codes[:-rest], bits)
  return jnp.concatenate([whole, last[: packed_size(rest, bits)]])


def unpack(packed: jax.Array, bits: int, n: int) -> jax.Array:
  """The inverse of `pack`: uint8 (ceil(n * bits / 8),) -> uint8 (n,)."""
  group, size = _group(bits)
  rest = n % group
  if not rest:
    return _unpack_groups(packed, bits)
  whole, last = jnp.split(packed, [n // group * size])
  last = _unpack_groups(jnp.pad(last, (0, size - last.size)), bits)
  return jnp.concatenate([_unpack_groups(whole, bits), last[:rest]])


def _group(bits: int) -> tuple[int, int]:
  """The smallest number of codes that fill whole bytes, and those bytes."""
  common = math.gcd(bits, 8)
  return 8 // common, bits // common


def _in_words(pack, codes: jax.Array, group: int) -> jax.Array:
  """Packs four codes at a time on CPU, where they divide into words.

  What computes the codes then ends with a change of type. Otherwise XLA for CPU draws
  it into the loop over the flat bytes and does not vectorise it: encoding would take
  several times as long.
  """
  flat = lambda codes: pack(codes.reshape(-1))
  if codes.shape[-1] % 4 or codes.size % (4 * group):
    return flat(codes)

  def in_words(codes):
    words = codes.reshape(*codes.shape[:-1], -1, 4)
    words = jax.lax.bitcast_convert_type(words, jnp.uint32)
    return jax.lax.bitcast_convert_type(flat(words), jnp.uint8).reshape(-1)

  return jax.lax.platform_dependent(codes, cpu=in_words, default=flat)


def _pack_groups(codes: jax.Array, bits: int) -> jax.Array:
  """(g k,) -> (s k,), with (g, s) of `_group`: of bytes, or of words of four."""
  group, size = _group(bits)
  planes = jnp.split(codes, group)
  out = []
  for byte in range(size):
    # Where code i begins, counted from this byte.
    starts = [i * bits - 8 * byte for i in range(group)]
    parts = [_shift(x, by) for x, by in zip(planes, starts) if -bits < by < 8]
    out.append(functools.reduce(jnp.bitwise_or, parts))
  return jnp.concatenate(out)


def _unpack_groups(packed: jax.Array, bits: int) -> jax.Array:
  """The inverse of `_pack_groups`, of bytes."""
  group, size = _group(bits)
  planes = jnp.split(packed, size)
  out = []
  for i in range(group):
    byte, start = divmod(i * bits, 8)
    code = _shift(planes[byte], -start)
    if start + bits > 8:
      code |= _shift(planes[byte + 1], 8 - start)
    out.append(code & ((1 << bits) - 1))
  return jnp.concatenate(out)


def _shift(x: jax.Array, by: int) -> jax.Array:
  """Every byte of x shifted up by so many bits, or down; no bit enters another byte."""
  stay = 0xFF >> by if by >= 0 else 0xFF << -by & 0xFF
  x = x & x.dtype.type(stay * (jnp.iinfo(x.dtype).max // 0xFF))
  return x << by if by >= 0 else x >> -by
