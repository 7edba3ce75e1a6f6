"""Fits scaling laws from the command line.

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
from typing import Any

from diloco.config.command_line import guarded, make_folder, parse_options
from diloco.scaling_laws import paper, results, runs
from diloco.scaling_laws import tables as tables_lib
from diloco.scaling_laws.fits import leave_largest_out
from diloco.scaling_laws.uncertainty import LEAST_SPARE, show


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m diloco.scaling_laws",
    description="Repeats the fits of Scaling Laws for DiLoCo (arXiv 2503.09799).",
  )
  commands = parser.add_subparsers(required=True)
  p = commands.add_parser("tables", help="the paper's tables: ours / theirs")
  p.set_defaults(command=tables)
  p.add_argument("--sizes", choices=list(paper.SIZES), help="which N; see paper.py")
  _add_bootstrap(p)
  p = commands.add_parser("figures", help="draw figures 2b and 13")
  p.set_defaults(command=figures)
  p.add_argument("--output", type=pathlib.Path, default=pathlib.Path("figures"))
  p = commands.add_parser("fit", help="fit laws to your own runs")
  p.set_defaults(command=fit)
  p.add_argument("csv", help="your runs; docs/scaling_laws.md lists the columns")
  p.add_argument("--where", default="", help="rows to take, such as seed=0,dim=64")
  p.add_argument("--any", action="store_true", help="fit despite problems of the grid")
  _add_bootstrap(p)
  for p in commands.choices.values():
    p.add_argument("--json", action="store_true", help="print JSON")
  return parser


def tables(args: argparse.Namespace) -> tuple[list[dict], str]:
  """Computes the paper's tables; returns them as plain data and as text."""
  found = tables_lib.all_tables(args.sizes, args.bootstrap)
  head = f"ours [90% interval, {_method(args.bootstrap)}] / paper\n"
  text = "\n\n".join(tables_lib.show(t) for t in found)
  return [dataclasses.asdict(t) for t in found], f"{head}\n{text}"


def figures(args: argparse.Namespace) -> tuple[list[str], str]:
  """Draws the paper's figures; returns their paths, as a list and as text."""
  from diloco.scaling_laws import figures  # Matplotlib is slow to import.

  paths = [str(path) for path in figures.draw(make_folder(args.output, "--output"))]
  return paths, "\n".join(paths)


def fit(args: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], str]:
  """Fits the laws of a CSV file; returns them as plain data and as text.

  Returns:
    data: {law: {quantity: {parameter: {value, interval}}}}, and for each law with
      enough sizes {law: {'left_out': {quantity: {M: residual}}}}: residuals at the
      largest N of a law that is fitted to the smaller N (Section 6.3).
    text: the same as lines, and the problems of the runs.

  Raises:
    ValueError: the runs cannot be fitted.
  """
  table = runs.read(args.csv, parse_options(args.where, place="--where"))
  laws, problems = results.fit_runs(table, strict=not args.any)
  found: dict[str, dict[str, Any]] = {}
  parameters = [f"value [90% interval, {_method(args.bootstrap)}]; batch in tokens"]
  missed = ["|log y - log y~| at the largest N of laws fitted to the others, by M"]
  for name, law in laws.items():
    found[name], left_out = {}, {}
    for quantity in ("loss", "learning_rate", "batch"):
      label, one = f"{name:<18}{quantity:<15}", getattr(law, quantity)
      if one is None:
        found[name][quantity] = None
        parameters.append(f"{label}-")
        continue
      if args.bootstrap > 0 and 0 < one.spare < LEAST_SPARE:
        problems.append(
          f"the {quantity} of {name} has too few points to resample: its intervals are"
          " Student's t."
        )
      found[name][quantity] = {
        k: {"value": getattr(one.law, k), "interval": interval}
        for k, interval in one.interval(samples=args.bootstrap).items()
      }
      shown = [f"{k} {show(**p)}" for k, p in found[name][quantity].items()]
      parameters.append(label + "  ".join(shown))
      if residuals := leave_largest_out(one):
        left_out[quantity] = residuals
        missed.append(label + "  ".join(f"{m}: {r:.4f}" for m, r in residuals.items()))
    found[name]["left_out"] = left_out
  return found, "\n".join([*parameters, *missed, *(f"note: {p}" for p in problems)])


def run(args: argparse.Namespace) -> None:
  """Prints the result of one command."""
  data, text = args.command(args)
  print(json.dumps(data, indent=2, allow_nan=False) if args.json else text)


def _method(samples: int) -> str:
  return f"bootstrap-t of {samples} resamples" if samples > 0 else "Student's t"


def _add_bootstrap(parser: argparse.ArgumentParser) -> None:
  text = "resamples for bootstrap-t intervals; 0: Student's t"
  parser.add_argument("--bootstrap", type=int, default=0, help=text)


def main(argv: list[str] | None = None) -> int:
  """Runs one command; returns the exit status."""
  return guarded(run, make_parser().parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
