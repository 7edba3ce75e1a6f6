"""Divides tensors into pieces whose codes are whole bytes of the payload.

Letters: M replicas; a tensor has N layers of D rows of R values. `Cut` defines G, J, C.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from diloco.spec import formats, sizes
from diloco.spec.fields import WireConfig
from diloco.wire import compressors
from diloco.wire.codes import group_size


@dataclasses.dataclass(frozen=True)
class Cut:
  """The J pieces of a tensor, which `quantize` encodes one by one.

  The rows of a tensor form G planes of J * C rows each (`diloco.wire.codes`). Piece j
  has the j-th block of C rows of each plane; the compressor encodes these G blocks like
  G layers. If the whole tensor is one piece, each layer is a plane.

  Attributes:
    planes, pieces, rows, row: G, J, C and R.
    codes: number of bytes of all codes, which form `plane_bytes` equal slices.
    size: number of bytes of the tensor's payload; the scales follow the codes.
  """

  wire: WireConfig
  planes: int
  pieces: int
  rows: int
  row: int
  codes: int
  plane_bytes: int
  size: int

  @functools.partial(jax.jit, static_argnums=0)
  def encode(self, x_M: Array) -> Array:
    """Encodes a piece, float32 [M, G, C, R], to uint8 [M, size / J]."""
    coder, unused_key = compressors.get(self.wire.compressor), jax.random.key(0)
    one = lambda x: coder.encode(self.wire, x, (), self.row, unused_key)[0]
    return jax.vmap(one)(x_M.reshape(*x_M.shape[:2], -1))

  @functools.partial(jax.jit, static_argnums=0)
  def decode(self, code_M: Array) -> Array:
    """Inverts `encode`."""
    coder, s = compressors.get(self.wire.compressor), self.rows * self.row
    one = lambda code: coder.decode(self.wire, code, self.planes, s, self.row)
    return jax.vmap(one)(code_M).reshape(-1, self.planes, self.rows, self.row)

  def by_piece(self, payload_M: Array) -> list[Array]:
    """Splits payloads uint8 [M, size] into codes and scales, uint8 [M, J, n] each."""
    parts = zip(jnp.split(payload_M, [self.codes], axis=1), self._slices)
    pieces = [x.reshape(len(x), k, self.pieces, -1).swapaxes(1, 2) for x, k in parts]
    return [x.reshape(*x.shape[:2], -1) for x in pieces]

  def payload(self, pieces_M: list[Array]) -> list[Array]:
    """Inverts `by_piece`: returns the payload's codes and scales, uint8 [M, n] each."""
    parts = zip(pieces_M, self._slices)
    slices = [x.reshape(*x.shape[:2], k, -1).swapaxes(1, 2) for x, k in parts]
    return [x.reshape(len(x), -1) for x in slices]

  @property
  def _slices(self) -> tuple[int, int]:
    return self.plane_bytes, self.planes


def cut(wire: WireConfig, most: int, m: int, n: int, d: int, row: int) -> Cut:
  """Divides a tensor into pieces of at most `most` values over all replicas, if it can.

  A tensor that is small, or whose sizes have no fitting divisor, is one piece.
  """
  planes, plane_bytes = group_size(formats.parse_format(wire.format).bits)
  block = sizes.block_length(wire, d * row, row)
  size, plane = sizes.quantize(wire, n, d * row, row), n * d // planes
  rows = math.gcd(d, plane)
  while m * planes * rows * row > most and rows % 2 == 0 == rows // 2 * row % block:
    rows //= 2
  odd = n * d % planes or rows * row % block
  if odd or m * n * d * row <= most or m * planes * rows * row < most // 16:
    return Cut(wire, n, 1, d, row, size, 1, size)
  codes = plane_bytes * plane * row
  return Cut(wire, planes, plane // rows, rows, row, codes, plane_bytes, size)
