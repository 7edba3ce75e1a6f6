"""Finds in a compiled program's HLO which bytes its devices send to each other."""

import dataclasses
import math
import re

import numpy as np
from jax.sharding import Mesh

from diloco.mesh.sharding import REPLICA, num_slices

# An HLO type, for example pred, s32, bf16 or f8e4m3fn.
_TYPE = re.compile(r"(?:pred|(?:bf|[sufc])(\d+)(?:e\d+m\d+\w*)?)")
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
# Between TPU slices, a collective is a send and a recv (Megascale).
_COLLECTIVE = re.compile(rf"%?([\w.-]+) = (.*?) ({_KINDS}|send)(-start)?\((.*)")
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective of a compiled program.

  Attributes:
    name: name of the instruction.
    kind: all-gather, all-reduce, ...; send for data that goes to another slice.
    dtype: HLO type of the result, for example u8.
    shape: shape of the result on one device.
    groups: ids of devices that exchange data; for a permute, (source, target) pairs.
      Empty if all devices take part, or if the notation is not known. In a program for
      several slices, each slice numbers its devices from 0.
    senders: how many devices, in all slices together, send to another slice.
  """

  name: str
  kind: str
  dtype: str
  shape: tuple[int, ...]
  groups: Groups
  senders: int = 0

  @property
  def nbytes(self) -> int:
    """Bytes of the result on one device.

    Raises:
      ValueError: the type is not known.
    """
    match = _TYPE.fullmatch(self.dtype)
    if not match:
      raise ValueError(f"HLO type {self.dtype!r} is unknown; add it to {__file__}.")
    # XLA stores a type narrower than a byte in one byte.
    return math.prod(self.shape) * max(int(match[1] or 0) // 8, 1)

  def sent(self, devices: int, slices: int = 1) -> float:
    """Returns the mean bytes that a device sends, with reductions on a ring."""
    if self.kind == "send":
      return self.nbytes * self.senders / devices
    if self.kind == "collective-permute":
      return self.nbytes * sum(a != b for a, b in self.groups) / (devices / slices)
    n = len(self.groups[0]) if self.groups else devices
    of_result = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}
    return self.nbytes * of_result.get(self.kind, (n - 1) / n)


@dataclasses.dataclass(frozen=True)
class Window:
  """How many loops of a program run during a collective.

  Attributes:
    collective: the collective that the loops may hide.
    hidden: number of loops between the start and the end of the collective.
    loops: number of loops in the entry computation of the program.
  """

  collective: Collective
  hidden: int
  loops: int


def collectives(hlo: str) -> list[Collective]:
  """Lists the collectives in `compiled.as_text()`; each loop body counts once.

  Raises:
    ValueError: the kind of a collective is not known, so its bytes would be missing.
  """
  listed = []
  for line in hlo.splitlines():
    match = _COLLECTIVE.search(line)
    if not match:
      _check_no_collective(line)
      continue
    name, result, kind, start, rest = match.groups()
    # Pairs as in {{100000->200003},{200000->100003}}: 200003 is device 3 of slice 2.
    targets = re.search(r"_xla_megascale_target=\{([^=]*)\}", rest)
    senders = targets[1].count("->") if targets else 0
    # XLA may combine several collectives into one, whose result is a tuple. The tuple
    # of an asynchronous all-reduce holds the results. The tuple of any other
    # asynchronous start holds the operands, as many results and perhaps u32 scalars.
    arrays = _ARRAY.findall(result)
    if kind == "send":
      arrays = arrays[:1]
    elif start:
      arrays = [(dtype, shape) for dtype, shape in arrays if shape or dtype != "u32"]
      arrays = arrays[0 if kind == "all-reduce" else len(arrays) // 2 :]
    for dtype, shape in arrays:
      dims, groups = _numbers(shape), _groups(rest)
      listed.append(Collective(name, kind, dtype, dims, groups, senders))
  return listed


def across_replicas(hlo: str, mesh: Mesh) -> list[Collective]:
  """Lists the collectives that join devices of different replica coordinates.

  Args:
    hlo: text of a program compiled for `mesh`; no replica lies on two slices.
  """
  axis = mesh.axis_names.index(REPLICA)
  # In SPMD programs, a device id is a position in the mesh.
  replica_of = np.indices(mesh.devices.shape)[axis].ravel()
  everyone = (range(mesh.devices.size),)
  return [
    c
    for c in collectives(hlo)
    if any(len({replica_of[d] for d in group}) > 1 for group in c.groups or everyone)
  ]


def replica_bytes(hlo: str, mesh: Mesh) -> float:
  """Returns the bytes that one coordinate of the replica axis sends to the others.

  The result is the sum over the devices of this coordinate, for one execution of a
  program that has no such collectives in loops. With one replica per coordinate,
  `wire.ledger` counts the same bytes.
  """
  devices = mesh.devices.size
  slices = num_slices(mesh)
  per_device = sum(c.sent(devices, slices) for c in across_replicas(hlo, mesh))
  return per_device * devices / mesh.shape[REPLICA]


def windows(hlo: str, mesh: Mesh) -> list[Window]:
  """Lists the windows of all collectives between replicas, in order of execution.

  Only collectives of the entry computation count. Collectives in loops, branches and
  other computations have no position among the loops of the entry computation.

  Args:
    hlo: text of a scheduled program, compiled for `mesh`.

  Raises:
    ValueError: the kind of a collective is not known, or a send has no recv.
  """
  entry = hlo.index("\nENTRY ")
  lines = hlo[entry : hlo.index("\n}", entry)].splitlines()
  loops = [i for i, line in enumerate(lines) if " while(" in line]
  listed = []
  for i, line in enumerate(lines):
    for c in across_replicas(line, mesh):
      end = _end(lines, line, c)
      listed.append(Window(c, sum(i < k < end for k in loops), len(loops)))
  return listed


def _check_no_collective(line: str) -> None:
  """Raises an error if the line has a collective of an unknown kind."""
  groups = r"\b(?:replica_groups|source_target_pairs)="
  opcode = re.search(rf" = .*? ([a-z][\w-]*)\(.*{groups}", line)
  # The end of a known collective may repeat the groups of its start.
  if opcode and not re.fullmatch(rf"({_KINDS})-(update|done)", opcode[1]):
    raise ValueError(
      f"the bytes of collective {opcode[1]!r} are not counted; add it to {__file__}."
    )


def _end(lines: list[str], line: str, c: Collective) -> int:
  """Returns the index of the line that waits for a collective; 0 if none waits."""
  done = rf" {c.kind}-done\(.*%{re.escape(c.name)}\b"
  if c.kind == "send":  # The payload of the other side arrives with the recv.
    rendezvous = re.search(r'_rendezvous="[^"]*"', line)
    name = rendezvous[0] if rendezvous else "no rendezvous"
    matches = [re.search(r"%?([\w.-]+) = .* recv\(", x) for x in lines if name in x]
    recvs = [match[1] for match in matches if match]
    if len(recvs) != 1:
      raise ValueError(
        f"{c.name} ({name}) has {len(recvs)} recv instead of one; adapt {__file__}."
      )
    done = rf" recv-done\(.*%{re.escape(recvs[0])}\b"
  return next((k for k, x in enumerate(lines) if re.search(done, x)), 0)


def _groups(attributes: str) -> Groups:
  """Parses replica_groups or source_target_pairs, in any notation of XLA."""
  iota = re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", attributes)
  if iota:
    return _rows(_device_ids(iota[2], iota[3]).reshape(_numbers(iota[1])))
  named = re.search(
    rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? \{{([^}}]*)\}}",
    attributes,
  )
  if named:
    sizes = {k: int(v) for k, v in re.findall(r"'(\w+)'=(\d+)", named[1])}
    axes = [list(sizes).index(a) for a in re.findall(r"'(\w+)'", named[4])]
    shape = tuple(sizes.values())
    ids = _device_ids(named[2] or str(math.prod(shape)), named[3]).reshape(shape)
    ids = np.moveaxis(ids, axes, range(-len(axes), 0))
    return _rows(ids.reshape(-1, math.prod(shape[a] for a in axes)))
  explicit = re.search(
    r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", attributes
  )
  groups = re.findall(r"\{([\d,]*)\}", explicit[1]) if explicit else []
  return tuple(map(_numbers, groups))


def _device_ids(shape: str, permutation: str | None) -> np.ndarray:
  """Expands iota notation, such as [2,4]T(1,0): a reshaped and transposed range."""
  dims = _numbers(shape)
  ids = np.arange(math.prod(dims)).reshape(dims)
  if permutation:
    ids = ids.transpose(_numbers(permutation))
  return ids.ravel()


def _rows(ids: np.ndarray) -> Groups:
  return tuple(map(tuple, ids.tolist()))


def _numbers(text: str) -> tuple[int, ...]:
  """Parses the integers of a text like 2,1,40."""
  return tuple(int(number) for number in text.split(",") if number)
