"""The options of the simulators' commands, and how their text is parsed."""

import argparse
import math
import re
import tomllib
from collections.abc import Callable
from typing import Any, NamedTuple

from diloco.simulate.compute_time import MFU, PEAK_TFLOPS
from diloco.simulate.failures import UNITS
from diloco.simulate.utilisation import LINKS
from diloco.util.command import as_path
from diloco.util.shipped import PACKAGE


def number(text: str) -> float:
  """Parses a number whose products stay finite."""
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if value and not 1e-30 <= abs(value) <= 1e30:
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1e-30 to 1e30")
  return value


def whole(text: str) -> int:
  """Parses a whole number; 64 bits hold the positions in a round of so many steps."""
  if not re.fullmatch(r"-?\d{1,12}", text):
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number up to 12 digits")
  return int(text)


def duration(text: str) -> float:
  """Parses a time in seconds, or with a unit, such as 10m or 5y."""
  found = re.fullmatch(rf"(.*\d\.?)([{''.join(UNITS)}]?)", text)
  if not found:
    raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90, 10m or 5y")
  return number(found[1]) * UNITS[found[2] or "s"]


def several(parse: Callable[[str], Any]) -> Callable[[str], list]:
  """Returns a parser of values with commas between them."""
  return lambda text: [parse(part) for part in text.split(",")]


class Option(NamedTuple):
  """An option of the command line.

  Attributes:
    help: meaning, unit and default.
    type: converts the text.
    field: the config field that gives this value. Such an option excludes --config.
    required: whether the option must be given.
  """

  help: str
  type: Callable[[str], Any] = number
  field: str = ""
  required: bool = False


# The options without effect on a method.
IGNORED = {
  "data_parallel": ("sync_every", "fragment_size", "tau"),
  "diloco": ("fragment_size", "tau"),
}
COUNTS = ("params", "tokens", "batch_tokens")  # Numbers such as 700M.
TYPES = {
  "number": number,
  "text": str,
  "path": as_path,
  "whole": whole,
  "wholes": several(whole),
  "duration": duration,
  "durations": several(duration),
}
_FILE = tomllib.loads((PACKAGE / "simulate" / "options.toml").read_text())
_DEFAULTS = {"peak": PEAK_TFLOPS, "mfu": MFU, "links": ", ".join(LINKS)}


def group(name: str) -> dict[str, Option]:
  """Returns the options of a table of options.toml, with those that it takes over."""
  found = dict[str, Option]()
  for option, o in _FILE[name].items():
    if option == "of":
      for other in o:
        found |= group(other)
    else:
      own = o | {"help": o["help"].format(**_DEFAULTS)}
      found[option] = Option(**own | {"type": TYPES[o.get("type", "number")]})
  return found


# Options that determine the step time of a config; those of each table.
COMPUTE, OPTIONS = group("compute"), {name: group(name) for name in _FILE}
