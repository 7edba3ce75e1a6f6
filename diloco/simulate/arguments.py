"""What the arguments of a command describe: a workload, or a run. No JAX."""

import dataclasses
from typing import Any

from diloco.errors import ConfigError
from diloco.simulate import from_config, wallclock
from diloco.simulate.compute_time import MFU, PEAK_TFLOPS, step_time
from diloco.simulate.limits import check
from diloco.simulate.options import COMPUTE
from diloco.simulate.utilisation import Workload

Args = dict[str, Any]  # The arguments that are given, by name.
Answer = tuple[Any, str]  # The data that --json prints, and the text without --json.


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
  require(args, "params", "layers", "step_time")
  fields = {"bits": 4, "tau": 1, "fragment_size": min(3, args["layers"])}
  fields |= fields_of(Workload, args)
  return Workload.of_equal_layers(args["params"], args["layers"], **fields)


def training(args: Args) -> wallclock.Training:
  """Makes the training run that a config or plain numbers describe."""
  check("network", args.get("network", "low"), wallclock.NETWORKS)
  network = wallclock.NETWORKS[args.get("network", "low")]
  gbits = args.get("gbits", network.bandwidth / 1e9)
  across = wallclock.Network(gbits * 1e9, args.get("latency", network.latency))
  fields = fields_of(wallclock.Training, args) | {"across": across}
  if "config" in args:
    return from_config.training(args["config"], **fields)
  require(args, "params", "tokens", "batch_tokens", "replicas")
  return wallclock.Training(**fields)


def assumed(args: Args, work: Workload, more: str = "") -> list[str]:
  """Lists the step time, the model and the method that an answer assumes."""
  speed = ""
  if "config" in args and "step_time" not in args:
    peak, mfu = args.get("peak_tflops", PEAK_TFLOPS), args.get("mfu", MFU)
    speed = f": {args['chips']:,} chips of {peak:g} TFLOP/s at an MFU of {mfu:g}"
  return [
    f"step         {work.step_time:.4g} s of compute{speed}",
    f"assumed      {work.method}, M = {work.replicas}{more}, latency {work.latency:g}"
    f" s, {work.link} link; {sum(work.params_per_layer):,.0f} parameters",
  ]


def fields_of(kind: type, args: Args) -> Args:
  """Returns the given arguments that are fields of a dataclass."""
  return {f.name: args[f.name] for f in dataclasses.fields(kind) if f.name in args}


def require(args: Args, *names: str) -> None:
  for name in names:
    if name not in args:
      raise ConfigError(f"--{name} is missing; give it, or a --config.")
