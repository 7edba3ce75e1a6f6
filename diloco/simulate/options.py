"""The options of the simulators' commands, and how their text is parsed."""

import argparse
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


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


class Option(NamedTuple):
  """An option of the command line.

  Attributes:
    help: meaning, unit and default.
    type: converts the text.
    field: the config field that gives this value. Such an option excludes --config.
    ignored_by: the methods that do not use the value.
    required: whether the option must be given.
  """

  help: str
  type: Callable[[str], Any] = number
  field: str = ""
  ignored_by: Sequence[str] = ()
  required: bool = False


UNFRAGMENTED = ("data_parallel", "diloco")
CONFIG = Option("config file, instead of numbers: configs/chinchilla.py:1.3B,M=2", str)
PARAMS = Option("parameters N, such as 4e9, 4B or 700M", str, "model.dim")
GBITS = Option("bandwidth of the link in Gbit/s", required=True)
TARGET = Option("utilisation to reach; default 0.95")
OUT = Option("folder for the files", str, required=True)
COUNTS = ("params", "tokens", "batch_tokens")  # Numbers such as 700M.
# Options that determine the step time of a config.
COMPUTE = {
  "chips": Option("chips of all replicas, with --config; default 1", whole),
  "peak_tflops": Option("peak TFLOP/s of a chip, with --config; default 197"),
  "mfu": Option("share of the peak that is reached, with --config; default 0.4"),
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
  "sync_every": Option(
    "inner steps H per round; default 100", whole, "sync_every", ("data_parallel",)
  ),
  "fragment_size": Option(
    "layers per fragment; default 3 or all", whole, "fragments.size", UNFRAGMENTED
  ),
  "tau": Option(
    "inner steps that hide a reduction; default 1", whole, "overlap.tau", UNFRAGMENTED
  ),
  "bits": Option("bits per value on the link; default 4", field="wire.format"),
  "latency": Option("seconds per reduction; default 0"),
  "plot": Option("file for a figure of utilisation over bandwidth", pathlib.Path),
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
