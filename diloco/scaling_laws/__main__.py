"""Scaling laws from the command line.

python -m diloco.scaling_laws tables
python -m diloco.scaling_laws tables --sizes=exact --json
"""

import argparse
import dataclasses
import json
import sys

from diloco.scaling_laws import paper, tables


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m diloco.scaling_laws",
    description="Fits of Scaling Laws for DiLoCo (arXiv 2503.09799).",
  )
  commands = parser.add_subparsers(dest="command", required=True)
  p = commands.add_parser("tables", help="every table, ours / the paper's")
  p.add_argument("--sizes", choices=paper.SIZES, help="which N; see paper.py")
  p.add_argument("--json", action="store_true")
  return parser


def main(argv: list[str] | None = None) -> int:
  """Runs one command; returns the exit status."""
  args = make_parser().parse_args(argv)
  found = tables.all_tables(args.sizes)
  if args.json:
    print(json.dumps([dataclasses.asdict(t) for t in found], indent=2))
  else:
    print("ours [90% bootstrap interval] / paper\n")
    print("\n\n".join(tables.show(t) for t in found))
  return 0


if __name__ == "__main__":
  sys.exit(main())
