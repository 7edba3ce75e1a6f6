"""Runs the small ablations and the ladder; writes each claim beside our result.

  python -m diloco reproduce --out=/tmp/reproduced --seeds=3 --jobs=2
  python -m diloco reproduce --out=/tmp/reproduced --seeds=3 --report
  python -m diloco reproduce --computed

The runs are those of configs/ablations.py, accuracies.py and ladder.py. Finished runs
are not run again; Ctrl-C lets the others save and end. At the end, and with --report at
any time, the command writes all verdicts, tables and figures to OUT/reproduced.md, and
the verdicts alone to OUT/claims.csv. Give the same --seeds, --only, --text and --items
each time. --computed prints the claims that need no training.
"""

import argparse
import collections
import pathlib
import sys
from collections.abc import Mapping, Sequence

from diloco.errors import ConfigError
from diloco.reproduce import claim, comparison, computed
from diloco.reproduce.claim import CLAIMS, LADDER
from diloco.sweep import progress, table
from diloco.sweep.grid import Point, Sweep
from diloco.sweep.load import load_sweep, shared_programs
from diloco.sweep.local import Local
from diloco.sweep.runner import Driver, drive
from diloco.sweep.search import Search
from diloco.sweep.table import Row
from diloco.util import files
from diloco.util.command import (
  Parser,
  as_path,
  guarded,
  in_range,
  load_module,
  make_folder,
)

PAGE, CLAIMS_TABLE = "reproduced.md", "claims.csv"
SCORED = "accuracies"  # The config file of the runs that score the task of --items.
# The most runs that a process trains together, if only seeds or rates differ.
TOGETHER = 6


def sweeps(args: argparse.Namespace) -> dict[str, Sweep]:
  """Returns the sweeps of the ablations and the ladder by name.

  Raises:
    ConfigError: --only names an unknown ablation.
  """
  options = f"seeds={args.seeds}" + (f",text={args.text}" if args.text else "")
  items = f",items={args.items}" if args.items else ""
  known = {
    name: f"{file}:{name},{options}{items * (file == SCORED)}"
    for file in ("ablations", SCORED)
    for name in load_module(file, "get_sweep", f"configs/{file}.py").ABLATIONS
  } | {LADDER: f"ladder:{options}"}
  names = [name.strip() for name in args.only.split(",") if name.strip()]
  for name in names:
    if name not in known:
      raise ConfigError(f"--only has {name!r}; write some of {', '.join(known)}.")
  return {name: load_sweep(known[name]) for name in names or known}


def make_driver(found: Mapping[str, Sweep], args: argparse.Namespace) -> Driver:
  """Makes one driver for all sweeps, so that a run of several sweeps trains once."""
  configs = {_file(s.grids[0].cells[0]): s.config for s in found.values()}
  together = Sweep(
    config=lambda point: configs[_file(point)](point),
    grids=[grid for sweep in found.values() for grid in sweep.grids],
    environment=next(iter(found.values())).environment,  # Equal in all sweeps.
  )
  backend = Local(1, shared_programs(args.out) | dict(together.environment))
  return Driver(together, args.out, backend, args.jobs, TOGETHER)


def _file(point: Point) -> str:
  """Returns the config file of a point."""
  if "scored" in point:
    return SCORED
  return "ablations" if point.get("size") == "small" else LADDER


def ablation(cell: Search) -> str:
  """Returns the ablation's name for a cell; its grids are NAME and "NAME seeds"."""
  of_ladder = _file(cell.cell) == LADDER
  return LADDER if of_ladder else cell.grid.name.partition(" ")[0]


def report(
  found: Mapping[str, Sweep], driver: Driver, args: argparse.Namespace
) -> pathlib.Path:
  """Writes the page and its figures; returns the path of the page."""
  best = driver.best_rows()
  pairs = {name: [pair for pair in best if ablation(pair[0]) == name] for name in found}
  cells = {name: [cell for cell, _ in some] for name, some in pairs.items()}
  charts = {name: sweep.chart for name, sweep in found.items() if sweep.chart}
  tables = {k: comparison.frame(chart, pairs[k]) for k, chart in charts.items()}
  make_folder(args.out / "figures", "--out")
  rows = driver.asked([cell for cell, _ in best])
  seconds = _core_seconds(rows)
  waiting = sum(not cell.ended for cell, _ in best)
  left = f" {waiting} of {len(best)} settings have no result yet." if waiting else ""

  def hours(some: Sequence[Search]) -> float:
    return sum(seconds.get(row["name"], 0.0) for row in driver.asked([*some])) / 3600

  claims = computed.rows() + claim.rows(CLAIMS, tables, cells, hours)
  files.write(args.out / CLAIMS_TABLE, claim.table(claims).to_csv(index=False))
  given = {k: getattr(args, k) for k in ("seeds", "only", "text", "items")}
  flags = " ".join(f"--{name}={value}" for name, value in given.items() if value)
  done = [row for row in rows if row["status"] == "done"]
  failed = sum(row["status"] == "failed" for row in rows)
  revisions = ", ".join(sorted({str(row["revision"]) for row in done})) or "none"
  page = [
    "# Claims of both papers",
    f"`python -m diloco reproduce --out=OUT {flags} --report`; docs/claims.md says how"
    " a verdict is found.",
    "\n".join(claim.counts(claims)),
    "\n".join(claim.lines(claims)),
    f"{len(done)} runs, {failed} failed, {sum(seconds.values()) / 3600:.1f} hours of"
    f" one core; revisions {revisions}.{left}",
  ]
  for name, chart in charts.items():
    some = tables[name]
    picture = args.out / "figures" / f"reproduced_{name}.png"
    page += [f"## {chart.title}", "\n".join(comparison.lines(chart, some))]
    if not some.empty:
      comparison.draw(chart, some, picture)
      page.append(f"![{chart.title}](figures/{picture.name})")
  files.write(args.out / PAGE, "\n\n".join([*page, ""]))
  return args.out / PAGE


def _core_seconds(rows: Sequence[Row]) -> dict[str, float]:
  """Returns {run: seconds}; finished runs of one process share its time equally."""
  groups = collections.defaultdict[str, list[Row]](list)
  for row in rows:
    if row["status"] == "done":
      groups[row["group"] or row["name"]].append(row)
  return {
    row["name"]: max(one["wall_s"] or 0.0 for one in group) / len(group)
    for group in groups.values()
    for row in group
  }


def run(args: argparse.Namespace) -> int:
  """Trains the missing runs, and writes the page; returns the exit status."""
  if args.computed:
    print("\n".join(claim.lines(computed.rows())))
    return 0
  if args.out is None:
    raise ConfigError("--out is missing; give the folder of runs, page and figures.")
  by_name = sweeps(args)
  driver = make_driver(by_name, args)
  driver.cells()  # Reads the configs of all runs that are asked for.
  if refused := driver.refused():
    raise ConfigError(refused[0].error)
  make_folder(args.out, "--out")
  status = 0
  if not args.report:
    with table.alone(args.out):
      if args.retry_failed:
        table.retry_failed(args.out)
        driver = make_driver(by_name, args)
      status = drive(driver, progress.Live())
  print(f"page         {report(by_name, driver, args)}")
  return status or int(any(cell.state == "failed" for cell in driver.cells()))


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco reproduce", description=__doc__)
  add = parser.add_argument
  add("--out", type=as_path, help="folder of runs, page, figures")
  only = "names of configs/ablations.py and accuracies.py, and ladder; default: all"
  add("--only", default="", help=only)
  add("--seeds", type=in_range(1), default=3, help="seeds of every setting; default 3")
  add("--jobs", type=in_range(1), default=2, help="processes, one core each; default 2")
  add("--text", default="", help="data.source of the runs; default: sotu")
  add("--items", default="", help="task that configs/accuracies.py scores, a path")
  add("--report", action="store_true", help="only write the page")
  add("--computed", action="store_true", help="only print the claims without training")
  add("--retry_failed", action="store_true", help="run failed runs once more")
  return guarded(run, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
