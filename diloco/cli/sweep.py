r"""Runs a sweep, shows its progress, exports its results or imports other results.

python -m diloco sweep --sweep=configs/ladder.py --results=/tmp/ladder --parallel=2
python -m diloco sweep --sweep=configs/ladder.py --show
python -m diloco sweep --sweep=ladder:size=35M --dry_run
python -m diloco sweep --results=/tmp/ladder --export=ladder.csv
python -m diloco sweep --results=/tmp/ladder --fit
python -m diloco sweep --results=/tmp/ladder2 --import=ladder.csv
python -m diloco sweep --sweep=... --results=/shared/sweep --backend=slurm \
  --parallel=64 --slurm_options='--nodes=2 --ntasks-per-node=8 --gpus-per-node=8'
python -m diloco sweep --sweep=... --results=/tmp/sweep --workdir=gs://BUCKET/sweep \
  --parallel=2 --launch='ssh host{worker} "env/bin/python -m diloco.main {flags}"'

Runs are processes on this machine or Slurm jobs (--backend=slurm), or the command of
--launch trains them on other machines. --config.FIELD=VALUE changes a field of every
run, as for diloco.main.
"""

import argparse
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence

import pandas as pd

from diloco.config import resolve
from diloco.config.comparable import basis, incomparable
from diloco.errors import ConfigError
from diloco.mesh import hardware
from diloco.reproduce import comparison
from diloco.scaling_laws import __main__ as scaling_laws
from diloco.simulate.from_config import MFU, PEAK_TFLOPS
from diloco.spec.shapes import flops_per_token
from diloco.sweep import csv_file, progress, table
from diloco.sweep.chart import Chart
from diloco.sweep.grid import Sweep
from diloco.sweep.load import load_sweep, shared_programs
from diloco.sweep.local import Local
from diloco.sweep.runner import Backend, Driver, drive
from diloco.sweep.slurm import Slurm
from diloco.together import groups
from diloco.util import command, files
from diloco.util.command import as_place, in_range
from diloco.util.storage import open_storage


def make_backend(
  args: argparse.Namespace, sweep: Sweep, results: pathlib.Path
) -> Backend:
  """Makes the backend that the flags name."""
  environment = shared_programs(results) | dict(sweep.environment)
  if args.backend == "local":
    workdir = str(args.workdir or "").rstrip("/")
    return Local(args.cores, environment, args.launch, workdir)
  options = command.shell_words(args.slurm_options, "--slurm_options")
  return Slurm(results, environment, options)


def check_backend(args: argparse.Namespace) -> None:
  """Checks that the flags fit together and that the command of the runs exists.

  Raises:
    ConfigError: the flags do not fit together, or there is no such command.
  """
  slurm, launch = args.backend == "slurm", args.launch
  here = f"--backend is {args.backend}"
  wrong = [  # (the flag, whether it cannot be used, why, the remedy)
    ("slurm_options", not slurm, here, "add --backend=slurm"),
    ("cores", slurm, here, "give --cpus-per-task in --slurm_options"),
    ("launch", slurm, here, "leave one of them out"),
    ("launch", "{flags}" not in launch, "it lacks {flags}", "write it in the command"),
    ("workdir", not launch, "there is no --launch", "add it"),
  ]
  for flag, unfit, reason, remedy in wrong:
    if unfit and (value := getattr(args, flag)):
      raise ConfigError(f"--{flag} is {value!r}, but {reason}; {remedy}.")
  many = re.search(r"(-[Nn]|--(nodes|ntasks\S*?))[ =]?([2-9]|1\d)", args.slurm_options)
  if args.vectorize > 1 and (launch or many):
    reason = "of the tasks of --slurm_options one would train"
    if launch:
      reason = "--launch trains one run"
    raise ConfigError(
      f"--vectorize is {args.vectorize}, but {reason}; leave one of them out."
    )
  words = command.shell_words(launch, "--launch")
  program = next(iter(words), "sbatch" if slurm else sys.executable)
  if not shutil.which(program):
    raise ConfigError(f"there is no command {program} here, which the runs need.")
  if workdir := str(args.workdir or ""):
    if not files.is_address(workdir):
      raise ConfigError(
        f"--workdir is {workdir!r}, no address such as s3://BUCKET/SWEEP; without"
        " --workdir, runs lie in --results."
      )
    open_storage(workdir, "--workdir", writes=False)


def run(args: argparse.Namespace, fields: Sequence[str]) -> int:
  """Runs the action that the flags choose; returns the exit status.

  Args:
    fields: flags --config.FIELD=VALUE.
  """
  as_they_are = (args.export or args.fit) and not args.sweep
  if fields and (args.imported or as_they_are):
    raise ConfigError(
      f"{fields[0]} changes the runs of --sweep, but this command takes runs as they"
      " are; leave it out."
    )
  if args.results is None and not (args.show or args.dry_run):
    raise ConfigError("--results is missing; give the folder that holds all runs.")
  if args.export:
    sweep = load_sweep(args.sweep, fields) if args.sweep else None
    export_runs(args.results, args.export, sweep)
  elif args.fit:
    sweep = load_sweep(args.sweep, fields) if args.sweep else None
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "runs.csv"
      export_runs(args.results, path, sweep)
      return scaling_laws.main(["fit", str(path)])
  elif args.imported:
    import_runs(args.results, args.imported)
  elif args.show:
    show(Driver(load_sweep(args.sweep, fields), args.results, Local(0, {})))
  elif args.dry_run:
    driver = Driver(load_sweep(args.sweep, fields), args.results, Local(0, {}))
    count(driver, args)
  else:
    return drive_sweep(args, load_sweep(args.sweep, fields))
  return 0


def export_runs(results: pathlib.Path, path: pathlib.Path, sweep: Sweep | None) -> None:
  """Writes the CSV file of --export: all runs, or those that the sweep asks for."""
  if not (results / "runs").is_dir():
    raise ConfigError(f"--results={results} holds no runs; run a sweep first.")
  command.make_parent(path, "--export", "a file name.csv")
  if sweep:
    driver = Driver(sweep, results, Local(0, {}))
    rows = driver.asked(driver.cells())
  else:
    rows = [*table.read_rows(results).values()]
  count = csv_file.export(rows, path)
  print(f"{count} runs written to {path}")


def import_runs(folder: pathlib.Path, path: pathlib.Path) -> None:
  """Imports the runs of the CSV file of --import."""
  if not path.exists() or path.is_dir():
    raise ConfigError(
      f"--import is {str(path)!r}, but there is no such file; give a file written by"
      " --export."
    )
  results = command.make_folder(folder, "--results")
  with table.alone(results):
    count = csv_file.load(path, results)
  print(f"{count} runs of {path} taken over into {results}")


def drive_sweep(args: argparse.Namespace, sweep: Sweep) -> int:
  """Runs a sweep, and draws its chart; returns the exit status of `drive`."""
  check_backend(args)
  results, vectorize = command.make_folder(args.results, "--results"), args.vectorize
  with table.alone(results):
    backend = make_backend(args, sweep, results)
    if args.retry_failed:
      table.retry_failed(results)
    driver = Driver(sweep, results, backend, args.parallel, vectorize)
    if vectorize > 1:
      plans = driver.todo(driver.cells()).values()
      for reason in {groups.obstacle(plan.config) for plan in plans} - {""}:
        text = f"--vectorize is {vectorize}, but runs in which {reason} train"
        print(f"{text} one by one.", file=sys.stderr)
    status = drive(driver, progress.Live())
    if sweep.chart:
      picture = results / f"{sweep.grids[0].name}.png"
      frame = show_chart(sweep.chart, driver)
      if not frame.empty:
        comparison.draw(sweep.chart, frame, picture)
        print(f"\n{comparison.SPREAD}\nfigure       {picture}")
  return status


def show_chart(chart: Chart, driver: Driver) -> pd.DataFrame:
  """Prints and returns the table of a sweep; warns if losses are not comparable."""
  cells = driver.best_rows()
  frame = comparison.frame(chart, cells)
  texts = [basis(row["config"], row["contents"]) for _, row in cells if row]
  print("\n".join([*comparison.lines(chart, frame), *incomparable(texts)]))
  return frame


def show(driver: Driver) -> None:
  """Prints cells, running runs, the runs that come next, and failures."""
  cells = driver.cells()
  todo = driver.todo(cells)
  started = [n for n, row in driver.rows.items() if row["status"] == "running"]
  waiting = {n: plan.point for n, plan in todo.items() if n not in started}
  refused = [{"status": "failed", "error": plan.error} for plan in driver.refused()]
  rows = [*driver.asked(cells), *refused]
  print("\n".join(progress.lines(cells, rows, waiting)))
  if driver.sweep.chart:
    print()
    show_chart(driver.sweep.chart, driver)


def count(driver: Driver, args: argparse.Namespace) -> None:
  """Prints, per model size, the least number of runs to come, their FLOPs and hours.

  FLOPs are 6 N for each token, as the papers count.

  Raises:
    ConfigError: a point has no valid config.
  """
  total: dict[str, tuple[int, float]] = {}
  for plan in driver.least():
    if plan.error:
      raise ConfigError(plan.error)
    c = resolve(driver.sweep.config(dict(plan.point)))
    flops = flops_per_token(c.model, attention=False) * c.train.tokens
    for name in (str(plan.point.get("size", "all")), "total"):
      before = total.get(name, (0, 0.0))
      total[name] = before[0] + 1, before[1] + flops
  slurm = args.backend == "slurm"
  unit, chip, peak = "chip-hours", "a TPU v5e", PEAK_TFLOPS * 1e12
  if slurm:
    unit, chip, peak = "GPU-hours", "an H100", hardware.CHIPS["NVIDIA H100"][0]
  print(f"{'size':<8} {'jobs' if slurm else 'runs':>5} {'FLOPs':>9} {unit:>11}")
  total["total"] = total.pop("total", (0, 0.0))  # Moves it to the last line.
  for name, (runs, flops) in total.items():
    hours = flops / (MFU * peak * 3600)
    print(f"{name:<8} {runs:>5} {flops:>9.2g} {hours:>11,.3g}")
  print(
    "These are the fewest runs: each search begins at its best point. Hours of"
    f" {chip} at {MFU:.0%} of its peak, without evaluation and compilation."
  )


def main(argv: Sequence[str] | None = None) -> int:
  parser = command.Parser(prog="python -m diloco sweep", description=__doc__)
  add, path = parser.add_argument, command.as_path
  text = "a sweep file, or ladder, or ablations:NAME (docs/ablations.md)"
  add("--sweep", default="", help=text)
  add("--results", type=path, help="the folder that holds all runs")
  text = "processes at once, at most; default 1"
  add("--parallel", type=in_range(1), default=1, help=text)
  text = (
    "runs that a process trains together, at most, if they differ only in"
    f" {groups.FIELDS}; default 1"
  )
  add("--vectorize", type=in_range(1), default=1, help=text)
  text = "CPU cores per run, with --backend=local; default 0: all"
  add("--cores", type=in_range(0), default=0, help=text)
  text = "where runs are executed; default local"
  add("--backend", choices=("local", "slurm"), default="local", help=text)
  text = "flags of sbatch, such as '--nodes=2 --ntasks-per-node=8'"
  add("--slurm_options", default="", help=text)
  text = (
    "a command that trains one run and ends with it; {flags} are the flags of"
    " diloco.main, {worker} is a number below --parallel"
  )
  add("--launch", default="", help=text)
  text = "where --launch trains, if in a bucket: s3://BUCKET/SWEEP"
  add("--workdir", type=as_place, help=text)
  only = parser.add_mutually_exclusive_group()
  text = "fit scaling laws to all runs, or to those of --sweep, and end"
  only.add_argument("--fit", action="store_true", help=text)
  text = "write a CSV file of all runs, or of those of --sweep, and end"
  only.add_argument("--export", type=path, help=text)
  text = "import an exported CSV file and end"
  only.add_argument("--import", dest="imported", type=path, help=text)
  text = "show the sweep's progress and end"
  only.add_argument("--show", action="store_true", help=text)
  text = "count the runs to come, their FLOPs and chip-hours, and end"
  only.add_argument("--dry_run", action="store_true", help=text)
  text = "run failed runs once more"
  only.add_argument("--retry_failed", action="store_true", help=text)
  args, fields = parser.parse_known_args(argv)
  if wrong := [word for word in fields if not word.startswith("--config.")]:
    parser.error(f"unrecognized arguments: {' '.join(wrong)}")
  return command.guarded(run, args, fields)


if __name__ == "__main__":
  sys.exit(main())
