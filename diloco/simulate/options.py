"""The options of the simulators' commands, and how their text is parsed."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from diloco.simulate.compute_time import MFU, PEAK_TFLOPS
from diloco.simulate.failures import UNITS
from diloco.simulate.utilisation import LINKS, Link
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


def link(text: str) -> Link:
  """Parses the name of a link."""
  if text not in LINKS:
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(LINKS)}")
  return LINKS[text]


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
CONFIG = Option("config file, instead of numbers: configs/chinchilla.py:1.3B,M=2", str)
PARAMS = Option("parameters N, such as 4e9, 4B or 700M", str, "model.dim")
GBITS = Option("bandwidth of the link in Gbit/s", required=True)
TARGET = Option("utilisation to reach; default 0.95")
OUT = Option("folder for the files", as_path, required=True)
PLOT = Option("file for a figure of utilisation over bandwidth", as_path)
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
  "link": Option(f"what the link lacks: {', '.join(LINKS)}; default ideal", link),
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
MEMORY = {
  name: METHOD[name] for name in ("config", "params", "layers", "fragment_size")
}
SCHEDULE = {
  "config": CONFIG._replace(help="config file", required=True),
  "first": Option("first inner step to draw; default shortly before step H", whole),
  "last": Option("last inner step to draw; default one round later", whole),
  "out": Option("picture to write, such as x.png", as_path, required=True),
}
FAILURES = METHOD | {
  "gbits": GBITS,
  "chips": Option("chips of all sites, such as 1024,131072", several(whole), "", True),
  "mtbf": Option(
    "mean time between a chip's failures, such as 1y,5y", several(duration), "", True
  ),
  "restart": Option("time of a restart; default 5m", duration),
  "grace": Option("time that others wait for a site that hangs; default 30s", duration),
  "quorum": Option("sites that must be up for rounds to go on; default 1", whole),
  "hangs": Option("share of failures that are hangs; default 0"),
  "checkpoint_time": Option("how long a checkpoint stops all; default 30s", duration),
  "checkpoint_every": Option("time between checkpoints; default Daly's", duration),
  "duration": Option("simulated time of a run; default 30d", duration),
  "runs": Option("simulated runs; default 10", whole),
  "seed": Option("seed of the failures; default 0", whole),
  "out": Option("folder for a figure", str),
}
# The options of each command.
OPTIONS = {
  "figure": {"out": OUT},
  "figures": {"out": OUT},
  "utilisation": METHOD | {"gbits": GBITS, "plot": PLOT},
  "bandwidth": METHOD | {"target": TARGET, "plot": PLOT},
  "frontier": MODEL | {"gbits": GBITS, "target": TARGET},
  "wallclock": RUN,
  "memory": MEMORY,
  "schedule": SCHEDULE,
  "failures": FAILURES,
}
