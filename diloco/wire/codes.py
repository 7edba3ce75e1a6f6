"""Values to codes of small formats, codes to bytes, and back.

All arithmetic on values is on the integer bits of float32, so that results are the same
on every backend: XLA flushes subnormal floats to zero on some of them.

Bytes: n codes of b bits take exactly ceil(n b / 8). Codes are packed in planes. If g
codes fill s whole bytes, then code i of every group comes from the i-th of g equal
slices of the codes, and byte j goes to the j-th of s equal slices of the bytes. So all
work is elementwise on long slices: CPUs vectorise it, and it fits a TPU's tiles, which
would pad an axis of two neighbouring codes to 128.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from diloco.wire.formats import Format
from diloco.wire.sizes import packed

SCALE_BIAS = 127
# The scale byte of a block with a NaN or an infinity, as in OCP's E8M0.
NAN_SCALE = 255


def largest_magnitude(x: jax.Array) -> jax.Array:
  """The largest |x| along the last axis; NaN or infinity if x has one.

  Compares the bits of magnitudes, which are ordered as the magnitudes are, with
  infinity and NaN on top. A maximum of floats loses NaNs: compiled for CPU, it drops
  those of arrays of more than some thousand values (jax 0.10.2).

  Args:
    x: float32 (..., n).

  Returns:
    float32 (...).
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
  largest = lambda bits: bits.max(axis=-1)

  def by_halves(bits):
    # XLA for CPU vectorises a comparison of halves, but no reduction of integers.
    while bits.shape[-1] % 2 == 0:
      half = bits.shape[-1] // 2
      bits = jnp.maximum(bits[..., :half], bits[..., half:])
    return largest(bits)

  bits = jax.lax.platform_dependent(bits, cpu=by_halves, default=largest)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def scale_exponents(
  fmt: Format, amax: jax.Array, stochastic: bool = False
) -> jax.Array:
  """The shared exponent k of blocks, from their largest magnitudes.

  Nearest rounding: the smallest k for which amax / 2^k rounds to a value of the format
  without saturating. Stochastic rounding: the smallest k for which amax / 2^k does not
  exceed the largest value, so that rounding stays unbiased. In both cases k is large
  enough that no decoded value is a subnormal float32.

  Args:
    fmt: the format.
    amax: float32, non-negative and finite.
    stochastic: rounding mode.

  Returns:
    int32, like amax.
  """
  top_exponent = (fmt.max_code >> fmt.mantissa_bits) - fmt.bias
  if stochastic:
    limit, inclusive = fmt.max_value, True
  else:
    # Halfway to the value that would follow the largest. A tie goes to the even code,
    # so it stays in range only if the largest code is even.
    limit = fmt.max_value + 2.0 ** (top_exponent - fmt.mantissa_bits - 1)
    inclusive = fmt.max_code % 2 == 0
  limit_bits = int(np.float32(limit).view(np.int32))
  # `lacking` is what the fraction of the limit lacks to the next power of two. Added to
  # the bits of amax, it carries into the exponent exactly if amax is beyond the limit.
  lacking = (1 << 23) - (limit_bits & 0x7FFFFF) - inclusive
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  k = ((bits + lacking) >> 23) - (limit_bits >> 23)
  lowest = -126 - (fmt.min_exponent - fmt.mantissa_bits)
  return jnp.clip(k, lowest, min(127, 127 - top_exponent))


def encode(
  fmt: Format, x: jax.Array, k: jax.Array, random_bits: jax.Array | None = None
) -> jax.Array:
  """Codes of x / 2^k: the nearest value with ties to the even code, or stochastic.

  Between two neighbouring codes the value is linear in the bits of a float, so rounding
  to the nearest value is rounding of the shifted bits.

  Args:
    fmt: the format.
    x: float32, finite.
    k: int32 scale exponents from `scale_exponents`, broadcastable to x.
    random_bits: uint32 like x for stochastic rounding; None rounds to nearest.

  Returns:
    uint8 codes: sign bit above the magnitude.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  sign = jax.lax.shift_right_logical(bits, 31)
  field, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
  # |x| = mantissa * 2^(field - 150); a subnormal x has no hidden bit.
  mantissa |= jnp.where(field > 0, 1 << 23, 0)
  # The exponent field of a normal result.
  field = jnp.maximum(field, 1) - 127 - k + fmt.bias
  # Bits to drop; a subnormal result (field < 1) drops more of the same mantissa.
  depth = 23 - fmt.mantissa_bits + jnp.maximum(1 - field, 0)
  drop = jnp.minimum(depth, 26)  # All 24 bits, and room for the half.
  kept = mantissa >> drop
  rest = mantissa - (kept << drop)
  # Codes of a normal exponent field e start at e << Y; the hidden bit adds one to e.
  field = jnp.minimum(jnp.maximum(field - 1, 0), 1 << fmt.exponent_bits)
  code = (field << fmt.mantissa_bits) + kept
  if random_bits is None:
    half = 1 << (drop - 1)
    up = (rest > half) | ((rest == half) & (code & 1 == 1))
  else:
    # Up with probability rest / 2^depth, in units of 2^-26.
    threshold = (random_bits >> 6).astype(jnp.int32) >> (26 - drop)
    up = threshold < rest >> jnp.minimum(depth - drop, 31)
  code = jnp.minimum(code + up, fmt.max_code)
  code = code | sign << (fmt.bits - 1)
  return code.astype(jnp.uint8)


def decode(fmt: Format, codes: jax.Array, k: jax.Array) -> jax.Array:
  """Values of codes times 2^k.

  Args:
    fmt: the format.
    codes: uint8, sign bit above the magnitude.
    k: int32 scale exponents from `scale_exponents`, broadcastable to codes.

  Returns:
    float32, exact.
  """
  codes = codes.astype(jnp.int32)
  magnitude = codes & ((1 << (fmt.bits - 1)) - 1)
  negative = codes >> (fmt.bits - 1)
  field = magnitude >> fmt.mantissa_bits
  if fmt.mantissa_bits:
    hidden = (field > 0).astype(jnp.int32) << fmt.mantissa_bits
    mantissa = (magnitude & ((1 << fmt.mantissa_bits) - 1)) | hidden
  else:
    mantissa = (field > 0).astype(jnp.int32)
  # `scale_exponents` keeps the quantum 2^(e - bias - Y + k) a normal float32.
  exponent = jnp.maximum(field, 1) - fmt.bias - fmt.mantissa_bits + k
  quantum = jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
  value = mantissa.astype(jnp.float32) * quantum
  return jnp.where(negative == 1, -value, value)


def pack(codes: jax.Array, bits: int) -> jax.Array:
  """Packs codes in the order of the flattened array.

  The codes that fill whole groups come first, in planes, with the first code of a group
  in its lowest bits; the remaining codes follow in their order.

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
  # The remaining codes are a group with missing codes at its end.
  last = _pack_groups(jnp.pad(codes[-rest:], (0, group - rest)), bits)
  whole = _pack_groups(codes[:-rest], bits)
  return jnp.concatenate([whole, last[: packed(rest, bits)]])


def unpack(code: jax.Array, bits: int, n: int) -> jax.Array:
  """The inverse of `pack`: uint8 (ceil(n * bits / 8),) -> uint8 (n,)."""
  group, size = _group(bits)
  rest = n % group
  if not rest:
    return _unpack_groups(code, bits)
  whole, last = jnp.split(code, [n // group * size])
  last = _unpack_groups(jnp.pad(last, (0, size - last.size)), bits)
  return jnp.concatenate([_unpack_groups(whole, bits), last[:rest]])


def _group(bits: int) -> tuple[int, int]:
  """The smallest number of codes that fill whole bytes, and those bytes."""
  common = math.gcd(bits, 8)
  return 8 // common, bits // common


def _in_words(pack: Callable, codes: jax.Array, group: int) -> jax.Array:
  """Packs four codes at a time on CPU, if they divide into words.

  The change of type keeps XLA for CPU from fusing the encoding into the loop over the
  flat bytes, which it does not vectorise: encoding would take several times as long.
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
  """Packs whole groups of codes: (g k,) -> (s k,), of bytes or of words of four."""
  group, size = _group(bits)
  planes = jnp.split(codes, group)
  out = []
  for byte in range(size):
    # First bit of each code, counted from this byte.
    starts = [i * bits - 8 * byte for i in range(group)]
    parts = [_shift(x, by) for x, by in zip(planes, starts) if -bits < by < 8]
    out.append(functools.reduce(jnp.bitwise_or, parts))
  return jnp.concatenate(out)


def _unpack_groups(code: jax.Array, bits: int) -> jax.Array:
  """The inverse of `_pack_groups`, of bytes."""
  group, size = _group(bits)
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
  """Shifts every byte of x up, or down if `by` is negative; bits stay in their byte."""
  stay = 0xFF >> by if by >= 0 else 0xFF << -by & 0xFF
  x = x & x.dtype.type(stay * (jnp.iinfo(x.dtype).max // 0xFF))
  return x << by if by >= 0 else x >> -by
