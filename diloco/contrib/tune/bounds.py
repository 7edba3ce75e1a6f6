"""Bounds the time of compiled programs, and lists the settings to compare."""

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from diloco.contrib.tune.hlo_work import works
from diloco.errors import ConfigError


class Bound(NamedTuple):
  """Seconds that a program needs at least: in all, of its products, of its bytes."""

  seconds: float
  products: float
  memory: float


def bound(hlo: str, peak: float, bandwidth: float) -> Bound:
  """Bounds the time of a compiled program on one device.

  Args:
    hlo: its text.
    peak: FLOP/s of the device.
    bandwidth: bytes per second of its main memory.
  """
  found = [
    (x.rounds * x.flops / peak, x.rounds * x.nbytes / bandwidth) for x in works(hlo)
  ]
  products, memory = (sum(column) for column in zip(*found))
  return Bound(sum(map(max, found)), products, memory)


def settings(tries: Sequence[str]) -> Iterator[dict[str, Any]]:
  """Yields each combination of values of `FIELD=VALUE,VALUE`.

  Raises:
    ConfigError: one has another form.
  """
  for text in tries:
    if not all(text.partition("=")[::2]):
      raise ConfigError(f"--try is {text!r}; write a field and values, as a.b=1,2.")
  fields = [text.partition("=")[::2] for text in tries]
  for values in itertools.product(*(v.split(",") for _, v in fields)):
    yield {name: _value(value) for (name, _), value in zip(fields, values)}


def as_flags(fields: Mapping[str, Any]) -> str:
  """Returns the flags that set some fields, for a command line."""
  return " ".join(f"--config.{name}={value}" for name, value in fields.items())


def _value(text: str) -> object:
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError):  # A name, such as dots.
    return text
