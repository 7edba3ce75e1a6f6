r"""Simulates compute utilisation and wall-clock time; `contrib/` adds more simulators.

python -m diloco simulate table4
python -m diloco simulate table6
python -m diloco simulate figures --out=/tmp/figures
python -m diloco simulate bandwidth --params=1B --layers=24 --step_time=0.1
python -m diloco simulate utilisation --params=1B --layers=24 --step_time=0.1 --gbits=2
python -m diloco simulate bandwidth --config=configs/chinchilla.py:1.3B,M=2 --chips=64
python -m diloco simulate bandwidth --config=configs/chinchilla.py:1.3B,M=2 --chips=64 \
  --config.overlap.tau=5
python -m diloco simulate memory --params=100B --layers=108
python -m diloco simulate schedule --config=configs/sample.py --out=/tmp/schedule.png
"""

import argparse
import dataclasses
import functools
import importlib
import json
import re
import sys

from diloco.config.command_line import load_config
from diloco.errors import ConfigError
from diloco.simulate import arguments, memory, tables
from diloco.simulate.arguments import (
  OPTIONS,
  Answer,
  Args,
  Command,
  Option,
  assumed,
  workload,
)
from diloco.simulate.limits import NO_ROUNDS, check
from diloco.simulate.steady import required_bandwidth, steady_utilisation
from diloco.util import palette, shipped
from diloco.util.command import Parser, check_picture, guarded, make_folder, parse_count


def main(argv: list[str] | None = None) -> int:
  parser = make_parser()
  args, rest = parser.parse_known_args(argv)
  overrides = [a for a in rest if re.match(r"--(no)?config\.\w", a)]
  if len(overrides) < len(rest):
    wrong = (word for word in rest if word not in overrides)
    parser.error(f"unrecognized arguments: {' '.join(wrong)}")
  return guarded(run, vars(args) | {"overrides": overrides})


def make_parser() -> Parser:
  parser = Parser(prog="python -m diloco simulate", description=__doc__)
  commands = parser.add_subparsers(dest="command", required=True)
  for name, command in known().items():
    p = commands.add_parser(name, help=command.help, argument_default=argparse.SUPPRESS)
    for option, (text, kind, _) in options_of(command).items():
      how = {"action": "store_true"} if kind is bool else {"type": kind}
      must = f"{option}!" in command.options.split()
      p.add_argument(f"--{option}", help=text, required=must, **how)
  names = "s2, s3, s4, s6, s7, s9, s14, s15, s16, c6, c10, c12"
  commands.choices["figure"].add_argument("name", help=f"one of {names}")
  return parser


def options_of(command: Command) -> dict[str, Option]:
  """Returns the options of a command by name."""
  named = {name: OPTIONS[name] for name in command.options.replace("!", "").split()}
  return {"json": Option("print JSON", bool), **named, **command.more}


def run(args: Args) -> None:
  """Runs a command and prints its answer."""
  command = known()[args["command"]]
  for name, option in options_of(command).items():
    if name in args and "config" in args and option.field:
      raise ConfigError(f"--config gives {name}; set --config.{option.field} instead.")
    if name in args and name in arguments.IGNORED.get(args.get("method", ""), ()):
      raise ConfigError(f"--method={args['method']} ignores --{name}; leave it out.")
  if "config" in args:
    args["config"] = load_config(args["config"], args["overrides"])
  elif args["overrides"]:
    field = args["overrides"][0].partition("=")[0]
    raise ConfigError(f"{field} needs a --config before it.")
  if "params" in args:
    args["params"] = parse_count(args["params"], "--params")
  data, text = command.run(args)
  print(json.dumps(data, default=dataclasses.asdict) if "json" in args else text)


def table(args: Args) -> Answer:
  rows = getattr(tables, args["command"])()
  return rows, columns(rows) if args["command"] == "table1" else tables.show(rows)


def draw(args: Args) -> Answer:
  from diloco.simulate import figures

  if args.keys() & {"config", "step_time", "latency", *arguments.COMPUTE}:
    check("figure with --config", args["name"], ["s4"])
    check_picture(args["out"], "s4.png")
    work = workload(args)
    one = functools.partial(
      figures.of_config, args["config"], work.step_time, work.latency
    )
    paths = palette.save(one, args["out"])
    return paths, "\n".join([*paths, *assumed(args, work)[:1]])
  folder = make_folder(args["out"], "--out")
  names = [args["name"]] if "name" in args else figures.FIGURES
  paths = [path for name in names for path in figures.draw(name, folder)]
  return paths, "\n".join(paths)


def link(args: Args) -> Answer:
  """Computes the utilisation with a link, or the bandwidth that a utilisation needs."""
  work, share = workload(args), args.get("target", 0.95)
  if args["command"] == "bandwidth":
    gbits = required_bandwidth(work, share) / 1e9
  else:
    gbits = args["gbits"]
    share = float(steady_utilisation(work, [gbits * 1e9])[0])
  data = {"gbits": gbits, "utilisation": share, "step_time_s": work.step_time}
  lines = [
    f"link         {gbits:.4g} Gbit/s of each replica",
    f"utilisation  {share:.4g} of the time is compute",
  ]
  synced = "" if work.method == "data_parallel" else f", H = {work.sync_every}"
  tau = f", tau = {work.tau}" if work.method == "streaming" else ""
  lines += assumed(args, work, f"{synced}{tau}, {work.bits:.3g} bits per value")
  return data, "\n".join(lines)


def states(args: Args) -> Answer:
  """Computes how much memory parameters and optimizers need."""
  papers = {} if "config" in args else {"params": 100e9, "layers": 108}
  work = workload({"step_time": 1.0, **papers, **args})
  if work.method == "data_parallel":
    raise ConfigError(NO_ROUNDS)
  sizes = work.params_per_layer
  fragments = [sum(sizes[i] for i in layers) for layers in work.whole_plan[1]]
  rows = memory.memory(sum(sizes), max(fragments))
  return rows, f"{columns(rows)}\nfloat32; loading time in ms at these rates"


def draw_schedule(args: Args) -> Answer:
  """Draws when a config sends and merges its fragments."""
  from diloco.simulate import schedule_figure

  c, out = args["config"], args["out"]
  first, last = schedule_figure.window(c, args.get("first"), args.get("last"))
  check_picture(out, "run.png or run.svg")
  sends = schedule_figure.planned(c, first, last)
  paths = palette.save(lambda: schedule_figure.make(c, sends, first, last), out)
  return paths, str(out)


def columns(rows: list[dict[str, float | str]]) -> str:
  """Formats rows as text, with a column for each key."""
  import pandas as pd  # Slow to import.

  return pd.DataFrame(rows).to_string(index=False, float_format="{:.5g}".format)


_MODEL = "config chips peak_tflops mfu params layers step_time replicas link"
_METHOD = f"{_MODEL} method sync_every fragment_size tau bits latency"
COMMANDS = {
  "table4": Command("Streaming DiLoCo's Table 4, ours against paper", table),
  "table6": Command("Scaling Laws' Table 6, ours against paper", table),
  "table1": Command("Streaming DiLoCo's Table 1, hours at 1 Gbit/s", table),
  "figure": Command(
    "draw one figure; s4 also for a config, into one file",
    draw,
    "config chips peak_tflops mfu step_time latency out!",
  ),
  "figures": Command("draw all figures", draw, "out!"),
  "utilisation": Command("utilisation that a link reaches", link, f"{_METHOD} gbits!"),
  "bandwidth": Command("link that a utilisation needs", link, f"{_METHOD} target"),
  "memory": Command(
    "bytes of parameters and optimizers; default 100B, 108 layers",
    states,
    "config params layers fragment_size",
  ),
  "schedule": Command(
    "draw a config's sends and merges", draw_schedule, "config! first last out!"
  ),
}


def known() -> dict[str, Command]:
  """Returns the simulators: COMMANDS, and each `COMMAND` in contrib/simulate."""
  files = (shipped.PACKAGE / "contrib/simulate").glob("[!_]*.py")
  names = [p.stem for p in sorted(files)]
  load = lambda name: importlib.import_module(f"diloco.contrib.simulate.{name}")
  return COMMANDS | {name: load(name).COMMAND for name in names}


if __name__ == "__main__":
  sys.exit(main())
