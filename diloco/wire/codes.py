"""Rounds values to codes of small formats and packs codes into bytes, and the inverse.

Values: encoding computes with the integer bits of float32, and decoding is exact. So
all backends give the same result, even backends that flush subnormal floats to zero.

Bytes: n codes of b bits take exactly ceil(n b / 8) bytes. Codes are packed in groups:
the g codes of a group fill s whole bytes. The array of codes has g equal slices, the
planes: plane i holds code i of every group. The array of bytes has s equal slices:
slice j holds byte j of every group. So all operations are elementwise on long slices,
which CPUs vectorise. TPUs would pad a last axis of g codes to 128; long slices need no
padding.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from diloco.spec.formats import Format
from diloco.spec.sizes import packed

SCALE_BIAS = 127
# The scale byte of a block that holds a NaN or an infinity, as in OCP's E8M0.
NAN_SCALE = 255


def largest_magnitude(x: jax.Array) -> jax.Array:
  """Returns the largest |x| along the last axis; NaN or infinity if x has one.

  Compares the bits of magnitudes, which have the same order as the magnitudes; infinity
  and NaN are largest. A maximum of floats would lose NaNs: XLA for CPU drops NaNs in
  arrays of more than a few thousand values (jax 0.10.2).

  Args:
    x: float32 (..., n).

  Returns:
    float32 (...).
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
  largest = lambda bits: bits.max(axis=-1)

  def by_halves(bits: jax.Array) -> jax.Array:
    # XLA for CPU vectorises comparisons of two halves, but not reductions of integers.
    while bits.shape[-1] % 2 == 0:
      half = bits.shape[-1] // 2
      bits = jnp.maximum(bits[..., :half], bits[..., half:])
    return largest(bits)

  bits = jax.lax.platform_dependent(bits, cpu=by_halves, default=largest)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def scale_exponents(fmt: Format, amax: jax.Array) -> jax.Array:
  """Returns the shared exponent k of each block, from its largest magnitude.

  k is the smallest exponent that meets two conditions: amax / 2^k rounds to a value of
  the format without saturation, and no decoded value is a subnormal float32.

  Args:
    amax: float32, non-negative and finite.

  Returns:
    int32, like amax.
  """
  top_exponent = (fmt.max_code >> fmt.mantissa_bits) - fmt.bias
  # The limit is the middle between the largest value and the next value, if the format
  # had a next value. A tie goes to the even code, so the limit itself stays in range
  # only if the largest code is even.
  limit = fmt.max_value + 2.0 ** (top_exponent - fmt.mantissa_bits - 1)
  inclusive = fmt.max_code % 2 == 0
  limit_bits = int(np.float32(limit).view(np.int32))
  # The sum bits + lacking carries into the exponent exactly if the mantissa of amax is
  # above the limit's mantissa (or equal to it, if the limit is not inclusive).
  lacking = (1 << 23) - (limit_bits & 0x7FFFFF) - inclusive
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  k = ((bits + lacking) >> 23) - (limit_bits >> 23)
  lowest = -126 - (fmt.min_exponent - fmt.mantissa_bits)
  return jnp.clip(k, lowest, min(127, 127 - top_exponent))


def encode(fmt: Format, x: jax.Array, k: jax.Array) -> jax.Array:
  """Rounds x / 2^k to the nearest code; ties go to the even code.

  Between two neighbouring codes the value is linear in the bits of a float. So rounding
  the shifted bits rounds the value.

  Args:
    x: float32, finite.
    k: int32 scale exponents from `scale_exponents`, broadcastable to x.

  Returns:
    uint8 codes; the sign bit is above the bits of the magnitude.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  sign = jax.lax.shift_right_logical(bits, 31) << (fmt.bits - 1)
  if not fmt.mantissa_bits:
    return (_nearest_power(fmt, bits & 0x7FFFFFFF, k) | sign).astype(jnp.uint8)
  field, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
  # |x| = mantissa * 2^(field - 150); a subnormal x has no hidden bit.
  mantissa |= jnp.where(field > 0, 1 << 23, 0)
  # From here on, `field` is the exponent field of the result.
  field = jnp.maximum(field, 1) - 127 - k + fmt.bias
  # Number of mantissa bits to drop; a subnormal result (field < 1) drops more. From 24
  # on, `kept` is 0.
  drop = jnp.minimum(23 - fmt.mantissa_bits + jnp.maximum(1 - field, 0), 26)
  kept = mantissa >> drop
  rest = mantissa - (kept << drop)
  # `kept` has the hidden bit, which adds 1 to the exponent field of the code.
  field = jnp.minimum(jnp.maximum(field - 1, 0), 1 << fmt.exponent_bits)
  code = (field << fmt.mantissa_bits) + kept
  half = 1 << (drop - 1)
  up = (rest > half) | ((rest == half) & (code & 1 == 1))
  code = jnp.minimum(code + up, fmt.max_code)
  return (code | sign).astype(jnp.uint8)


def _nearest_power(fmt: Format, bits: jax.Array, k: jax.Array) -> jax.Array:
  """Rounds to powers of two as `encode` does, but with a third of the operations.

  Args:
    bits: int32, the bits of |x|.
    k: as in `encode`.

  Returns:
    int32 magnitude codes.
  """
  # The bits of |x| / 2^k, but with the format's exponent bias in place of float32's.
  shifted = bits - ((k + 127 - fmt.bias) << 23)
  odd = shifted >> 23 & 1
  normal = (shifted + ((1 << 22) - 1) + odd) >> 23
  # The middle between 0 and the smallest power is half of this power. A subnormal x has
  # no hidden bit.
  middle = jnp.where(bits < 1 << 23, 1 << 22, 0)
  code = jnp.where(shifted < 1 << 23, shifted > middle, normal)
  return jnp.minimum(code, fmt.max_code)


def decode(fmt: Format, codes: jax.Array, k: jax.Array) -> jax.Array:
  """Returns the values of the codes, times 2^k.

  Args:
    codes: uint8; the sign bit is above the bits of the magnitude.
    k: int32 scale exponents from `scale_exponents`, broadcastable to codes.

  Returns:
    float32, exact.
  """
  codes = codes.astype(jnp.int32)
  magnitude = codes & ((1 << (fmt.bits - 1)) - 1)
  negative = codes >> (fmt.bits - 1)
  if not fmt.mantissa_bits:  # The magnitude is an exponent.
    bits = jnp.where(magnitude > 0, (magnitude + (k + 127 - fmt.bias)) << 23, 0)
    return jax.lax.bitcast_convert_type(bits | negative << 31, jnp.float32)
  field = magnitude >> fmt.mantissa_bits
  hidden = (field > 0).astype(jnp.int32) << fmt.mantissa_bits
  mantissa = (magnitude & ((1 << fmt.mantissa_bits) - 1)) | hidden
  # `scale_exponents` keeps the quantum, 2^exponent, a normal float32.
  exponent = jnp.maximum(field, 1) - fmt.bias - fmt.mantissa_bits + k
  quantum = jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
  value = mantissa.astype(jnp.float32) * quantum
  return jnp.where(negative == 1, -value, value)


def pack(codes: jax.Array, bits: int) -> jax.Array:
  """Packs the codes of a flattened array into bytes.

  Whole groups (see the top of this file) come first, in planes; the first code of a
  group takes the lowest bits. The remaining codes follow in their order.

  Args:
    codes: uint8 of any shape with n elements, each below 2^bits.
    bits: bits of a code, 1 to 8.

  Returns:
    uint8 (ceil(n * bits / 8),).
  """
  group, _ = group_size(bits)
  rest = codes.size % group
  if not rest:
    return _in_words(lambda x: _pack_groups(x, bits), codes, group)
  codes = codes.reshape(-1)
  # The remaining codes form a group that is padded with zeros.
  last = _pack_groups(jnp.pad(codes[-rest:], (0, group - rest)), bits)
  whole = _pack_groups(codes[:-rest], bits)
  return jnp.concatenate([whole, last[: packed(rest, bits)]])


def unpack(code: jax.Array, bits: int, n: int) -> jax.Array:
  """Inverts `pack`: uint8 (ceil(n * bits / 8),) -> uint8 (n,)."""
  group, size = group_size(bits)
  rest = n % group
  if not rest:
    return _unpack_groups(code, bits)
  whole, last = jnp.split(code, [n // group * size])
  last = _unpack_groups(jnp.pad(last, (0, size - last.size)), bits)
  return jnp.concatenate([_unpack_groups(whole, bits), last[:rest]])


def group_size(bits: int) -> tuple[int, int]:
  """Returns (g, s): g codes fill s whole bytes, and no smaller number of codes does."""
  common = math.gcd(bits, 8)
  return 8 // common, bits // common


def _in_words(
  pack: Callable[[jax.Array], jax.Array], codes: jax.Array, group: int
) -> jax.Array:
  """Packs codes; on CPUs as words of four codes, if the codes divide into words.

  The cast to words keeps XLA for CPU from fusing the encoding into the loop over flat
  bytes. XLA does not vectorise such a loop: encoding would take several times as long.
  """
  flat = lambda codes: pack(codes.reshape(-1))
  if codes.shape[-1] % 4 or codes.size % (4 * group):
    return flat(codes)

  def in_words(codes: jax.Array) -> jax.Array:
    words = codes.reshape(*codes.shape[:-1], -1, 4)
    words = jax.lax.bitcast_convert_type(words, jnp.uint32)
    return jax.lax.bitcast_convert_type(flat(words), jnp.uint8).reshape(-1)

  return jax.lax.platform_dependent(codes, cpu=in_words, default=flat)


def _pack_groups(codes: jax.Array, bits: int) -> jax.Array:
  """Packs k whole groups of codes, (g k,) -> (s k,); also takes words of 4 codes."""
  group, size = group_size(bits)
  planes = jnp.split(codes, group)
  out = []
  for byte in range(size):
    # The first bit of each code, counted from the first bit of this byte.
    starts = [i * bits - 8 * byte for i in range(group)]
    parts = [_shift(x, by) for x, by in zip(planes, starts) if -bits < by < 8]
    out.append(functools.reduce(jnp.bitwise_or, parts))
  return jnp.concatenate(out)


def _unpack_groups(code: jax.Array, bits: int) -> jax.Array:
  """Inverts `_pack_groups` for uint8; words of 4 codes are not supported."""
  group, size = group_size(bits)
  planes = jnp.split(code, size)
  out = []
  for i in range(group):
    byte, start = divmod(i * bits, 8)
    x = _shift(planes[byte], -start)
    if start + bits > 8:
      x |= _shift(planes[byte + 1], 8 - start)
    out.append(x & ((1 << bits) - 1))
  return jnp.concatenate(out)


def _shift(x: jax.Array, by: int) -> jax.Array:
  """Shifts every byte of x up, or down if `by` < 0; bits never move to another byte."""
  stay = 0xFF >> by if by >= 0 else 0xFF << -by & 0xFF
  x = x & x.dtype.type(stay * (jnp.iinfo(x.dtype).max // 0xFF))
  return x << by if by >= 0 else x >> -by
