"""Pieces of a tensor have the bytes that the whole tensor has."""

import jax
import numpy as np
import one_tensor
import pytest

from diloco.spec.fields import WireConfig
from diloco.wire.cuts import cut


@pytest.mark.parametrize(
  ("fmt", "block", "shape"),
  [
    ("e3m0", 16, (4, 8, 32)),
    ("e3m0", 64, (1, 8, 32)),
    ("e2m3", 8, (2, 32, 8)),
    ("e4m3fn", -1, (3, 4, 32)),
    ("e1m0", 8, (4, 16, 8)),
  ],
)
def test_the_codes_of_a_piece_are_those_of_its_rows(fmt, block, shape):
  wire, (n, d, row), m = WireConfig(format=fmt, block_size=block), shape, 2
  x_M = np.random.default_rng(0).normal(size=(m, *shape)).astype(np.float32)
  key = jax.random.key(0)
  flat_M = x_M.reshape(m, n, d * row)
  payload_M = np.stack([one_tensor.encode(wire, x, (), row, key)[0] for x in flat_M])
  found = cut(wire, 256, m, n, d, row)
  assert found.pieces > 1
  pieces_M = found.by_piece(payload_M)
  np.testing.assert_array_equal(np.hstack(found.payload(pieces_M)), payload_M)
  rows_M = x_M.reshape(m, found.planes, found.pieces, found.rows, row)
  decoded_M = np.stack([one_tensor.decode(wire, x, n, d * row, row) for x in payload_M])
  for j in range(found.pieces):
    code_M = np.hstack([x[:, j] for x in pieces_M])
    np.testing.assert_array_equal(found.encode(rows_M[:, :, j]), code_M)
    np.testing.assert_array_equal(
      found.decode(code_M), decoded_M.reshape(rows_M.shape)[:, :, j]
    )


@pytest.mark.parametrize(
  ("fmt", "block", "shape"),
  [
    ("e3m0", 16, (4, 2, 8)),  # Small.
    ("e3m0", 16, (1, 7, 512)),  # Rows do not divide into two planes.
    ("e3m0", 48, (2, 16, 256)),  # Blocks do not divide into rows.
    ("e3m0", 48, (4, 16, 256)),  # Nor do they divide into half of the layers.
    ("e3m0", 0, (2, 16, 256)),  # A block is a layer.
  ],
)
def test_other_tensors_are_one_piece(fmt, block, shape):
  wire, (n, d, row) = WireConfig(format=fmt, block_size=block), shape
  found = cut(wire, 1024, 2, n, d, row)
  assert (found.planes, found.pieces, found.rows) == (n, 1, d)
  payload_M = np.arange(2 * found.size).astype(np.uint8).reshape(2, -1)
  piece_M = np.hstack([x[:, 0] for x in found.by_piece(payload_M)])
  np.testing.assert_array_equal(piece_M, payload_M)
