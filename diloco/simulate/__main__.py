"""Simulators from the command line.

python -m diloco.simulate table4
python -m diloco.simulate table6
python -m diloco.simulate bandwidth --params=1e9 --layers=24 --step_time=0.1
python -m diloco.simulate utilisation --params=1e9 --layers=24 --step_time=0.1 \
  --gbits=2
python -m diloco.simulate frontier --params=1e9 --layers=24 --step_time=0.1 --gbits=1
python -m diloco.simulate bandwidth --config=configs/chinchilla.py:1.3B,M=2 --chips=64
python -m diloco.simulate bandwidth --config=configs/chinchilla.py:1.3B,M=2 --chips=64 \
  --config.overlap.tau=5
python -m diloco.simulate wallclock --params=1e9 --tokens=2e10 --batch_tokens=1048576 \
  --replicas=2
"""

import argparse
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

from diloco.config import ConfigError
from diloco.config.command_line import load_config, make_folder
from diloco.simulate import own, tables, wallclock
from diloco.simulate.utilisation import (
  METHODS,
  Workload,
  required_bandwidth,
  utilisation,
)

# Arguments that a config states, and the field that does.
STATED = {
  "params": "model.dim",
  "layers": "model.num_layers",
  "tokens": "train.tokens",
  "batch_tokens": "train.batch_size",
  "replicas": "replicas",
  "method": "algorithm",
  "sync_every": "sync_every",
  "fragment_size": "fragments.size",
  "tau": "overlap.tau",
  "bits": "wire.format",
  "outer_bits": "wire.format",
}
# Arguments from which the seconds of a config's step are worked out.
COMPUTE = {"chips": 1, "peak_tflops": 197, "mfu": 0.4}
# Arguments that mean nothing to a method.
MEANINGLESS = {
  "data_parallel": ("sync_every", "fragment_size", "tau"),
  "diloco": ("fragment_size", "tau"),
  "streaming": (),
}


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m diloco.simulate", description="Compute utilisation over bandwidth."
  )
  commands = parser.add_subparsers(dest="command", required=True)
  for name, text in (
    ("table4", "Streaming DiLoCo's Table 4, ours against paper"),
    ("table6", "Scaling Laws' Table 6, ours against paper"),
    ("table1", "Streaming DiLoCo's Table 1, hours at 1 Gbit/s"),
  ):
    commands.add_parser(name, help=text).add_argument("--json", action="store_true")
  one = commands.add_parser("figure", help="draw one figure, such as s4 or c10")
  one.add_argument("name")
  every = commands.add_parser("figures", help="draw all figures")
  for p in (one, every):
    p.add_argument("--output", type=pathlib.Path, default=pathlib.Path("figures"))
    p.add_argument("--json", action="store_true")
  for name, text in (
    ("utilisation", "what is reached on a link"),
    ("bandwidth", "what link is needed"),
    ("frontier", "which H, fragments, tau and bits reach a target on a link"),
  ):
    p = commands.add_parser(name, help=text)
    model = p.add_argument_group("the model: a config, or plain numbers")
    model.add_argument("--config", help="such as configs/chinchilla.py:1.3B,M=2")
    model.add_argument("--chips", type=int, help="with --config; default 1")
    model.add_argument("--peak_tflops", type=float, help="per chip; default 197")
    model.add_argument("--mfu", type=float, help="share of the peak; default 0.4")
    model.add_argument("--params", type=float, help="parameters")
    model.add_argument("--layers", type=int, help="transformer layers")
    model.add_argument("--step_time", type=float, help="seconds of compute per step")
    p.add_argument("--json", action="store_true")
    if name != "bandwidth":
      p.add_argument("--gbits", type=float, required=True, help="Gbit/s of the link")
    if name != "utilisation":
      p.add_argument("--target", type=float, default=0.95, help="utilisation")
    model.add_argument("--replicas", type=int, help="M; default 2")
    if name == "frontier":
      continue
    p.add_argument("--plot", type=pathlib.Path, help="draw the curve into this file")
    model.add_argument("--method", choices=METHODS, help="default streaming")
    model.add_argument("--sync_every", type=int, help="H; default 100")
    model.add_argument("--fragment_size", type=int, help="in layers; default 3")
    model.add_argument("--tau", type=int, help="overlapped inner steps; default 1")
    model.add_argument("--bits", type=float, help="per value on the link; default 4")
    p.add_argument("--latency", type=float, default=0.0, help="seconds per reduction")
  add_wallclock(commands)
  return parser


def add_wallclock(commands) -> None:
  p = commands.add_parser(
    "wallclock", help="idealised hours of training, A of 2503.09799"
  )
  run = p.add_argument_group("the run: a config, or plain numbers")
  run.add_argument("--config", help="such as configs/chinchilla.py:1.3B,M=2")
  run.add_argument("--params", type=float, help="N")
  run.add_argument("--tokens", type=float, help="D")
  run.add_argument("--batch_tokens", type=float, help="global batch")
  run.add_argument("--replicas", type=int, help="M")
  run.add_argument("--sync_every", type=int, help="H; default 30")
  run.add_argument("--outer_bits", type=float, help="per outer gradient; default 16")
  p.add_argument("--bits", type=float, default=16, help="bits per inner gradient")
  p.add_argument("--chips", type=float, help="R; default one for 16,384 tokens or more")
  p.add_argument("--network", choices=wallclock.NETWORKS, default="low", help="across")
  p.add_argument("--gbits", type=float, help="Gbit/s across, instead of the network's")
  p.add_argument("--latency", type=float, help="seconds, instead of the network's")
  p.add_argument("--json", action="store_true")


def training(args: argparse.Namespace) -> wallclock.Training:
  """The run that the arguments of `wallclock` describe."""
  across = wallclock.NETWORKS[args.network]
  if args.gbits is not None:
    across = dataclasses.replace(across, bandwidth=args.gbits * 1e9)
  if args.latency is not None:
    across = dataclasses.replace(across, latency=args.latency)
  rest = {"bits": args.bits, "chips": args.chips, "across": across}
  if args.config:
    return own.training(load_config(args.config, args.overrides), **rest)
  names = ("params", "tokens", "batch_tokens", "replicas")
  require(args, names)
  return wallclock.Training(**given(args, (*names, "sync_every", "outer_bits")), **rest)


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
  """Those of the arguments that are given, with their values."""
  values = {name: getattr(args, name, None) for name in names}
  return {name: value for name, value in values.items() if value is not None}


def check(args: argparse.Namespace) -> None:
  """Refuses arguments that would mean nothing beside the others.

  Raises:
    ConfigError: one is given.
  """
  config = getattr(args, "config", None)
  if args.overrides and not config:
    field = args.overrides[0].partition("=")[0]
    raise ConfigError(f"{field} needs a --config before it.")
  # The bits of wallclock are those of an inner gradient, of which a config has no word.
  stated = [n for n in STATED if (args.command, n) != ("wallclock", "bits")]
  for name in given(args, stated) if config else ():
    raise ConfigError(
      f"--{name} is given with --config, which states it; set --config.{STATED[name]}"
      " instead."
    )
  if args.command == "wallclock":
    return
  for name in given(args, COMPUTE):
    if not config or args.step_time is not None:
      raise ConfigError(
        f"--{name} is given, but the time of a step follows from it only with --config"
        " and without --step_time; leave it out."
      )
  method = getattr(args, "method", None)
  for name in given(args, MEANINGLESS[method or "streaming"]):
    raise ConfigError(
      f"--{name} is given with --method={method}, to which it means nothing; leave it"
      " out."
    )


def require(args: argparse.Namespace, names: tuple[str, ...]) -> None:
  for name in names:
    if getattr(args, name) is None:
      raise ValueError(f"--{name} is missing; give it, or a --config.")


def workload(args: argparse.Namespace) -> Workload:
  """What the arguments describe: a config of ours, or plain numbers."""
  if args.config:
    c = load_config(args.config, args.overrides)
    seconds = args.step_time
    if seconds is None:
      compute = COMPUTE | given(args, COMPUTE)
      flops = compute["peak_tflops"] * 1e12
      seconds = own.step_time(c, compute["chips"], flops, compute["mfu"])
    work = own.workload(c, seconds)
    return dataclasses.replace(work, **given(args, ("latency",)))
  require(args, ("params", "layers", "step_time"))
  settings = {"bits": 4, "tau": 0 if args.command == "frontier" else 1}
  names = ("replicas", "method", "sync_every", "fragment_size", "tau", "bits")
  settings |= given(args, (*names, "latency"))
  return Workload.of_equal_layers(args.params, args.layers, args.step_time, **settings)


def run(args: argparse.Namespace) -> dict | list:
  """The answer as plain data; prints it as text unless --json."""
  if args.command in ("table4", "table6"):
    rows = getattr(tables, args.command)()
    if not args.json:
      print(tables.show(rows))
    return [{"name": r.name, "ours": r.ours, "paper": r.paper} for r in rows]
  if args.command == "table1":
    hours = tables.table1()
    if not args.json:
      print(tables.show_table1(hours))
    return hours
  if args.command in ("figure", "figures"):
    from diloco.simulate import figures

    names = [args.name] if args.command == "figure" else list(figures.FIGURES)
    folder = make_folder(args.output, "--output")
    drawn = [str(p) for name in names for p in figures.draw(name, folder)]
    if not args.json:
      print("\n".join(drawn))
    return drawn
  if args.command == "wallclock":
    rows = wallclock.compare(training(args))
    if not args.json:
      print_table(rows)
    return rows
  if getattr(args, "plot", None):
    make_folder(args.plot.parent, "--plot")
  return answer(args, workload(args))


def answer(args: argparse.Namespace, work: Workload) -> dict:
  """Answers a question about one workload."""
  if args.command == "frontier":
    choices = own.frontier(
      sum(work.params_per_layer),
      work.layers,
      work.step_time,
      args.gbits * 1e9,
      args.target,
      work.replicas,
    )
    found = [dataclasses.asdict(choice) for choice in choices]
    if not args.json:
      print_frontier(found)
    return {"choices": found, "sources": own.SOURCES}
  if args.command == "utilisation":
    reached = float(utilisation(work, [args.gbits * 1e9])[0])
    said = {"gbits": args.gbits, "utilisation": reached}
  else:
    needed = required_bandwidth(work, args.target)
    said = {"gbits": needed / 1e9, "utilisation": args.target}
  said["step_time_s"] = work.step_time
  if not args.json:
    print("\n".join(f"{k:<12} {v:.4g}" for k, v in said.items()))
  if args.plot:
    from diloco.simulate import figures

    figures.plot_own(work, args.plot, said["gbits"])
  return said


def print_table(rows: list[dict]) -> None:
  """A line per row under the rows' names, in hours."""
  print("".join(f"{name:>22}" for name in rows[0]))
  for row in rows:
    cells = (v if isinstance(v, str) else f"{v:.4g}" for v in row.values())
    print("".join(f"{cell:>22}" for cell in cells))


def print_frontier(found: list[dict]) -> None:
  """A line per choice, then where the penalties come from."""
  columns = ("sync_every", "fragment_size", "tau", "bits")
  print("".join(f"{c:>14}" for c in columns) + f"{'utilisation':>14}{'loss, %':>10}")
  for choice in found:
    cells = "".join(f"{choice[c]:>14}" for c in columns)
    print(f"{cells}{choice['utilisation']:>14.3f}{choice['loss_per_cent']:>+10.2f}")
  if not found:
    print("no setting of the papers' ablations reaches the target on this link")
  for name, source in own.SOURCES.items():
    print(f"{name}: {source}")


def main(argv: list[str] | None = None) -> int:
  parser = make_parser()
  args, rest = parser.parse_known_args(argv)
  args.overrides = [a for a in rest if re.match(r"--(no)?config\.\w", a)]
  if len(args.overrides) < len(rest):
    parser.error(f"unrecognized arguments: {' '.join(rest)}")
  try:
    check(args)
    said = run(args)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  if args.json:
    print(json.dumps(said))
  return 0


if __name__ == "__main__":
  sys.exit(main())
