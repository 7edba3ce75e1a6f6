"""Simulators from the command line.

python -m diloco.simulate table4
python -m diloco.simulate table6
python -m diloco.simulate bandwidth --params=1e9 --layers=24 --step_time=0.1
python -m diloco.simulate utilisation --params=1e9 --layers=24 --step_time=0.1 \
  --gbits=2
"""

import argparse
import json
import pathlib
import sys

from diloco.simulate import tables
from diloco.simulate.utilisation import (
  METHODS,
  Workload,
  required_bandwidth,
  utilisation,
)


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
  ):
    p = commands.add_parser(name, help=text)
    p.add_argument("--params", type=float, required=True, help="parameters")
    p.add_argument("--layers", type=int, required=True, help="transformer layers")
    p.add_argument("--step_time", type=float, required=True, help="seconds of compute")
    p.add_argument("--method", choices=METHODS, default="streaming")
    p.add_argument("--sync_every", type=int, default=100, help="H")
    p.add_argument("--fragment_size", type=int, default=3, help="layers per fragment")
    p.add_argument("--tau", type=int, default=1, help="overlapped inner steps")
    p.add_argument("--bits", type=float, default=4, help="bits per value on the link")
    p.add_argument("--latency", type=float, default=0.0, help="seconds per reduction")
    p.add_argument("--json", action="store_true")
    if name == "utilisation":
      p.add_argument("--gbits", type=float, required=True, help="Gbit/s of the link")
    else:
      p.add_argument("--target", type=float, default=0.95, help="utilisation")
  return parser


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
    drawn = [str(p) for name in names for p in figures.draw(name, args.output)]
    if not args.json:
      print("\n".join(drawn))
    return drawn
  work = Workload.of_equal_layers(
    args.params,
    args.layers,
    args.step_time,
    method=args.method,
    sync_every=args.sync_every,
    fragment_size=args.fragment_size,
    tau=args.tau if args.method == "streaming" else 0,
    bits=args.bits,
    latency=args.latency,
  )
  if args.command == "utilisation":
    reached = float(utilisation(work, [args.gbits * 1e9])[0])
    answer = {"gbits": args.gbits, "utilisation": reached}
  else:
    gbits = required_bandwidth(work, args.target) / 1e9
    answer = {"target": args.target, "gbits": gbits}
  if not args.json:
    print("\n".join(f"{k:<12} {v:.4g}" for k, v in answer.items()))
  return answer


def main(argv: list[str] | None = None) -> int:
  args = make_parser().parse_args(argv)
  try:
    answer = run(args)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  if args.json:
    print(json.dumps(answer))
  return 0


if __name__ == "__main__":
  sys.exit(main())
