"""Defines the options of the simulators, and makes workloads from them. No JAX."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diloco.errors import ConfigError
from diloco.simulate import from_config
from diloco.simulate.from_config import MFU, PEAK_TFLOPS, step_time
from diloco.simulate.utilisation import LINKS, Workload
from diloco.util.command import as_path, in_range

Args = dict[str, Any]  # The arguments that are given, by name.
Answer = tuple[object, str]  # The data that --json prints, and the text without --json.


def number(text: str) -> float:
  """Parses a number; refuses extreme numbers, so that products stay finite."""
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if value and not 1e-30 <= abs(value) <= 1e30:
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1e-30 to 1e30")
  return value


whole = in_range(0, 10**12)  # With this limit, 64 bits hold a position in a round.


class Option(NamedTuple):
  """An option of the command line.

  Attributes:
    help: the option's meaning, unit and default.
    type: converts the option's text. bool: the option is a flag without a text.
    field: the config field that gives this value with --config. If there is
      such a field, the option cannot be combined with --config. "": there is none.
  """

  help: str
  type: Callable[[str], Any] = number
  field: str = ""


class Command(NamedTuple):
  """A simulator.

  Attributes:
    help: what the simulator answers.
    run: computes the answer from the given arguments, by name.
    options: names of OPTIONS, separated by spaces. An option with an exclamation mark
      must be given.
    more: options of this command alone.
  """

  help: str
  run: Callable[[Args], Answer]
  options: str = ""
  more: Mapping[str, Option] = {}


OPTIONS = {
  "config": Option("config, instead of numbers: configs/chinchilla.py:1.3B,M=2", str),
  "chips": Option("chips of all replicas together", whole),
  "peak_tflops": Option(f"peak TFLOP/s of a chip, for --config; default {PEAK_TFLOPS}"),
  "mfu": Option(f"share of the peak that is reached, for --config; default {MFU}"),
  "params": Option("parameters N, such as 4e9, 4B or 700M", str, "model.dim"),
  "layers": Option("transformer layers", whole, "model.num_layers"),
  "step_time": Option("seconds of compute per step"),
  "replicas": Option("replicas M; default 2", whole, "replicas"),
  "link": Option(f"what the link lacks: {', '.join(LINKS)}; default ideal", str),
  "method": Option("data_parallel, diloco, streaming (default)", str, "algorithm"),
  "sync_every": Option("inner steps H per round; default 100", whole, "sync_every"),
  "fragment_size": Option("layers of a fragment; default 3", whole, "fragments.size"),
  "tau": Option("inner steps that hide a reduction; default 1", whole, "overlap.tau"),
  "bits": Option("bits per value; default 4 (streaming) or 16", number, "wire.format"),
  "latency": Option("seconds per reduction; default 0"),
  "gbits": Option("bandwidth of the link between replicas, Gbit/s"),
  "target": Option("utilisation to reach; default 0.95"),
  "first": Option("first inner step to draw; default shortly before step H", whole),
  "last": Option("last inner step to draw; default one round later", whole),
  "out": Option("file or folder to write", as_path),
}
COMPUTE = ("chips", "peak_tflops", "mfu")  # Options that give a config's step time.
# {method: the options that have no effect on this method}.
IGNORED = {
  "data_parallel": ("sync_every", "fragment_size", "tau"),
  "diloco": ("fragment_size", "tau"),
}


def workload(args: Args) -> Workload:
  """Makes the workload that a config or plain numbers describe."""
  speed = {name: args[name] for name in COMPUTE if name in args}
  if speed and ("config" not in args or "step_time" in args):
    raise ConfigError(f"--{next(iter(speed))} needs a --config, and no --step_time.")
  if "config" in args:
    c, latency = args["config"], args.get("latency", 0.0)
    if "step_time" not in args and "chips" not in args:
      raise ConfigError(
        "--chips is missing; give the number of chips of all replicas together, or"
        " --step_time, the seconds of compute per step."
      )
    seconds = args["step_time"] if "step_time" in args else step_time(c, **speed)
    work = from_config.workload(c, seconds, latency)
    return dataclasses.replace(work, link=args.get("link", work.link))
  for name in ("params", "layers", "step_time"):
    if name not in args:
      raise ConfigError(f"--{name} is missing; give it, or a --config.")
  bits = 4 if args.get("method", "streaming") == "streaming" else 16
  fields = {"bits": bits, "tau": 1, "fragment_size": min(3, args["layers"])}
  fields |= fields_of(Workload, args)
  return Workload.of_equal_layers(args["params"], args["layers"], **fields)


def assumed(args: Args, work: Workload, more: str = "") -> list[str]:
  """Lists the step time, the model and the method that an answer assumes."""
  speed = ""
  if "config" in args and "step_time" not in args:
    peak, mfu = args.get("peak_tflops", PEAK_TFLOPS), args.get("mfu", MFU)
    speed = f": {args['chips']:,} chips of {peak:g} TFLOP/s at an MFU of {mfu:g}"
  if "config" in args and (joint := args["config"].joint_steps):
    speed += f"; the first {joint:,} steps, all data-parallel, count as later ones"
  return [
    f"step         {work.step_time:.4g} s of compute{speed}",
    f"assumed      {work.method}, M = {work.replicas}{more}, {conditions(work)}",
  ]


def conditions(work: Workload) -> str:
  """Names the latency, the kind of link and the number of parameters."""
  size = f"{sum(work.params_per_layer):,.0f} parameters"
  return f"latency {work.latency:g} s, {work.link} link; {size}"


def fields_of(kind: type, args: Args) -> Args:
  """Returns the given arguments that are fields of a dataclass."""
  return {f.name: args[f.name] for f in dataclasses.fields(kind) if f.name in args}
