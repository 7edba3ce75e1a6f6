"""Bytes on the wire: of a tensor, a fragment, a sync. No JAX.

Trainer, ledger, checkpoints and simulators all ask this file.

Letters: M replicas; a tensor has N layers with S values each, in rows of R values.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from diloco.model.shapes import Shapes, leaves, shard
from diloco.wire.formats import PLAIN, parse_format

if TYPE_CHECKING:
  from diloco.config.fields import WireConfig

# (wire, N, S, R) -> bytes.
Size = Callable[["WireConfig", int, int, int], int]
# Values of `wire.block_size` that are no number of values.
WHOLE_TENSOR, ROW = 0, -1
# Bytes of a gradient value.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Bytes of the seed from which the receiver draws the subset that was kept.
SEED = 8


def packed(n: int, bits: int) -> int:
  """Bytes of n codes of `bits` bits."""
  return -(-n * bits // 8)


def block_length(wire: "WireConfig", s: int, row: int) -> int:
  """Values that share a scale."""
  named = {WHOLE_TENSOR: s, ROW: row}
  return min(named.get(wire.block_size, wire.block_size), s)


def kept(wire: "WireConfig", s: int) -> int:
  """Values of a layer's tensor that topk, random and dare send."""
  # Rounded before the ceiling: 0.1 * 30 is 3.0000000000000004.
  return max(math.ceil(round(wire.density * s, 6)), 1)


def index_bits(s: int) -> int:
  """Bits that tell which of s values was kept."""
  return max(math.ceil(math.log2(s)), 1)


def quantize(wire: "WireConfig", n: int, s: int, row: int) -> int:
  """Codes, and one scale byte per block."""
  if wire.format in PLAIN:
    return n * s * PLAIN[wire.format]
  codes = packed(n * s, parse_format(wire.format).bits)
  return codes + n * -(-s // block_length(wire, s, row))


def topk_indices(wire: "WireConfig", n: int, s: int) -> int:
  return packed(n * kept(wire, s) * index_bits(s), 1)


def topk(wire: "WireConfig", n: int, s: int, row: int) -> int:
  """Values and their indices."""
  return topk_indices(wire, n, s) + quantize(wire, n, kept(wire, s), row)


def random(wire: "WireConfig", n: int, s: int, row: int) -> int:
  """Values, and the seed of the subset."""
  return SEED + quantize(wire, n, kept(wire, s), row)


# By the names of `wire.compressor`; `diloco.wire.codecs.register` adds to them.
SIZES: dict[str, Size] = {
  "quantize": quantize,
  "topk": topk,
  "random": random,
  "dare": random,
}


def check(wire: "WireConfig") -> None:
  """Refuses unknown names.

  Raises:
    ValueError: the compressor or the format is unknown.
  """
  if wire.compressor not in SIZES:
    raise ValueError(
      f"wire.compressor is {wire.compressor!r}; choose one of {', '.join(SIZES)}."
    )
  if wire.format not in (*PLAIN, "auto"):
    parse_format(wire.format)


def layout(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, int, int]:
  """(N, S, R) of a parameter: under `blocks` each layer is coded by itself."""
  n = shape[0] if path[0] == "blocks" else 1
  return n, math.prod(shape) // n, shape[-1]


def payload_bytes(wire: "WireConfig", fragment: Shapes, fsdp: int = 1) -> int:
  """Bytes that one replica encodes for a fragment, on all its devices together.

  Args:
    wire: what is sent.
    fragment: shapes of the fragment's parameters.
    fsdp: devices of the replica, each of which encodes its own shard.
  """
  size = SIZES[wire.compressor]
  shards = [layout(path, shard(path, s, fsdp)) for path, s in leaves(fragment)]
  return fsdp * sum(size(wire, *one) for one in shards)


def exchanged_bytes(wire: "WireConfig", fragment: Shapes, fsdp: int = 1) -> int:
  """Bytes that one replica puts into an exchange: its payload; float32 for psum."""
  if wire.exchange == "psum":
    return 4 * fsdp * sum(math.prod(shard(p, s, fsdp)) for p, s in leaves(fragment))
  return payload_bytes(wire, fragment, fsdp)


def sync_bytes(
  wire: "WireConfig", replicas: int, fragment: Shapes, fsdp: int = 1
) -> int:
  """Bytes that one replica sends in one sync of a fragment, see `payload_bytes`."""
  size = exchanged_bytes(wire, fragment, fsdp)
  if wire.exchange == "psum":
    return round(all_reduced(replicas, size))
  return gathered(replicas, size)


def gathered(replicas: int, payload: int) -> int:
  """Bytes that one replica sends if payloads of this size are all-gathered."""
  return (replicas - 1) * payload


def all_reduced(replicas: int, size: float) -> float:
  """Bytes that one replica sends in a ring all-reduce of `size` bytes."""
  return 2 * (replicas - 1) / replicas * size


def data_parallel_bytes(
  replicas: int, num_params: int, steps: int, value_bytes: int = 2
) -> float:
  """Bytes that one of M data-parallel workers sends in `steps` steps.

  For M=2 that is 16 bits per parameter and step, against 4 bits per parameter and H
  steps in FP4: 400x at H=100 (2501.18512, section 3.2.2), less the scales.

  Args:
    replicas: M.
    num_params: values of a gradient.
    steps: all-reduces.
    value_bytes: of a gradient's value; the papers count 2.
  """
  return all_reduced(replicas, value_bytes * num_params) * steps
