"""Compressors on one tensor: exact sizes and round trips."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import one_tensor
import pytest

import diloco.contrib.chunked_topk  # noqa: F401  Registers its name.
from diloco.spec import sizes
from diloco.spec.fields import WireConfig

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Codec:
  """A compressor without state, for tensors with rows of `row` values."""

  wire: WireConfig
  row: int

  def encode(self, x, key) -> jax.Array:
    return one_tensor.encode(self.wire, jnp.asarray(x), (), self.row, key)[0]

  def decode(self, code, n, s) -> jax.Array:
    return one_tensor.decode(self.wire, code, n, s, self.row)

  def nbytes(self, n, s) -> int:
    return sizes.size_of(self.wire.compressor)(self.wire, n, s, self.row)


def codec(name="quantize", row=1, **options) -> Codec:
  return Codec(WireConfig(compressor=name, **options), row)


CHUNKS = {"format": "e1m0", "density": 0.1, "block_size": 0}


@pytest.mark.parametrize(
  ("name", "options", "n", "s", "expected"),
  [
    ("quantize", {"format": "fp32"}, 2, 10, 80),
    ("quantize", {"format": "bf16"}, 2, 10, 40),
    ("quantize", {"format": "e3m0", "block_size": 4}, 2, 10, 10 + 2 * 3),
    ("quantize", {"format": "e3m0", "block_size": 0}, 2, 10, 10 + 2),
    ("quantize", {"format": "e2m3", "block_size": 5}, 1, 10, 8 + 2),
    ("quantize", {"format": "e1m0", "block_size": 16}, 1, 100, 25 + 7),
    # k = 3 of 30: indices of 5 bits, values of 32.
    ("topk", {"format": "fp32", "density": 0.1}, 2, 30, math.ceil(2 * 3 * 5 / 8) + 24),
    # Per layer, three chunks of 16, padded: k = 2, indices of 4 bits, codes of 2 bits.
    ("chunked_topk(chunk=16)", CHUNKS, 2, 40, 6 * 2 * 4 // 8 + 6 * 2 * 2 // 8 + 6),
    ("random", {"format": "fp32", "density": 0.1}, 2, 30, 8 + 24),
    ("dare", {"format": "bf16", "density": 0.5}, 1, 9, 8 + 10),
  ],
)
def test_payload_sizes_are_exact(name, options, n, s, expected):
  c = codec(name, **options)
  assert c.nbytes(n, s) == expected
  code = c.encode(jnp.ones((n, s)), KEY)
  assert (code.dtype, code.shape) == (jnp.uint8, (expected,))


def test_scale_bytes_are_those_of_e8m0():
  # A byte b stands for 2^(b - 127), and 255 for NaN (OCP Microscaling Formats).
  x = np.float32([[16, 1, 2, 64, np.nan, 1, 2.0**-120, 0]])
  code = codec(format="e3m0", block_size=2).encode(x, KEY)
  # 16 is the largest value of e3m0. The smallest scale is that of 2^-124, since no
  # decoded value may be a subnormal number.
  np.testing.assert_array_equal(code[4:], [127, 129, 255, 127 - 124])


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("quantize", {"format": "e3m0", "block_size": 96}),
    ("quantize", {"format": "e3m0", "block_size": sizes.WHOLE_TENSOR}),
    ("quantize", {"format": "e3m0", "block_size": sizes.ROW}),
    ("quantize", {"format": "e2m1", "block_size": 16}),
    ("quantize", {"format": "e4m3fn"}),
    ("quantize", {"format": "bf16"}),
    ("topk", {"format": "e3m0"}),
  ],
)
def test_non_finite_values_are_never_lost_at_real_sizes(name, options):
  # For arrays of a few thousand values or more, XLA for CPU uses other kernels than for
  # small ones; there a maximum of floats drops every NaN.
  m, row, s = 2, 1000, 1_000_003
  c = codec(name, row, **options)
  encode = jax.jit(jax.vmap(c.encode))
  decode = jax.jit(jax.vmap(lambda code: c.decode(code, 1, s)))
  keys_M = jax.random.split(KEY, m)
  x_Mx1xS = np.random.default_rng(4).normal(size=(m, 1, s)).astype(np.float32)
  where = np.array([0, 127, 128, 5000, 65_536, 99_968, 99_999, s - 1])
  for bad in (np.nan, np.inf):
    x_Mx1xS[1, 0, where[::2]], x_Mx1xS[1, 0, where[1::2]] = bad, -bad
    y_Mx1xS = np.asarray(decode(encode(x_Mx1xS, keys_M)))
    assert not np.isfinite(y_Mx1xS[1, 0, where]).any()
    assert np.isfinite(y_Mx1xS[0]).all()
    if name == "quantize" and options["format"] != "bf16":
      size = options.get("block_size", 128)
      size = {sizes.WHOLE_TENSOR: s, sizes.ROW: row}.get(size, size)
      blocks = np.isin(np.arange(s) // size, where // size)
      np.testing.assert_array_equal(np.isnan(y_Mx1xS[1, 0]), blocks)


def test_topk_finds_values_beyond_the_integers_of_float32():
  s = 2**24 + 11
  where = [0, 2**24 - 1, 2**24 + 1, 2**24 + 3, s - 1]
  x = np.zeros((1, s), np.float32)
  x[0, where] = [1, -2, 4, -8, 16]
  c = codec("topk", format="e3m0", density=5 / s)
  y = np.asarray(jax.jit(lambda x: c.decode(c.encode(x, KEY), 1, s))(x))
  np.testing.assert_array_equal(np.flatnonzero(y), where)
  np.testing.assert_array_equal(y[0, where], x[0, where])


@pytest.mark.parametrize(("name", "factor"), [("random", 1.0), ("dare", 4.0)])
def test_random_subsets_are_unindexed_and_rescaled(name, factor):
  x = np.random.default_rng(2).normal(size=(2, 80)).astype(np.float32)
  c = codec(name, format="fp32", density=0.25)
  y = np.asarray(c.decode(c.encode(x, KEY), 2, 80))
  assert (np.count_nonzero(y, axis=1) == 20).all()
  np.testing.assert_allclose(y[y != 0], factor * x[y != 0], rtol=1e-6)
  other = np.asarray(c.decode(c.encode(x, jax.random.key(1)), 2, 80))
  assert np.any((y != 0) != (other != 0))
