"""Counts the bytes of main memory and the FLOPs of a compiled program, by operation.

Every operation of a program reads its operands and writes its results. What lies in the
vector memory of a TPU does not count. A program does not show what lies in caches, so
for GPUs everything counts. FLOPs are those of matrix products; an operation that fuses
a product with others has the product's.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_OPERATION = re.compile(r"(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)")
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\](\{[^}]*\})?")
_FREE = (
  *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
  *("copy-done", "slice-done", "async-done", "async-update", "partition-id"),
)
# Products of L x L x head size that a kernel of causal attention computes, by a part of
# its name. Backward passes compute the scores again.
_KERNELS = {
  "splash_mha_fwd": 2,
  "splash_mha_dq": 3,
  "splash_mha_dkv": 4,
  "fmhaSoftmaxBackward": 5,
  "fmhaSoftmax": 2,
}


@dataclasses.dataclass(frozen=True)
class Work:
  """What an operation does each time, and how often it runs.

  Attributes:
    name: of the operation.
    rounds: how often it runs.
    nbytes: bytes of main memory that it reads and writes.
    flops: of its matrix products.
  """

  name: str
  rounds: int
  nbytes: int
  flops: float


@dataclasses.dataclass(frozen=True)
class Operation:
  """An operation of a program; `rest` is its text from the operands on."""

  name: str
  type: str
  kind: str
  rest: str

  @property
  def operands(self) -> list[str]:
    return re.findall(r"%([\w.-]+)", self.rest.split("), ")[0])

  def called(self, attribute: str) -> str:
    """Returns the computation that an attribute names, such as `calls` or `body`."""
    match = re.search(rf"\b{attribute}=%?([\w.-]+)", self.rest)
    return match[1] if match else ""


Computation = dict[str, Operation]


def nbytes(hlo: str) -> int:
  """Returns the bytes that a program reads and writes, from `compiled.as_text()`.

  Raises:
    ValueError: the program has a loop whose number of rounds is not known.
  """
  return sum(x.rounds * x.nbytes for x in works(hlo))


def works(hlo: str) -> Iterator[Work]:
  """Yields the work of each operation of a program, from `compiled.as_text()`.

  Raises:
    ValueError: the program has a loop whose number of rounds is not known.
  """
  program, entry, inside = dict[str, Computation](), "", Computation()
  for line in hlo.splitlines():
    if match := _COMPUTATION.match(line):
      program[match[2]] = inside = Computation()
      entry = match[2] if match[1] else entry
    elif match := _OPERATION.match(line.strip()):
      inside[match[1]] = Operation(*match.groups())
  return _of_computation(program, entry, 1)


def _of_computation(
  program: dict[str, Computation], name: str, rounds: int
) -> Iterator[Work]:
  inside = program[name]
  for x in inside.values():
    if x.kind == "while":
      each = rounds * _rounds(program, x)
      yield from _of_computation(program, x.called("body"), each)
    elif x.kind in ("call", "conditional"):
      names = re.findall(r"%([\w.-]+)", x.rest.partition("), ")[2])
      for called in filter(program.__contains__, names):
        yield from _of_computation(program, called, rounds)
    elif x.kind not in _FREE and 'target="ConcatBitcast"' not in x.rest:
      moved = _moved(program, inside, x)
      yield Work(x.name, rounds, moved, _flops(program, inside, x))


def _moved(program: dict[str, Computation], inside: Computation, x: Operation) -> int:
  """Counts the bytes that an operation reads and writes."""
  types = [inside[y].type for y in x.operands if y in inside]
  if x.kind in ("copy-start", "slice-start"):
    # The type holds the operand, the result and a context.
    _, result, *_ = _ARRAY.finditer(x.type)
    return _size(result[0]) * ((_main(types[0]) > 0) + (_main(result[0]) > 0))
  if x.kind == "fusion":
    name = x.called("calls")
    parameters = [y.name for y in program[name].values() if y.kind == "parameter"]
    parameters.sort(key=lambda y: int(program[name][y].rest.split(")")[0]))
    read = sum(
      min(_main(t), _read(program, name, y)) for t, y in zip(types, parameters)
    )
    written = zip(_ARRAY.finditer(x.type), _written(program, name))
    return read + sum(size for result, size in written if _main(result[0]))
  if x.kind in ("dynamic-slice", "gather"):
    return _main(x.type) + _size(x.type) * (_main(types[0]) > 0)
  if x.kind == "dynamic-update-slice":
    return _main(types[1]) + _size(types[1]) * (_main(x.type) > 0)
  return _main(x.type) + sum(map(_main, types))


def _flops(program: dict[str, Computation], inside: Computation, x: Operation) -> float:
  """Counts the FLOPs of the matrix products of an operation."""
  if called := program.get(x.called("calls")):
    return sum(_flops(program, called, y) for y in called.values())
  types = [inside[y].type for y in x.operands if y in inside]
  if x.kind == "custom-call" and "gemm" not in x.rest and "matmul" not in x.rest:
    text = x.name + x.rest.partition("), ")[2]
    products = next((n for key, n in _KERNELS.items() if key in text), 0)
    return products and products * _of_attention(types)
  if x.kind not in ("dot", "convolution", "custom-call"):
    return 0
  # Every index of a product is in two of its three arrays, that of a batch in three.
  out = next(_ARRAY.finditer(x.type))
  arrays = [_elements(next(_ARRAY.finditer(t))) for t in types[:2]]
  return 2 * math.sqrt(math.prod(arrays) * _elements(out) / _batches(x, types[0]))


def _batches(x: Operation, left: str) -> int:
  """Counts the products that an operation computes side by side."""
  sizes = [int(n) for n in next(_ARRAY.finditer(left))[3].split(",") if n]
  if match := re.search(r'lhs_batch_dim(?:ension)?s"?[=:][{\[]([\d,"]*)', x.rest):
    return math.prod(sizes[int(i)] for i in re.findall(r"\d+", match[1]))
  # XLA for TPUs writes a batch as an axis of a window that is dilated.
  match = re.search(r"lhs_dilate=([\dx]+)", x.rest)
  return math.prod(map(int, match[1].split("x"))) if match else 1


def _of_attention(types: list[str]) -> float:
  """Counts the FLOPs of one product of L x L x head size, below the diagonal."""
  queries = max(types, key=_size_of_bfloat16)
  *_, length, _ = (int(n) for n in next(_ARRAY.finditer(queries))[3].split(","))
  return _elements(next(_ARRAY.finditer(queries))) * length


def _size_of_bfloat16(array: str) -> int:
  return _size(array) if array.startswith("bf16") else 0


def _read(program: dict[str, Computation], name: str, value: str) -> int:
  """Counts the bytes of a value that a computation reads; the slices if no others."""
  total, inside = 0, program[name]
  for x in inside.values():
    for i, operand in enumerate(x.operands):
      if operand != value:
        continue
      if x.kind == "bitcast":
        total += _read(program, name, x.name)
      elif x.kind in ("dynamic-slice", "slice", "gather"):
        total += _size(x.type) * (i == 0)
      elif x.kind != "dynamic-update-slice" or i:  # Updates change operand 0 in place.
        total += _size(inside[value].type)
  return total


def _written(program: dict[str, Computation], name: str) -> list[int]:
  """Counts the bytes of each result of a computation; only the slices that change."""
  inside = program[name]
  *_, root = inside.values()
  found = []
  for operand in root.operands if root.kind == "tuple" else [root.name]:
    x = inside[operand]
    while x.kind == "bitcast":
      x = inside[x.operands[0]]
    update = x.kind == "dynamic-update-slice"
    found.append(_size(inside[x.operands[1]].type if update else x.type))
  return found


def _rounds(program: dict[str, Computation], loop: Operation) -> int:
  """Returns how often the body of a loop runs."""
  if known := re.findall(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
    return int(known[0])
  condition = program[loop.called("condition")].values()
  integers = [x for x in condition if re.match(r"[su]32\[\]", x.type)]
  limits = [_number(x) for x in integers if x.kind == "constant"]
  if len(limits) != 1:
    raise ValueError(
      f"the rounds of loop {loop.name!r} are not known; adapt {__file__}."
    )
  counters = [x.rest for x in integers if x.kind == "get-tuple-element"]
  return -(-limits[0] // _stride(program[loop.called("body")], counters))


def _stride(body: Computation, counters: list[str]) -> int:
  """Returns what a loop adds to its counter: 2 where XLA has unrolled it once."""
  *_, root = body.values()
  index = [int(n) for n in re.findall(r"index=(\d+)", " ".join(counters))]
  if root.kind != "tuple" or len(index) != 1:
    return 1
  added = body[root.operands[index[0]]]
  found = [body[y] for y in added.operands if y in body and added.kind == "add"]
  return next((_number(y) for y in found if y.kind == "constant"), 1)


def _number(constant: Operation) -> int:
  return int(constant.rest.split(")")[0])


def _size(types: str) -> int:
  """Returns the bytes of arrays, in any memory."""
  return sum(_bytes(x) for x in _ARRAY.finditer(types))


def _main(types: str) -> int:
  """Returns the bytes of arrays in the main memory."""
  return sum(_bytes(x) for x in _ARRAY.finditer(types) if "S(" not in (x[4] or ""))


def _bytes(array: re.Match[str]) -> int:
  return _elements(array) * max(int(array[2] or 8) // 8, 1)


def _elements(array: re.Match[str]) -> int:
  return math.prod(int(n) for n in array[3].split(",") if n)
