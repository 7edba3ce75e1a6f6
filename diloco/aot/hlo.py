"""What a compiled program sends between devices, read from its HLO."""

import dataclasses
import math
import re

import numpy as np

from diloco.model.sharding import REPLICA

_TYPE = re.compile(r"(?:bf|[sufc])(\d+)(?:e\d+m\d+\w*)?")  # s32, bf16, f8e4m3fn
_NAMES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
# Between the slices of a TPU pod a collective is a send and a recv (Megascale).
_COLLECTIVE = re.compile(rf"%?([\w.-]+) = (.*?) ({_NAMES}|send)(-start)?\((.*)")
_OPCODE = re.compile(r" = .*? ([a-z][\w-]*)\(")
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a compiled program.

  Attributes:
    name: of the instruction.
    kind: all-gather, all-reduce, ...; send for what goes to another slice.
    dtype: HLO type of the result, for example u8.
    shape: of the result on one device.
    groups: device ids that talk to each other; pairs for a permute; empty if all
      devices do or the notation is not known. In a program for several slices ids
      count the devices of each slice.
    senders: how many devices of all slices send to another slice.
  """

  name: str
  kind: str
  dtype: str
  shape: tuple[int, ...]
  groups: tuple[tuple[int, ...], ...]
  senders: int = 0

  @property
  def nbytes(self) -> int:
    """Bytes of the result on one device."""
    return math.prod(self.shape) * _type_bytes(self.dtype)

  def sent(self, devices: int, slices: int = 1) -> float:
    """Bytes one device sends, mean over `devices`; reductions run on a ring."""
    if self.kind == "send":
      return self.nbytes * self.senders / devices
    if self.kind == "collective-permute":
      return self.nbytes * sum(a != b for a, b in self.groups) / (devices / slices)
    n = len(self.groups[0]) if self.groups else devices
    of_result = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}
    return self.nbytes * of_result.get(self.kind, (n - 1) / n)


@dataclasses.dataclass(frozen=True)
class Window:
  """When a collective runs beside the loops of a scheduled program.

  Attributes:
    collective: what is exchanged.
    hidden: loops between its start and its end.
    loops: loops in the program's entry computation.
  """

  collective: Collective
  hidden: int
  loops: int


def collectives(hlo: str) -> list[Collective]:
  """The collectives in the text of a compiled program, `compiled.as_text()`.

  What stands in a loop is listed once.

  Raises:
    ValueError: one is of a kind that is not known here; its bytes would be missing.
  """
  found = []
  for line in hlo.splitlines():
    match = _COLLECTIVE.search(line)
    if not match:
      _check_no_collective(line)
      continue
    name, result, kind, start, rest = match.groups()
    # Pairs as in {{100000->200003},{200000->100003}}: device 3 of slice 2 is 200003.
    targets = re.search(r"_xla_megascale_target=\{([^=]*)\}", rest)
    senders = targets[1].count("->") if targets else 0
    arrays = _ARRAY.findall(result)
    # Several collectives may be combined into one with a tuple of results; the tuple
    # of an async start holds operands, as many results and perhaps scalar contexts,
    # that of an all-reduce results alone.
    if kind == "send":
      arrays = arrays[:1]
    elif start:
      arrays = [(dtype, shape) for dtype, shape in arrays if shape or dtype != "u32"]
      arrays = arrays[0 if kind == "all-reduce" else len(arrays) // 2 :]
    for dtype, shape in arrays:
      dims = tuple(int(d) for d in shape.split(",") if d)
      found.append(Collective(name, kind, dtype, dims, _groups(rest), senders))
  return found


def across_replicas(hlo: str, mesh) -> list[Collective]:
  """The collectives whose groups join devices of different replica coordinates.

  Args:
    hlo: text of a program compiled for `mesh`; no replica lies on two slices.
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


def replica_bytes(hlo: str, mesh) -> float:
  """Bytes that one coordinate of the replica axis sends to the others.

  The sum over its devices, for one run of a program in which nothing that crosses
  stands in a loop; the ledger's bytes if there is one replica per coordinate.
  """
  devices = mesh.devices.size
  slices = len({getattr(d, "slice_index", 0) for d in mesh.devices.flat})
  per_device = sum(c.sent(devices, slices) for c in across_replicas(hlo, mesh))
  return per_device * devices / mesh.shape[REPLICA]


def windows(hlo: str, mesh) -> list[Window]:
  """When what crosses between replicas starts and ends, in the order of execution.

  Only what the entry computation itself exchanges: a collective in a loop, a branch or
  another computation that it calls has no place among the entry's loops.

  Args:
    hlo: text of a scheduled program, compiled for `mesh`.
    mesh: the device mesh.

  Raises:
    ValueError: a collective is of an unknown kind, or a send has no recv.
  """
  entry = hlo.index("\nENTRY ")
  lines = hlo[entry : hlo.index("\n}", entry)].splitlines()
  loops = [i for i, line in enumerate(lines) if " while(" in line]
  found = []
  for i, line in enumerate(lines):
    for c in across_replicas(line, mesh):
      end = _end(lines, line, c)
      hidden = 0 if end is None else sum(i < k < end for k in loops)
      found.append(Window(c, hidden, len(loops)))
  return found


def _check_no_collective(line: str) -> None:
  if not re.search(r"\b(replica_groups|source_target_pairs)=", line):
    return
  opcode = _OPCODE.search(line)
  # The end of a known one may repeat the groups of its start.
  if opcode and not re.fullmatch(rf"({_NAMES})-(update|done)", opcode[1]):
    raise ValueError(
      f"the program has a collective {opcode[1]!r}, whose bytes nobody counts; add it"
      " to _NAMES and Collective.sent in diloco/hlo.py."
    )


def _type_bytes(dtype: str) -> int:
  """Bytes of one value; a type narrower than a byte takes one, as in XLA's default."""
  match = _TYPE.fullmatch(dtype)
  if not match and dtype != "pred":
    raise ValueError(
      f"a collective's HLO type is {dtype!r}, whose size is unknown; add it to _TYPE in"
      " diloco/hlo.py."
    )
  return max(int(match[1]) // 8, 1) if match else 1


def _end(lines: list[str], line: str, c: Collective) -> int | None:
  """Where a collective is waited for; None if it is not asynchronous."""
  done = rf" {c.kind}-done\(.*%{re.escape(c.name)}\b"
  if c.kind == "send":  # What this one sends, that one receives.
    rendezvous = re.search(r'_rendezvous="[^"]*"', line)
    recvs = [
      m[1]
      for x in lines
      if rendezvous and rendezvous[0] in x
      if (m := re.search(r"%?([\w.-]+) = .* recv\(", x))
    ]
    if len(recvs) != 1:
      raise ValueError(
        f"{c.name} ({rendezvous[0] if rendezvous else 'no rendezvous'}) has"
        f" {len(recvs)} recv in the entry computation instead of one; adapt"
        " diloco/hlo.py to how this XLA writes a send."
      )
    done = rf" recv-done\(.*%{re.escape(recvs[0])}\b"
  ends = [k for k, x in enumerate(lines) if re.search(done, x)]
  return ends[0] if ends else None


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
