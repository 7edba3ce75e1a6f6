"""Bins around a block's mean: the 2-bit codes of SparseLoCo and MuLoCo.

The formats bins2, bins3 and bins4 cut the values of a block into 4, 8 or 16 bins of
equal width. Around the mean of the block, all bins together span `RANGE` standard
deviations. The code of a value is the number of its bin; values beyond the range go to
the outermost bins. A bin decodes to the mean of its values, so each block also sends a
table of these means, in bfloat16. An eXmY format of 2 bits has only three values, one
of them 0; bins2 has four.

Source: the code of MuLoCo (arXiv 2505.23725; facebookresearch/MuLoCo,
quantized_outer_sgd.py, `QuantizationCompressor`), which names SparseLoCo's code (arXiv
2508.15706) as its base. In MuLoCo's code, a table is float32 and belongs to a tensor or
to a row; a row is one output, because torch stores matrices as (out, in). Here a table
belongs to a block of `wire.block_size` values, and a row is one input (docs/methods.md
has the effect). `error_feedback.py` has the authors' results with 2 bits.

Letters: N layers of S values; each layer has K blocks of B values.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array

from diloco.spec import plugins
from diloco.spec.plugins import BlockFormat
from diloco.wire.compressors import from_bytes, to_bytes

# Width of all bins together, in standard deviations; the authors' choice.
RANGE = 6.0


def encode(bits: int, x_NxKxB: Array, s: int) -> tuple[Array, Array]:
  """Returns the bins of the values, uint8 (N, K, B), and the bytes of all tables.

  Args:
    bits: log2 of the number of bins.
    x_NxKxB: blocks; the zeros after the first S values of a layer are only padding.
    s: S, the number of values of a layer.
  """
  bins, (_, k, b) = 2**bits, x_NxKxB.shape
  counts_KxB = (jnp.arange(k * b) < s).reshape(k, b).astype(jnp.float32)
  count_Kx1 = counts_KxB.sum(axis=-1, keepdims=True)
  mean_NxKx1 = x_NxKxB.sum(axis=-1, keepdims=True) / count_Kx1
  centred = (x_NxKxB - mean_NxKx1) * counts_KxB
  variance = jnp.square(centred).sum(axis=-1, keepdims=True) / (count_Kx1 - 1)
  width = RANGE / bins * jnp.sqrt(variance)
  width = jnp.where(jnp.isfinite(width) & (width > 0), width, 1.0)
  bin_ = jnp.clip(jnp.round(centred / width) + bins // 2, 0, bins - 1)
  is_in = (bin_[..., None, :] == jnp.arange(bins)[:, None]) * counts_KxB[:, None]
  # NaN and infinity reach the table through the mean, so the receiver sees them.
  sums = (is_in * centred[..., None, :]).sum(axis=-1)
  table = sums / jnp.maximum(is_in.sum(axis=-1), 1) + mean_NxKx1
  tables = to_bytes(table.astype(jnp.bfloat16).reshape(-1))
  return jnp.nan_to_num(bin_).astype(jnp.uint8), tables


def decode(bits: int, bin_NxKxB: Array, tables: Array) -> Array:
  """Returns the values that the bins stand for, float32 (N, K, B)."""
  n, k, _ = bin_NxKxB.shape
  table_NxKxT = from_bytes(tables, jnp.bfloat16).reshape(n, k, 2**bits)
  return jnp.take_along_axis(
    table_NxKxT.astype(jnp.float32), bin_NxKxB.astype(jnp.int32), axis=-1
  )


for bits in (2, 3, 4):
  block = BlockFormat(
    bits,
    2**bits * jnp.dtype(jnp.bfloat16).itemsize,
    partial(encode, bits),
    partial(decode, bits),
  )
  plugins.register("wire.format", f"bins{bits}", block)
