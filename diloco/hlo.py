"""What a compiled program sends between devices, read from its HLO."""

import dataclasses
import math
import re

import numpy as np

from diloco.mesh import REPLICA

_BYTES = {
  "pred": 1,
  "s8": 1,
  "u8": 1,
  "bf16": 2,
  "f16": 2,
  "s32": 4,
  "u32": 4,
  "f32": 4,
}
_NAMES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"= (.*?) ({_NAMES})(-start)?\((.*)")
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a compiled program.

  Attributes:
    kind: all-gather, all-reduce, ...
    dtype: HLO type of the result, for example u8.
    shape: of the result on one device.
    groups: device ids that talk to each other; pairs for a permute; empty if all
      devices do or the notation is not known.
  """

  kind: str
  dtype: str
  shape: tuple[int, ...]
  groups: tuple[tuple[int, ...], ...]

  @property
  def nbytes(self) -> int:
    """Bytes of the result on one device."""
    return math.prod(self.shape) * _BYTES[self.dtype]


def collectives(hlo: str) -> list[Collective]:
  """The collectives in the text of a compiled program, `compiled.as_text()`."""
  found = []
  for line in hlo.splitlines():
    match = _COLLECTIVE.search(line)
    if not match:
      continue
    result, kind, start, rest = match.groups()
    arrays = _ARRAY.findall(result)
    # Several collectives may be combined into one with a tuple of results; the tuple
    # of an async start ends with the output.
    for dtype, shape in arrays[-1:] if start else arrays:
      dims = tuple(int(d) for d in shape.split(",") if d)
      found.append(Collective(kind, dtype, dims, _groups(rest)))
  return found


def across_replicas(hlo: str, mesh) -> list[Collective]:
  """The collectives whose groups join devices of different replica coordinates.

  Args:
    hlo: text of a program compiled for `mesh`.
    mesh: the device mesh.
  """
  axis = mesh.axis_names.index(REPLICA)
  # In SPMD programs a device id is a position in the mesh.
  positions = range(mesh.devices.size)
  coordinate = [np.unravel_index(i, mesh.devices.shape)[axis] for i in positions]
  return [
    c
    for c in collectives(hlo)
    if any(len({coordinate[d] for d in g}) > 1 for g in c.groups)
    or (not c.groups and mesh.devices.shape[axis] > 1)
  ]


def _groups(attributes: str) -> tuple[tuple[int, ...], ...]:
  """replica_groups or source_target_pairs, in any of XLA's notations."""
  iota = re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", attributes)
  if iota:
    rows, columns = (int(d) for d in iota[1].split(","))
    return _rows(_device_ids(iota[2], iota[3]).reshape(rows, columns))
  named = re.search(
    rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? \{{([^}}]*)\}}",
    attributes,
  )
  if named:
    sizes = {k: int(v) for k, v in re.findall(r"'(\w+)'=(\d+)", named[1])}
    axes = [list(sizes).index(a) for a in re.findall(r"'(\w+)'", named[4])]
    shape = list(sizes.values())
    ids = np.arange(math.prod(shape))
    if named[2]:
      ids = _device_ids(named[2], named[3])
    ids = np.moveaxis(ids.reshape(shape), axes, range(-len(axes), 0))
    return _rows(ids.reshape(-1, math.prod(shape[a] for a in axes)))
  explicit = re.search(
    r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", attributes
  )
  if not explicit:
    return ()
  return tuple(
    tuple(int(i) for i in g.split(",") if i)
    for g in re.findall(r"\{([\d,]*)\}", explicit[1])
  )


def _device_ids(shape: str, permutation: str | None) -> np.ndarray:
  """Ids of the iota notation [2,4]T(1,0): counted up, reshaped, transposed, flat."""
  dims = [int(d) for d in shape.split(",")]
  ids = np.arange(math.prod(dims)).reshape(dims)
  if permutation:
    ids = ids.transpose([int(d) for d in permutation.split(",")])
  return ids.ravel()


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
  return tuple(tuple(int(i) for i in row) for row in ids)
