r"""Runs a sweep, shows its progress, exports its results or imports other results.

python -m diloco sweep --sweep=configs/ladder.py --results=/tmp/ladder --parallel=2
python -m diloco sweep --sweep=configs/ladder.py --results=/tmp/ladder --show
python -m diloco sweep --results=/tmp/ladder --export=ladder.csv
python -m diloco sweep --results=/tmp/ladder2 --import=ladder.csv
python -m diloco sweep --sweep=... --results=/shared/sweep --backend=slurm \
  --parallel=64 --slurm_options=slurm_partition=gpu,gpus_per_node=8,timeout_min=600

Runs are processes on this machine (--backend=local), Slurm jobs (slurm) or processes of
submitit's local executor (submitit).
"""

import pathlib
import sys

from absl import flags

from diloco.config import command_line
from diloco.errors import ConfigError
from diloco.reproduce import comparison
from diloco.sweep import csv_file, progress, table
from diloco.sweep.grid import Sweep
from diloco.sweep.load import load_sweep, shared_programs
from diloco.sweep.local import Local
from diloco.sweep.runner import Backend, Driver, drive
from diloco.sweep.slurm import Slurm
from diloco.together import groups
from diloco.util import command

_SWEEP = flags.DEFINE_string(
  "sweep", "", "A sweep file, or ladder, or ablations:NAME (docs/ablations.md)."
)
_RESULTS = flags.DEFINE_string("results", None, "The directory that holds all runs.")
_PARALLEL = flags.DEFINE_integer(
  "parallel", 1, "Processes at once, at most.", lower_bound=1
)
_VECTORIZE = flags.DEFINE_integer(
  "vectorize",
  1,
  f"Runs that a process trains together, at most, if they differ in {groups.FIELDS}"
  " only.",
  lower_bound=1,
)
_CORES = flags.DEFINE_integer(
  "cores", 0, "CPU cores per run, with --backend=local; 0: all.", lower_bound=0
)
_BACKEND = flags.DEFINE_enum(
  "backend", "local", ["local", "slurm", "submitit"], "Where runs are executed."
)
_OPTIONS = flags.DEFINE_string("slurm_options", "", "For submitit: name=value,...")
_EXPORT = flags.DEFINE_string(
  "export", "", "Write a CSV file of all runs, or of those of --sweep, and end."
)
_IMPORT = flags.DEFINE_string("import", "", "Import an exported CSV file and end.")
_SHOW = flags.DEFINE_bool("show", False, "Show the sweep's progress and end.")
_RETRY = flags.DEFINE_bool("retry_failed", False, "Run failed runs once more.")


def make_backend(sweep: Sweep, results: pathlib.Path) -> Backend:
  """Makes the backend that the flags name."""
  environment = shared_programs(results) | dict(sweep.environment)
  if _BACKEND.value == "local":
    return Local(_CORES.value, environment)
  given = command.parse_options(_OPTIONS.value, place="--slurm_options")
  options = {k: int(v) if v.isdigit() else v for k, v in given.items()}
  cluster = "slurm" if _BACKEND.value == "slurm" else "local"
  return Slurm(results, environment, options, cluster)


def run() -> int:
  """Does what the flags ask for; returns the exit status."""
  if not _RESULTS.value:
    raise ConfigError("--results is empty; give a folder for all runs.")
  results = pathlib.Path(_RESULTS.value)
  asked = [flag.name for flag in (_EXPORT, _IMPORT, _SHOW, _RETRY) if flag.value]
  if len(asked) > 1:
    raise ConfigError(f"--{' and --'.join(asked)} are given; give one at a time.")
  if _EXPORT.value:
    export_runs(results, pathlib.Path(_EXPORT.value), _SWEEP.value)
  elif _IMPORT.value:
    import_runs(results, pathlib.Path(_IMPORT.value))
  elif _SHOW.value:
    show(Driver(load_sweep(_SWEEP.value), results, Local(0, {})))
  else:
    return drive_sweep(load_sweep(_SWEEP.value), results)
  return 0


def export_runs(results: pathlib.Path, path: pathlib.Path, sweep: str) -> None:
  """Writes the CSV file of --export: all runs, or those that --sweep asks for."""
  if not (results / "runs").is_dir():
    raise ConfigError(f"--results={results} holds no runs; run a sweep first.")
  command.make_parent(path, "--export", "a file name.csv")
  if sweep:
    driver = Driver(load_sweep(sweep), results, Local(0, {}))
    rows = driver.asked(driver.cells())
  else:
    rows = [*table.read_rows(results).values()]
  count = csv_file.export(rows, path)
  print(f"{count} runs written to {path}")


def import_runs(results: pathlib.Path, path: pathlib.Path) -> None:
  """Reads the CSV file of --import."""
  if not path.exists() or path.is_dir():
    raise ConfigError(
      f"--import is {str(path)!r}, but there is no such file; give a file written by"
      " --export."
    )
  command.make_folder(results, "--results")
  with table.alone(results):
    count = csv_file.load(path, results)
  print(f"{count} runs of {path} taken over into {results}")


def drive_sweep(sweep: Sweep, results: pathlib.Path) -> int:
  """Runs a sweep; returns 1 if a cell has failed, or 128 + the signal that ended it."""
  if _OPTIONS.value and _BACKEND.value == "local":
    raise ConfigError(
      f"--slurm_options is {_OPTIONS.value!r}, but --backend is local; add"
      " --backend=slurm, or leave the options out."
    )
  if _CORES.value and _BACKEND.value != "local":
    raise ConfigError(
      f"--cores is {_CORES.value}, but --backend is {_BACKEND.value}; give"
      " cpus_per_task in --slurm_options."
    )
  command.make_folder(results, "--results")
  with table.alone(results):
    backend = make_backend(sweep, results)
    if _RETRY.value:
      table.retry_failed(results)
    driver = Driver(sweep, results, backend, _PARALLEL.value, _VECTORIZE.value)
    if _VECTORIZE.value > 1:
      plans = driver.todo(driver.cells()).values()
      for reason in {groups.obstacle(plan.config) for plan in plans} - {""}:
        text = f"--vectorize is {_VECTORIZE.value}, but runs in which {reason} train"
        print(f"{text} one by one.", file=sys.stderr)
    number = drive(driver, progress.Live(driver.runs))
    if sweep.chart:
      picture = results / f"{sweep.grids[0].name}.png"
      found = comparison.frame(sweep.chart, driver.best_rows())
      print("\n".join(comparison.lines(sweep.chart, found)))
      if not found.empty:
        comparison.draw(sweep.chart, found, picture)
        print(f"\nfigure       {picture}")
  if number:
    return 128 + number
  return int(any(cell.state == "failed" for cell in driver.cells()))


def show(driver: Driver) -> None:
  """Prints cells, running runs, the runs that come next, and failures."""
  cells = driver.cells()
  todo = driver.todo(cells)
  started = [n for n, row in driver.rows.items() if row["status"] == "running"]
  waiting = {n: plan.point for n, plan in todo.items() if n not in started}
  refused = [{"status": "failed", "error": plan.error} for plan in driver.refused()]
  rows = [*driver.asked(cells), *refused]
  print("\n".join(progress.lines(cells, rows, driver.runs, waiting)))
  if driver.sweep.chart:
    found = comparison.frame(driver.sweep.chart, driver.best_rows())
    print("\n".join(["", *comparison.lines(driver.sweep.chart, found)]))


if __name__ == "__main__":
  flags.mark_flag_as_required("results")
  command_line.run(lambda argv: command.guarded(run))
