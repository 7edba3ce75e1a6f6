"""The options of the simulators' commands, and how their text is parsed."""

import argparse
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diloco.simulate.compute_time import MFU, PEAK_TFLOPS
from diloco.util.command import as_path


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
    type: converts the text.
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
CONFIG = Option("config file, instead of numbers: configs/chinchilla.py:1.3B,M=2", str)
PARAMS = Option("parameters N, such as 4e9, 4B or 700M", str, "model.dim")
GBITS = Option("bandwidth of the link in Gbit/s", required=True)
TARGET = Option("utilisation to reach; default 0.95")
OUT = Option("folder for the files", as_path, required=True)
COUNTS = ("params", "tokens", "batch_tokens")  # Numbers such as 700M.
# Options that determine the step time of a config.
COMPUTE = {
  "chips": Option("chips of all replicas together, with --config", whole),
  "peak_tflops": Option(
    f"peak TFLOP/s of a chip, with --config; default {PEAK_TFLOPS}"
  ),
  "mfu": Option(f"share of the peak that is reached, with --config; default {MFU}"),
}
MODEL = {
  "config": CONFIG,
  **COMPUTE,
  "params": PARAMS,
  "layers": Option("transformer layers", whole, "model.num_layers"),
  "step_time": Option("seconds of compute per step"),
  "replicas": Option("replicas M; default 2", whole, "replicas"),
}
METHOD = MODEL | {
  "method": Option("data_parallel, diloco or streaming (default)", str, "algorithm"),
  "sync_every": Option("inner steps H per round; default 100", whole, "sync_every"),
  "fragment_size": Option("fragment layers; default 3 or all", whole, "fragments.size"),
  "tau": Option("inner steps that hide a reduction; default 1", whole, "overlap.tau"),
  "bits": Option("bits per value on the link; default 4", field="wire.format"),
  "latency": Option("seconds per reduction; default 0"),
}
RUN = {
  "config": CONFIG,
  "params": PARAMS,
  "tokens": Option("training tokens D, such as 20B", str, "train.tokens"),
  "batch_tokens": Option("tokens per inner step", str, "train.batch_size"),
  "replicas": Option("replicas M", whole, "replicas"),
  "sync_every": Option("inner steps H per round; default 30", whole, "sync_every"),
  "outer_bits": Option("bits per outer gradient; default 16", field="wire.format"),
  "bits": Option("bits per inner gradient; default 16"),
  "chips": Option("chips R; default one per 16,384 tokens of the batch, or more"),
  "network": Option("between datacentres: low (default), medium or high", str),
  "gbits": Option("Gbit/s between datacentres, instead of the network's"),
  "latency": Option("seconds between datacentres, instead of the network's"),
}
SCHEDULE = {
  "config": CONFIG._replace(help="config file", required=True),
  "first": Option("first inner step to draw; default shortly before step H", whole),
  "last": Option("last inner step to draw; default one round later", whole),
  "out": Option("picture to write, such as x.png", as_path, required=True),
}
