"""The options of the simulators' commands, and how their text is parsed."""

import argparse
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diloco.simulate.compute_time import MFU, PEAK_TFLOPS
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
  """Parses a whole number of at most 12 digits; 64 bits hold positions in a round."""
  if not re.fullmatch(r"-?\d{1,12}", text):
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number up to 12 digits")
  return int(text)


class Option(NamedTuple):
  """An option of the command line.

  Attributes:
    help: meaning, unit and default.
    type: converts the text; bool: the option has none, and is given or not.
    field: the config field that gives this value. Such an option excludes --config.
    required: whether the option must be given.
  """

  help: str
  type: Callable[[str], Any] = number
  field: str = ""
  required: bool = False


class Command(NamedTuple):
  """A simulator.

  Attributes:
    help: what it answers.
    run: computes the answer from the arguments that are given, by name: the data that
      --json prints, and the text without --json.
    options: its options by name.
  """

  help: str
  run: Callable[[dict[str, Any]], tuple[Any, str]]
  options: Mapping[str, Option] = {}


# The options without effect on a method.
IGNORED = {
  "data_parallel": ("sync_every", "fragment_size", "tau"),
  "diloco": ("fragment_size", "tau"),
}
COUNTS = ("params", "tokens", "batch_tokens")  # Numbers such as 700M.
TYPES = {"number": number, "text": str, "path": as_path, "whole": whole}
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
COMPUTE, GROUPS = group("compute"), {name: group(name) for name in _FILE}
