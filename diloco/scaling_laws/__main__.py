"""Scaling laws from the command line.

python -m diloco.scaling_laws tables
python -m diloco.scaling_laws tables --sizes=nominal --json
python -m diloco.scaling_laws figures --output=figures
python -m diloco.scaling_laws fit my_runs.csv --where=sync_every=30
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import numpy as np

from diloco.config.command_line import make_folder, parse_options
from diloco.scaling_laws import cells, fits, paper, results, tables
from diloco.scaling_laws.uncertainty import LEAST_SPARE, Interval

_BOOTSTRAP = "resamples for bootstrap-t intervals; 0: Student's t"


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m diloco.scaling_laws",
    description="Fits of Scaling Laws for DiLoCo (arXiv 2503.09799).",
  )
  commands = parser.add_subparsers(dest="command", required=True)
  p = commands.add_parser("tables", help="every table, ours / the paper's")
  p.add_argument("--sizes", choices=list(paper.SIZES), help="which N; see paper.py")
  p.add_argument("--bootstrap", type=int, default=0, help=_BOOTSTRAP)
  p.add_argument("--json", action="store_true")
  p = commands.add_parser("figures", help="figures 2 and 13")
  p.add_argument("--output", type=pathlib.Path, default=pathlib.Path("figures"))
  p.add_argument("--json", action="store_true")
  p = commands.add_parser("fit", help="laws of your own runs")
  p.add_argument("csv", help="see cells.read_csv for its columns")
  p.add_argument("--where", default="", help="rows to take, such as seed=0,dim=64")
  p.add_argument("--any", action="store_true", help="fit despite edges and gaps")
  p.add_argument("--bootstrap", type=int, default=0, help=_BOOTSTRAP)
  p.add_argument("--json", action="store_true")
  return parser


def fit(args: argparse.Namespace) -> dict:
  """Laws of a CSV: {name: {quantity: {parameter: value and interval}}}.

  Of each law with enough sizes also {'left_out': {quantity: {M: residual}}}, what it
  misses at the largest N when fitted to the others (Section 6.3).

  Raises:
    ValueError: the runs cannot be fitted.
  """
  runs = cells.read_csv(args.csv, parse_options(args.where, place="--where"))
  laws, problems = results.fit_runs(runs, strict=not args.any)
  found: dict[str, dict[str, dict | None]] = {}
  left_out: dict[str, dict[str, dict[int, float]]] = {}
  for name, law in laws.items():
    found[name], left_out[name] = {}, {}
    for quantity in ("loss", "learning_rate", "batch"):
      one = getattr(law, quantity)
      samples = args.bootstrap
      if one and samples > 0 and 0 < one.spare < LEAST_SPARE:
        problems.append(
          f"the {quantity} of {name} has too few points to resample: its intervals are"
          " Student's t."
        )
        samples = 0
      found[name][quantity] = one and {
        k: {"value": getattr(one.law, k), "interval": interval}
        for k, interval in one.interval(samples=samples).items()
      }
      if one and (residuals := _left_out(one)):
        left_out[name][quantity] = residuals
  if not args.json:
    print(f"value [90% interval, {_method(args.bootstrap)}]; batch in tokens")
    for name, quantities in found.items():
      for quantity, parameters in quantities.items():
        text = "  ".join(f"{k} {show(**p)}" for k, p in (parameters or {}).items())
        print(f"{name:<18}{quantity:<15}{text or '-'}")
    print("|log y - log y~| at the largest N of laws fitted to the others, by M")
    for name, missed in left_out.items():
      for quantity, residuals in missed.items():
        text = "  ".join(f"{m}: {r:.4f}" for m, r in residuals.items())
        print(f"{name:<18}{quantity:<15}{text}")
    print("\n".join(f"note: {p}" for p in problems), end="\n" if problems else "")
  return {name: found[name] | {"left_out": left_out[name]} for name in found}


def _left_out(fit: fits.Fit) -> dict[int, float]:
  """Residuals by M at the largest N, empty where too few points are left."""
  params, values = np.exp(fit.design[:, 1]), np.exp(fit.log_values)
  joint = fit.design.shape[1] == 3
  replicas = np.exp(fit.design[:, 2]).round() if joint else None
  try:
    return fits.leave_largest_out(params, values, replicas)
  except ValueError:
    return {}


def show(value: float, interval: Interval) -> str:
  span = f"{interval[0]:.5g}, {interval[1]:.5g}" if interval else "-"
  return f"{value:.5g} [{span}]"


def _method(samples: int) -> str:
  return f"bootstrap-t of {samples} resamples" if samples > 0 else "Student's t"


def main(argv: list[str] | None = None) -> int:
  """Runs one command; returns the exit status."""
  args = make_parser().parse_args(argv)
  try:
    if args.command == "fit":
      answer: dict | list = fit(args)
    elif args.command == "figures":
      from diloco.scaling_laws import figures  # Matplotlib is slow to import.

      answer = [
        str(path) for path in figures.draw(make_folder(args.output, "--output"))
      ]
      if not args.json:
        print("\n".join(answer))
    else:
      found = tables.all_tables(args.sizes, args.bootstrap)
      answer = [dataclasses.asdict(t) for t in found]
      if not args.json:
        print(f"ours [90% interval, {_method(args.bootstrap)}] / paper\n")
        print("\n\n".join(tables.show(t) for t in found))
    if args.json:
      print(json.dumps(answer, indent=2, allow_nan=False))
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
