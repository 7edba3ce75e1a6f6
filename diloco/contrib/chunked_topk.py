"""Top-k of every chunk of a tensor, as in SparseLoCo (arXiv 2508.15706).

  wire.compressor = "chunked_topk(chunk=4096)"

cuts each layer's tensor into chunks of 4,096 consecutive values. Of every chunk, it
keeps the share `wire.density`: the values of largest magnitude. So the index of a kept
value needs few bits, and no part of a tensor is left out. The last chunk of a layer is
padded with zeros. SparseLoCo itself cuts matrices into tiles. It adds error feedback
and sends 2 bits per value (plug-ins `error_feedback` and `bins`). Source: the abstract
and the authors' code (tplr-ai/templar).
"""

from jax import Array

from diloco.spec import plugins, sizes
from diloco.spec.fields import WireConfig
from diloco.spec.plugins import Compressor
from diloco.util.types import PyTree
from diloco.wire import compressors


def chunked_topk(chunk: int) -> Compressor:
  """Makes the compressor.

  Args:
    chunk: number of values in a chunk.

  Raises:
    ValueError: `chunk` is not a whole number of at least 1.
  """
  if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
    raise ValueError(f"chunk is {chunk}, but must be a whole number of at least 1")

  def chunks(n: int, s: int) -> tuple[int, int]:
    """Returns number and length of the chunks of n layers of s values."""
    length = min(chunk, s)
    return n * -(-s // length), length

  def encode(
    wire: WireConfig, x_NxS: Array, state: PyTree, row: int, key: Array
  ) -> tuple[Array, PyTree]:
    layers, values = x_NxS.shape
    n, s = chunks(layers, values)
    x_CxS = compressors.blocks(x_NxS, s).reshape(n, s)
    return compressors.topk(wire, x_CxS, state, row, key)

  def decode(wire: WireConfig, payload: Array, n: int, s: int, row: int) -> Array:
    x_CxS = compressors.decode_topk(wire, payload, *chunks(n, s), row)
    return x_CxS.reshape(n, -1)[:, :s]

  def size(wire: WireConfig, n: int, s: int, row: int) -> int:
    return sizes.topk(wire, *chunks(n, s), row)

  return Compressor(encode, decode, size)


plugins.register("wire.compressor", "chunked_topk", chunked_topk)
