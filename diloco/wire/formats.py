"""Small floating-point formats of 2 to 8 bits with shared power-of-two scales (eXmY).

One sign bit, x exponent bits, y mantissa bits, subnormals, no infinity and no NaN:
values beyond the largest saturate. Formats that share their name with one of
`ml_dtypes` (float8_e4m3fn, float8_e5m2, ...) keep its reserved codes free and agree
with it bit for bit on what it can represent.

The papers send E3M0 (2501.18512, Section 2.4; arXiv 2405.13938 for eXmY): zero and
seven powers of two. A block of values shares a scale 2^k of one byte.

All arithmetic is on the integer bits of float32, so that results are the same on
every backend: XLA flushes subnormal floats to zero on some of them.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np

SCALE_BIAS = 127
# The scale byte of a block that held a NaN or an infinity, as in OCP's E8M0.
NAN_SCALE = 255


@dataclasses.dataclass(frozen=True)
class Format:
  """A format of 1 + exponent_bits + mantissa_bits bits.

  Attributes:
    name: as written in configs, for example e3m0.
    exponent_bits: x.
    mantissa_bits: y.
    bias: the exponent of a normal value is its exponent field minus this.
    max_code: magnitude code of the largest finite value.
  """

  name: str
  exponent_bits: int
  mantissa_bits: int
  bias: int
  max_code: int

  @property
  def bits(self) -> int:
    return 1 + self.exponent_bits + self.mantissa_bits

  @property
  def min_exponent(self) -> int:
    """Exponent of the smallest normal value; subnormals share it."""
    return 1 - self.bias

  @property
  def max_value(self) -> float:
    return self.magnitude(self.max_code)

  def magnitude(self, code: int) -> float:
    """The value of a magnitude code, a Python float."""
    field, mantissa = divmod(code, 1 << self.mantissa_bits)
    if field:
      mantissa += 1 << self.mantissa_bits
    return mantissa * 2.0 ** (max(field, 1) - self.bias - self.mantissa_bits)


# Formats of ml_dtypes that reserve codes: {name: largest finite magnitude code}.
_RESERVED = {"e5m2": 0x7B, "e4m3": 0x77, "e3m4": 0x6F, "e4m3fn": 0x7E}


def parse_format(name: str) -> Format:
  """The format of a name such as e3m0, e2m1 or e4m3fn.

  Raises:
    ValueError: the name is no format of 2 to 8 bits.
  """
  match = re.fullmatch(r"e(\d)m(\d)(fn)?", name)
  if match and (not match[3] or name in _RESERVED):
    x, y = int(match[1]), int(match[2])
    if x >= 1 and 2 <= 1 + x + y <= 8:
      bias = (1 << (x - 1)) - 1
      return Format(name, x, y, bias, _RESERVED.get(name, (1 << (x + y)) - 1))
  raise ValueError(
    f"wire.format is {name!r}; choose fp32, bf16 or eXmY with 1 + X + Y from 2 to 8"
    " bits and X at least 1, for example e3m0, e2m1, e4m3fn."
  )


def largest_magnitude(x: jax.Array) -> jax.Array:
  """The largest |x| along the last axis; NaN or infinity where x has one.

  The bits of magnitudes are ordered as the magnitudes are, infinity and NaN on top. A
  maximum of floats will not do: compiled for CPU, it drops every NaN of an array of
  more than some thousand values (jax 0.10.2).

  Args:
    x: float32 (..., n).

  Returns:
    float32 (...).
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
  largest = lambda bits: bits.max(axis=-1)

  def by_halves(bits):
    # XLA for CPU vectorises a comparison of halves, not a reduction of integers.
    while bits.shape[-1] % 2 == 0:
      half = bits.shape[-1] // 2
      bits = jnp.maximum(bits[..., :half], bits[..., half:])
    return largest(bits)

  bits = jax.lax.platform_dependent(bits, cpu=by_halves, default=largest)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def scale_exponents(
  fmt: Format, amax: jax.Array, stochastic: bool = False
) -> jax.Array:
  """The shared exponent k of blocks whose largest magnitudes are `amax`.

  The smallest k for which amax / 2^k rounds to a value of the format without
  saturating; for stochastic rounding, for which it does not exceed the largest
  value, so that rounding stays unbiased. Not so small that a decoded value would
  be a subnormal float32.

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
    # Halfway to the value that would follow the largest; a tie goes to the even
    # code, so it stays in range only if the largest code is even.
    limit = fmt.max_value + 2.0 ** (top_exponent - fmt.mantissa_bits - 1)
    inclusive = fmt.max_code % 2 == 0
  limit_bits = int(np.float32(limit).view(np.int32))
  # What the limit's fraction lacks to the next power of two, added to the bits of
  # amax, carries into the exponent field just where amax is beyond the limit.
  lacking = (1 << 23) - (limit_bits & 0x7FFFFF) - inclusive
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  k = ((bits + lacking) >> 23) - (limit_bits >> 23)
  lowest = -126 - (fmt.min_exponent - fmt.mantissa_bits)
  return jnp.clip(k, lowest, min(127, 127 - top_exponent))


def encode(
  fmt: Format, x: jax.Array, k: jax.Array, random_bits: jax.Array | None = None
) -> jax.Array:
  """Codes of x / 2^k: nearest value with ties to the even code, or stochastic.

  Between two neighbouring codes the value is linear in the bits of a float, so
  rounding to the nearest value is rounding of the shifted bits.

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
  field = jnp.maximum(field, 1) - 127 - k + fmt.bias  # Of a normal result.
  # Bits to drop; a subnormal result (field < 1) drops more of the same mantissa.
  depth = 23 - fmt.mantissa_bits + jnp.maximum(1 - field, 0)
  drop = jnp.minimum(depth, 26)  # All 24 bits, and room for the half.
  kept = mantissa >> drop
  rest = mantissa - (kept << drop)
  # Codes of a normal exponent field e start at e << y; the hidden bit adds one e.
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
  # The quantum 2^(e - bias - y + k) is a normal float32 by the choice of k.
  exponent = jnp.maximum(field, 1) - fmt.bias - fmt.mantissa_bits + k
  quantum = jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
  value = mantissa.astype(jnp.float32) * quantum
  return jnp.where(negative == 1, -value, value)
