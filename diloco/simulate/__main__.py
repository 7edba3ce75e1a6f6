r"""Simulates compute utilisation, wall-clock time and goodput.

python -m diloco simulate table4
python -m diloco simulate table6
python -m diloco simulate figures --out=/tmp/figures
python -m diloco simulate bandwidth --params=1B --layers=24 --step_time=0.1
python -m diloco simulate utilisation --params=1B --layers=24 --step_time=0.1 --gbits=2
python -m diloco simulate frontier --params=1B --layers=24 --step_time=0.1 --gbits=1
python -m diloco simulate bandwidth --config=configs/chinchilla.py:1.3B,M=2 --chips=64
python -m diloco simulate bandwidth --config=configs/chinchilla.py:1.3B,M=2 --chips=64 \
  --config.overlap.tau=5
python -m diloco simulate wallclock --params=1B --tokens=20B --batch_tokens=1048576 \
  --replicas=2
python -m diloco simulate memory --params=100B --layers=108
python -m diloco simulate schedule --config=configs/sample.py --out=/tmp/schedule.png
python -m diloco simulate failures --config=configs/chinchilla.py:10B,M=8 \
  --step_time=1 --gbits=10 --chips=1024,131072 --mtbf=1y,5y
"""

import argparse
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from diloco.config.command_line import load_config
from diloco.errors import ConfigError
from diloco.simulate import failures, from_config, memory, tables, wallclock
from diloco.simulate.compute_time import CHIP_FLOPS, MFU, PEAK_TFLOPS, step_time
from diloco.simulate.limits import NO_ROUNDS, check
from diloco.simulate.options import COMPUTE, COUNTS, IGNORED, OPTIONS
from diloco.simulate.steady import required_bandwidth, steady_utilisation
from diloco.simulate.utilisation import Workload
from diloco.util import palette
from diloco.util.command import Parser, check_picture, guarded, make_folder, parse_count

Args = dict[str, Any]  # The arguments that are given, by name.
Answer = tuple[Any, str]  # The data that --json prints, and the text without --json.


def main(argv: list[str] | None = None) -> int:
  parser = make_parser()
  args, rest = parser.parse_known_args(argv)
  overrides = [a for a in rest if re.match(r"--(no)?config\.\w", a)]
  if len(overrides) < len(rest):
    parser.error(f"unrecognized arguments: {' '.join(rest)}")
  return guarded(run, vars(args) | {"overrides": overrides})


def make_parser() -> Parser:
  parser = Parser(prog="python -m diloco simulate", description=__doc__)
  commands = parser.add_subparsers(dest="command", required=True)
  for name, (text, _) in COMMANDS.items():
    command = commands.add_parser(name, help=text, argument_default=argparse.SUPPRESS)
    command.add_argument("--json", action="store_true", help="print JSON")
    for option, o in OPTIONS.get(name, {}).items():
      command.add_argument(f"--{option}", help=o.help, type=o.type, required=o.required)
  commands.choices["figure"].add_argument("name", help="for example s4 or c10")
  return parser


def run(args: Args) -> None:
  """Runs a command and prints its answer."""
  for name, option in OPTIONS.get(args["command"], {}).items():
    if name in args and "config" in args and option.field:
      raise ConfigError(f"--config gives {name}; set --config.{option.field} instead.")
    if name in args and name in IGNORED.get(args.get("method", ""), ()):
      raise ConfigError(f"--method={args['method']} ignores --{name}; leave it out.")
  if "config" in args:
    args["config"] = load_config(args["config"], args["overrides"])
  elif args["overrides"]:
    field = args["overrides"][0].partition("=")[0]
    raise ConfigError(f"{field} needs a --config before it.")
  for name in COUNTS:
    if name in args:
      args[name] = parse_count(args[name], f"--{name}")
  _, command = COMMANDS[args["command"]]
  data, text = command(args)
  print(json.dumps(data, default=dataclasses.asdict) if "json" in args else text)


def table(args: Args) -> Answer:
  rows = getattr(tables, args["command"])()
  return rows, columns(rows) if args["command"] == "table1" else tables.show(rows)


def draw(args: Args) -> Answer:
  from diloco.simulate import figures

  folder = make_folder(args["out"], "--out")
  names = [args["name"]] if "name" in args else figures.FIGURES
  paths = [path for name in names for path in figures.draw(name, folder)]
  return paths, "\n".join(paths)


def link(args: Args) -> Answer:
  """Answers which utilisation a link reaches, or which link a utilisation needs."""
  work, share = workload(args), args.get("target", 0.95)
  if args["command"] == "bandwidth":
    gbits = required_bandwidth(work, share) / 1e9
  else:
    gbits = args["gbits"]
    share = float(steady_utilisation(work, [gbits * 1e9])[0])
  if "plot" in args:
    from diloco.simulate import figures

    check_picture(args["plot"], "x.png", "--plot")
    palette.save(lambda: figures.own_figure(work, gbits), args["plot"])
  data = {"gbits": gbits, "utilisation": share, "step_time_s": work.step_time}
  lines = [
    f"link         {gbits:.4g} Gbit/s of each replica",
    f"utilisation  {share:.4g} of the time is compute",
  ]
  synced = f", H = {work.sync_every}" * (work.method != "data_parallel")
  tau = f", tau = {work.tau}" * (work.method == "streaming")
  lines += assumed(args, work, f"{synced}{tau}, {work.bits:.3g} bits per value")
  return data, "\n".join(lines)


def assumed(args: Args, work: Workload, more: str = "") -> list[str]:
  """Says of which step time, and of which model and method, an answer holds."""
  speed = ""
  if "config" in args and "step_time" not in args:
    peak, mfu = args.get("peak_tflops", PEAK_TFLOPS), args.get("mfu", MFU)
    speed = f": {args['chips']:,} chips of {peak:g} TFLOP/s at an MFU of {mfu:g}"
  return [
    f"step         {work.step_time:.4g} s of compute{speed}",
    f"assumed      {work.method}, M = {work.replicas}{more}, latency {work.latency:g}"
    f" s, {work.link} link; {sum(work.params_per_layer):,.0f} parameters",
  ]


def frontier(args: Args) -> Answer:
  work, gbits, target = workload(args), args["gbits"], args.get("target", 0.95)
  choices = from_config.frontier(work, gbits * 1e9, target)
  text = from_config.show(choices)
  if not choices:
    most = max(c.utilisation for c in from_config.ablations(work, gbits * 1e9))
    text = (
      f"No setting of the papers' ablations reaches a utilisation of {target:g} on"
      f" {gbits:g} Gbit/s; the best reaches {most:.3g}. Raise --gbits or lower"
      " --target."
    )
  work = dataclasses.replace(work, method="streaming", plan=None)
  text = "\n".join([text, *assumed(args, work)])
  return {"choices": choices, "sources": from_config.SOURCES}, text


def compare(args: Args) -> Answer:
  run = training(args)
  rows = wallclock.compare(run)
  across = run.across
  text = (
    f"assumed: {run.nodes:,.4g} chips of {CHIP_FLOPS / 1e12:g} TFLOP/s, M ="
    f" {run.replicas}, H = {run.sync_every}, {run.outer_bits:.3g} bits per outer and"
    f" {run.bits:.3g} per inner gradient, {across.bandwidth / 1e9:g} Gbit/s and"
    f" {across.latency:g} s of latency between datacentres"
  )
  return rows, f"{columns(rows)}\n{text}"


def states(args: Args) -> Answer:
  """Answers how much memory parameters and optimizers need."""
  papers = {} if "config" in args else {"params": 100e9, "layers": 108}
  work = workload({"step_time": 1.0, **papers, **args})
  if work.method == "data_parallel":
    raise ConfigError(NO_ROUNDS)
  sizes = work.params_per_layer
  fragments = [sum(sizes[i] for i in layers) for layers in work.whole_plan[1]]
  found = memory.memory(sum(sizes), max(fragments))
  note = (
    "float32; share of data-parallel's; rates: milliseconds to load it at this rate"
  )
  return found, f"{columns(found)}\n{note}"


def goodput(args: Args) -> Answer:
  """Answers which goodput is left when chips fail."""
  fixed = "config" not in args or "step_time" in args
  rows = []
  for chips, mtbf in itertools.product(args["chips"], args["mtbf"]):
    one = args | {"chips": chips, "mtbf": mtbf}
    machines = failures.Machines(**fields_of(failures.Machines, one))
    # Without --step_time, more chips share the config's batch: steps are shorter.
    work = workload({k: v for k, v in one.items() if k != "chips" or not fixed})
    if work.method == "data_parallel":
      raise ConfigError(NO_ROUNDS)
    rows.append(failures.simulate(work, args["gbits"] * 1e9, machines))
  text = failures.show(rows) + (
    f"\nshare of useful tokens, mean ± deviation of {machines.runs} runs of"
    f" {failures.show_time(machines.duration)}; restart"
    f" {failures.show_time(machines.restart)}, {args['gbits']:g} Gbit/s"
  )
  if fixed:
    text += "".join(f"\n{line}" for line in assumed(args, work))
  if "out" in args:
    from diloco.simulate import figures

    path = make_folder(args["out"], "--out") / "simulated_failures"
    make = lambda: figures.failures_figure(rows)
    text = "\n".join([text, *palette.save(make, path, ".png", ".svg")])
  return rows, text


def draw_schedule(args: Args) -> Answer:
  """Draws when a config sends and merges its fragments."""
  from diloco.simulate import schedule_figure

  c, out = args["config"], args["out"]
  first, last = schedule_figure.window(c, args.get("first"), args.get("last"))
  schedule_figure.check(c, first, last, out)
  sends = schedule_figure.planned(c, first, last)
  paths = palette.save(lambda: schedule_figure.make(c, sends, first, last), out)
  return paths, str(out)


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


def columns(rows: list[dict[str, float | str]]) -> str:
  """Formats rows as text, with a column for each key."""
  import pandas as pd  # Slow to import.

  return pd.DataFrame(rows).to_string(index=False, float_format="{:.5g}".format)


def fields_of(kind: type, args: Args) -> Args:
  """Returns the given arguments that are fields of a dataclass."""
  return {f.name: args[f.name] for f in dataclasses.fields(kind) if f.name in args}


def require(args: Args, *names: str) -> None:
  for name in names:
    if name not in args:
      raise ConfigError(f"--{name} is missing; give it, or a --config.")


COMMANDS: dict[str, tuple[str, Callable[[Args], Answer]]] = {
  "table4": ("Streaming DiLoCo's Table 4, ours against paper", table),
  "table6": ("Scaling Laws' Table 6, ours against paper", table),
  "table1": ("Streaming DiLoCo's Table 1, hours at 1 Gbit/s", table),
  "figure": ("draw one figure", draw),
  "figures": ("draw all figures", draw),
  "utilisation": ("utilisation that a link reaches", link),
  "bandwidth": ("link that a utilisation needs", link),
  "frontier": ("H, fragment size, tau and bits that suffice for a link", frontier),
  "wallclock": ("idealised hours, Appendix A of 2503.09799", compare),
  "memory": ("bytes of parameters and optimizers; default 100B, 108 layers", states),
  "schedule": ("draw a config's sends and merges", draw_schedule),
  "failures": ("goodput when chips fail", goodput),
}


if __name__ == "__main__":
  sys.exit(main())
