"""Bins around the mean: values and tables against NumPy, block by block."""

import jax
import numpy as np
import one_tensor
import pytest

import diloco.contrib.bins
import diloco.contrib.chunked_topk  # noqa: F401  Registers its name.
from diloco.spec import sizes
from diloco.spec.fields import WireConfig

KEY = jax.random.key(0)


def by_hand(x, bits):
  """What a receiver has of one block (MuLoCo, `QuantizationCompressor`)."""
  bins, x = 2**bits, np.asarray(x, np.float64)
  width = 6 * x.std(ddof=1) / bins if len(x) > 1 else 0
  place = np.round((x - x.mean()) / (width or 1)) + bins // 2
  place = np.clip(place, 0, bins - 1)
  return np.array([x[place == p].mean() for p in place])


def through(wire, x, row=1):
  code = one_tensor.encode(wire, x, (), row, KEY)[0]
  assert code.nbytes == sizes.quantize(wire, *x.shape, row)
  return np.asarray(one_tensor.decode(wire, code, *x.shape, row))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
  ("block", "row", "cuts"),
  [(16, 1, (16, 32, 40)), (0, 1, (40,)), (-1, 10, (10, 20, 30, 40)), (39, 1, (39, 40))],
)
def test_a_bin_decodes_to_the_mean_of_its_values(bits, block, row, cuts):
  x = np.random.default_rng(0).standard_t(3, (2, 40)).astype(np.float32)
  x[1, 5:12] += 20  # A mean that is not 0.
  found = through(WireConfig(format=f"bins{bits}", block_size=block), x, row)
  for layer, values in zip(x, found):
    starts = (0, *cuts[:-1])
    wanted = [by_hand(layer[a:b], bits) for a, b in zip(starts, cuts)]
    np.testing.assert_allclose(values, np.concatenate(wanted), rtol=2**-8)
    assert len(np.unique(values)) <= len(cuts) * 2**bits


def test_equal_values_stay_and_bad_values_are_not_hidden():
  x = np.full((1, 32), 0.75, np.float32)
  wire = WireConfig(format="bins2", block_size=16)
  np.testing.assert_array_equal(through(wire, x), x)
  for bad in (np.nan, np.inf):
    x[0, 20] = bad
    found = through(wire, x)
    np.testing.assert_array_equal(found[0, :16], 0.75)
    assert not np.isfinite(found[0, 16:]).any()


def test_the_size_is_that_of_codes_and_tables():
  # 40 codes of 2 bits, and three tables of four bfloat16.
  assert sizes.quantize(WireConfig(format="bins2", block_size=16), 1, 40, 1) == 10 + 24
  chunks = "chunked_topk(chunk=16)"
  wire = WireConfig(compressor=chunks, format="bins2", density=0.1)
  # Per layer three chunks: k = 2 of 16, indices of 4 bits, codes of 2 bits, one table.
  found = sizes.size_of(chunks)(wire, 2, 40, 1)
  assert found == 6 * 2 * 4 // 8 + 6 * 2 * 2 // 8 + 6 * 8
