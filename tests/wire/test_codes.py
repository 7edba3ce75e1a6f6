"""eXmY codes against ml_dtypes, tables and float64 by brute force; their packing."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.spec import formats
from diloco.spec.sizes import packed
from diloco.wire import codes as codes_lib

ML_DTYPES = {
  "e2m1": ml_dtypes.float4_e2m1fn,
  "e2m3": ml_dtypes.float6_e2m3fn,
  "e3m2": ml_dtypes.float6_e3m2fn,
  "e3m4": ml_dtypes.float8_e3m4,
  "e4m3": ml_dtypes.float8_e4m3,
  "e4m3fn": ml_dtypes.float8_e4m3fn,
  "e5m2": ml_dtypes.float8_e5m2,
}
GENERAL = [f"e{x}m{y}" for x in range(1, 8) for y in range(7) if 2 <= 1 + x + y <= 8]
ZERO = jnp.int32(0)

encode = jax.jit(codes_lib.encode, static_argnums=0)
decode = jax.jit(codes_lib.decode, static_argnums=0)
scale_exponents = jax.jit(codes_lib.scale_exponents, static_argnums=0)


def all_bf16() -> np.ndarray:
  x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
  return x[np.isfinite(x)]


@pytest.mark.parametrize("name", ML_DTYPES)
def test_agrees_with_ml_dtypes_on_all_bf16_values(name):
  fmt, x = formats.parse_format(name), all_bf16()
  theirs = x.astype(ML_DTYPES[name])
  in_range = np.abs(x) <= fmt.max_value
  assert float(ml_dtypes.finfo(ML_DTYPES[name]).max) == fmt.max_value
  codes = np.asarray(encode(fmt, x, ZERO))
  np.testing.assert_array_equal(codes[in_range], theirs.view(np.uint8)[in_range])
  values = np.asarray(decode(fmt, codes, ZERO))
  np.testing.assert_array_equal(values[in_range], theirs.astype(np.float32)[in_range])
  largest = np.sign(x) * fmt.max_value
  np.testing.assert_array_equal(values[~in_range], largest[~in_range])


def test_e3m0_is_zero_and_seven_powers_of_two():
  fmt = formats.parse_format("e3m0")
  values = np.asarray(decode(fmt, np.arange(16, dtype=np.uint8), ZERO))
  positive = [0, 0.25, 0.5, 1, 2, 4, 8, 16]
  np.testing.assert_array_equal(values, positive + [-v for v in positive])
  assert np.signbit(values[8])
  assert fmt.bits == 4
  assert fmt.max_value / fmt.magnitude(1) == 64


def test_e3m0_midpoints_go_to_the_even_code_and_large_values_saturate():
  fmt = formats.parse_format("e3m0")
  midpoints = np.float32([0.125, 0.375, 0.75, 1.5, 3, 6, 12])
  np.testing.assert_array_equal(encode(fmt, midpoints, ZERO), [0, 2, 2, 4, 4, 6, 6])
  below, above = np.nextafter(midpoints, 0), np.nextafter(midpoints, np.float32(99))
  np.testing.assert_array_equal(encode(fmt, below, ZERO), range(7))
  np.testing.assert_array_equal(encode(fmt, above, ZERO), range(1, 8))
  huge = np.float32([17, 1e30, -np.finfo(np.float32).max])
  np.testing.assert_array_equal(encode(fmt, huge, ZERO), [7, 7, 15])


@pytest.mark.parametrize("name", GENERAL)
def test_every_code_survives_a_round_trip(name):
  fmt = formats.parse_format(name)
  codes = np.arange(fmt.max_code + 1, dtype=np.uint8)
  for k in (-30, 0, 5):
    values = decode(fmt, codes, jnp.int32(k))
    table = np.float32([fmt.magnitude(int(c)) * 2.0**k for c in codes])
    np.testing.assert_array_equal(values, table)
    np.testing.assert_array_equal(encode(fmt, values, jnp.int32(k)), codes)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
  st.sampled_from(GENERAL),
  st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9
  ),
)
def test_the_nearest_value_is_that_of_brute_force(name, block):
  fmt = formats.parse_format(name)
  x = np.zeros(9, np.float32)
  x[: len(block)] = block
  k = int(scale_exponents(fmt, np.abs(x).max()))
  table = np.array([fmt.magnitude(c) for c in range(fmt.max_code + 1)])
  codes = np.asarray(encode(fmt, x, jnp.int32(k)))
  values = np.asarray(decode(fmt, codes, jnp.int32(k)), np.float64)
  distance = np.abs(np.abs(x.astype(np.float64))[:, None] - table * 2.0**k)
  np.testing.assert_array_equal(
    np.abs(np.abs(x.astype(np.float64)) - np.abs(values)), distance.min(axis=1)
  )
  magnitude = codes & ((1 << (fmt.bits - 1)) - 1)
  ties = (distance == distance.min(axis=1, keepdims=True)).sum(axis=1) > 1
  assert not np.any(magnitude[ties] % 2)
  np.testing.assert_array_equal(codes >> (fmt.bits - 1), np.signbit(x))


def test_subnormal_float32_values_are_coded_exactly():
  fmt = formats.parse_format("e3m0")
  tiny = np.float32([1e-40, -3e-42, 0.0, 1e-45])
  k = scale_exponents(fmt, np.abs(tiny).max())
  # Every nonzero decoded value is a normal float32, so nothing depends on whether
  # a backend flushes subnormals; what is smaller becomes zero.
  assert int(k) == -126 + 2
  np.testing.assert_array_equal(np.abs(decode(fmt, encode(fmt, tiny, k), k)), 0)
  edge = np.float32([2.0**-126, 2.0**-127 * 1.25, 2.0**-127])
  k = scale_exponents(fmt, edge.max())
  np.testing.assert_array_equal(
    decode(fmt, encode(fmt, edge, k), k), np.float32([2.0**-126, 2.0**-126, 0])
  )


def test_the_scale_grows_exactly_where_the_largest_value_no_longer_fits():
  up = lambda x: np.nextafter(x, np.float32(np.inf))
  down = lambda x: np.nextafter(x, np.float32(0))
  # The largest code is even in e4m3fn only; there a tie goes to it.
  for fmt in map(formats.parse_format, [*GENERAL, "e4m3fn"]):
    table = [fmt.magnitude(c) for c in (fmt.max_code - 1, fmt.max_code)]
    # The step after the largest value; without mantissa bits it doubles the value.
    step = table[1] - table[0] if fmt.mantissa_bits else table[1]
    middle, even = np.float32(table[1] + step / 2), fmt.max_code % 2 == 0
    around = np.array([down(middle), middle, up(middle)])
    for power in (-50, 0, 30):
      k = codes_lib.scale_exponents(fmt, np.ldexp(around, power))
      np.testing.assert_array_equal(k - power, [0, 0 if even else 1, 1])


def test_no_block_decodes_to_an_infinity():
  largest = float(np.finfo(np.float32).max)
  for name in GENERAL:
    fmt = formats.parse_format(name)
    k = int(codes_lib.scale_exponents(fmt, largest))
    assert fmt.max_value * 2.0**k <= largest < fmt.max_value * 2.0 ** (k + 1)


@pytest.mark.parametrize("name", ["e3m9", "e0m3", "fp4", "e8m0", "e2m1fn", ""])
def test_unknown_formats_are_refused(name):
  with pytest.raises(ValueError, match=r"wire.format is"):
    formats.parse_format(name)


@pytest.mark.parametrize("n", [1, 7, 15, 96, 128, 4097, 100_000])
def test_largest_magnitude_equals_numpy(n):
  bits = np.random.default_rng(n).integers(0, 1 << 32, (30, n), dtype=np.uint32)
  bits[10:20] &= 0xBFFFFFFF  # Finite: the top bit of the exponent is off.
  bits[20:] &= 0x807FFFFF  # Subnormal, which XLA flushes where it computes.
  x = bits.view(np.float32)
  got = np.asarray(jax.jit(codes_lib.largest_magnitude)(x))
  np.testing.assert_array_equal(got, np.abs(x).max(axis=-1))


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("shape", [(1,), (9,), (3, 64), (5, 7)])
def test_packing_puts_every_bit_where_the_layout_says(width, shape):
  codes = np.random.default_rng(width).integers(0, 1 << width, shape).astype(np.uint8)
  n, group = codes.size, 8 // math.gcd(width, 8)
  size = group * width // 8
  groups = n // group  # Whole ones, in planes; what remains is a group of its own.
  expected = np.zeros((groups + 1) * size, int)
  for index, code in enumerate(codes.reshape(-1)):
    i, g = divmod(index, groups) if index < groups * group else (index % group, groups)
    for bit in range(width):
      byte, place = divmod(i * width + bit, 8)
      at = byte * groups + g if g < groups else groups * size + byte
      expected[at] |= (int(code) >> bit & 1) << place
  code = jax.jit(codes_lib.pack, static_argnums=1)(codes, width)
  np.testing.assert_array_equal(code, expected[: packed(n, width)])
  np.testing.assert_array_equal(codes_lib.unpack(code, width, n), codes.reshape(-1))
