"""Counts the bytes that a tensor, a fragment and a sync put on the wire. No JAX.

Trainer, ledger, checkpoints and simulators all use this file.

Letters: M replicas; a tensor has N layers of S values, in rows of R values.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from diloco.errors import ConfigError
from diloco.spec.call_text import parse
from diloco.spec.formats import PLAIN, block_bytes, code_bits
from diloco.spec.plugins import NAMES, Compressor, check_name
from diloco.spec.shapes import Shapes, leaves, shard

if TYPE_CHECKING:
  from diloco.spec.fields import WireConfig

# (wire, N, S, R) -> bytes.
Size = Callable[["WireConfig", int, int, int], int]
# Special values of `wire.block_size`.
WHOLE_TENSOR, ROW = 0, -1
# Bytes per value of a gradient.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Bytes of the seed from which the receiver finds the positions of the kept values.
SEED = 8


def packed(n: int, bits: int) -> int:
  """Returns the bytes that n codes of `bits` bits take."""
  return -(-n * bits // 8)


def block_length(wire: "WireConfig", s: int, row: int) -> int:
  """Returns the number of values that share a scale."""
  named = {WHOLE_TENSOR: s, ROW: row}
  return min(named.get(wire.block_size, wire.block_size), s)


def share_of(share: float, s: int) -> int:
  """Returns the number of values in a share of s values: at least one."""
  # Rounds before the ceiling: 0.07 * 100 is 7.000000000000001.
  return max(math.ceil(round(share * s, 6)), 1)


def kept(wire: "WireConfig", s: int) -> int:
  """Returns the number of values that topk, random and dare keep of a layer."""
  return share_of(wire.density, s)


def index_bits(s: int) -> int:
  """Returns the bits of an index into s values."""
  return max(math.ceil(math.log2(s)), 1)


def quantize(wire: "WireConfig", n: int, s: int, row: int) -> int:
  """Counts the bytes of n layers of s values.

  Each block sends its codes and, in addition, its scale or other bytes of its format.
  Plain formats send only values.
  """
  if wire.format in PLAIN:
    return n * s * PLAIN[wire.format]
  blocks = n * -(-s // block_length(wire, s, row))
  return packed(n * s, code_bits(wire.format)) + blocks * block_bytes(wire.format)


def topk(wire: "WireConfig", n: int, s: int, row: int) -> int:
  """Counts the bytes of the indices and of the kept values."""
  k = kept(wire, s)
  return packed(n * k * index_bits(s), 1) + quantize(wire, n, k, row)


def random(wire: "WireConfig", n: int, s: int, row: int) -> int:
  """Counts the bytes of the seed and of the kept values."""
  return SEED + quantize(wire, n, kept(wire, s), row)


# The built-in compressors; `wire/compressors.py` has their other functions.
BUILT_IN: Mapping[str, Size] = {
  "quantize": quantize,
  "topk": topk,
  "random": random,
  "dare": random,
}


def size_of(text: str) -> Size:
  """Returns the function `Compressor.size` for the text in `wire.compressor`."""
  name, arguments = parse("wire.compressor", text)
  if name in BUILT_IN and not arguments:
    return BUILT_IN[name]
  return compressor_of(text).size


def compressor_of(text: str) -> Compressor:
  """Returns the compressor that the text in `wire.compressor` describes.

  Raises:
    ConfigError, TypeError, ValueError: an argument cannot work.
  """
  name, arguments = parse("wire.compressor", text)
  thing = NAMES["wire.compressor"].get(name)
  if callable(thing):
    return thing(**arguments)
  if thing is None or arguments:
    raise TypeError(f"{name} takes no arguments")
  return thing


def coder(text: str) -> str:
  """Returns the name of the compressor whose codes are sent.

  A compressor with an argument `of` sends the codes of the compressor in `of`.
  """
  name, arguments = parse("wire.compressor", text)
  return coder(arguments["of"]) if "of" in arguments else name


def check(wire: "WireConfig") -> None:
  """Checks the names of the compressor and the number format.

  Raises:
    ConfigError: a name is unknown, or an argument of the compressor cannot work.
  """
  name, _ = parse("wire.compressor", wire.compressor)
  check_name("wire.compressor", name, {**BUILT_IN, **NAMES["wire.compressor"]})
  if wire.format not in PLAIN:
    code_bits(wire.format)
  try:
    size_of(wire.compressor)
  except (TypeError, ValueError) as error:
    reason = str(error).removesuffix(".").replace(" positional", "")
    if isinstance(error, ConfigError):  # The error is about `of`.
      reason = reason.replace("wire.compressor", "of")
    raise ConfigError(
      f"wire.compressor is {wire.compressor!r}, but {reason}."
    ) from error


def layout(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, int, int]:
  """Returns (N, S, R) of a parameter; under `blocks` each layer is coded separately."""
  n = shape[0] if path[0] == "blocks" else 1
  layer_shape = shape[1:] if path[0] == "blocks" else shape
  return n, math.prod(layer_shape), layer_shape[-1] if layer_shape else 1


def payload_bytes(wire: "WireConfig", fragment: Shapes, fsdp: int = 1) -> int:
  """Counts the bytes of one replica's payload for a fragment, over all its devices.

  Args:
    wire: compressor and number format.
    fragment: shapes of the fragment's parameters.
    fsdp: number of shards; each device of the replica encodes its own shard.
  """
  size = size_of(wire.compressor)
  shards = [layout(path, shard(path, s, fsdp)) for path, s in leaves(fragment)]
  return fsdp * sum(size(wire, *one) for one in shards)


def exchanged_bytes(wire: "WireConfig", fragment: Shapes, fsdp: int = 1) -> int:
  """Counts one replica's bytes in an exchange: its payload; float32 values for psum."""
  if wire.exchange == "psum":
    return 4 * fsdp * sum(math.prod(shard(p, s, fsdp)) for p, s in leaves(fragment))
  return payload_bytes(wire, fragment, fsdp)


def sync_bytes(
  wire: "WireConfig", replicas: int, fragment: Shapes, fsdp: int = 1
) -> int:
  """Counts the bytes that one replica sends in one sync of a fragment."""
  size = exchanged_bytes(wire, fragment, fsdp)
  return round(copies(wire.exchange, replicas) * size)


def copies(exchange: str, replicas: int) -> float:
  """Returns the number of bytes that a replica sends per byte of its payload.

  Args:
    exchange: gather, an all-gather of payloads, or psum, an all-reduce in a ring.
    replicas: M.
  """
  return replicas - 1 if exchange == "gather" else 2 * (replicas - 1) / replicas


def average_bytes(replicas: int, values: int) -> int:
  """Counts the bytes that one replica sends when float32 values are averaged."""
  return round(copies("psum", replicas) * 4 * values)


def all_reduce_bytes(
  replicas: int, num_params: int, steps: int, value_bytes: int = 2
) -> float:
  """Counts the bytes that one of M data-parallel workers sends in `steps` steps.

  For M = 2, a worker sends 16 bits per parameter in each step. A DiLoCo replica with
  FP4 sends 4 bits per parameter once in H steps: 400 times less for H = 100, without
  scales (2501.18512, section 3.2.2).

  Args:
    replicas: M.
    num_params: number of values in a gradient.
    steps: number of all-reduces.
    value_bytes: bytes per value of a gradient; the papers count 2.
  """
  return copies("psum", replicas) * (value_bytes * num_params) * steps
