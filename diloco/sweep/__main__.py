r"""Runs a sweep.

python -m diloco.sweep --sweep=configs/ladder.py --results=/tmp/ladder --parallel=2
python -m diloco.sweep --sweep=configs/ladder.py --results=/tmp/ladder --show
python -m diloco.sweep --results=/tmp/ladder --export=ladder.csv
python -m diloco.sweep --results=/tmp/ladder2 --import=ladder.csv
python -m diloco.sweep --sweep=... --results=/shared/sweep --backend=slurm \
  --parallel=64 --slurm_options=slurm_partition=gpu,gpus_per_node=8,timeout_min=600
"""

import pathlib
import sys

from absl import flags

from diloco.config import command_line
from diloco.sweep import csv_file, progress
from diloco.sweep.grid import Sweep
from diloco.sweep.local import Local
from diloco.sweep.runner import Driver, drive
from diloco.sweep.table import Table, alone

_SWEEP = flags.DEFINE_string(
  "sweep", "", "A file with get_sweep(), e.g. configs/ladder.py."
)
_RESULTS = flags.DEFINE_string("results", None, "Where runs and the table are kept.")
_PARALLEL = flags.DEFINE_integer("parallel", 1, "Most runs at a time.", lower_bound=1)
_CORES = flags.DEFINE_integer(
  "cores", 0, "CPU cores for each run; 0: all.", lower_bound=0
)
_BACKEND = flags.DEFINE_enum(
  "backend",
  "local",
  ["local", "slurm", "submitit"],
  "local: processes of this machine; slurm: jobs; submitit: its local executor.",
)
_OPTIONS = flags.DEFINE_string("slurm_options", "", "Of submitit: name=value,...")
_EXPORT = flags.DEFINE_string(
  "export", "", "Write the table as CSV to this file and end."
)
_IMPORT = flags.DEFINE_string(
  "import", "", "Take the runs of an exported CSV file over and end."
)
_SHOW = flags.DEFINE_bool("show", False, "Show how far the sweep is and end.")
_RETRY = flags.DEFINE_bool("retry_failed", False, "Run failed runs once more.")


def load_sweep(path: str) -> Sweep:
  """The sweep of a file.

  Raises:
    ValueError: no file, or none with get_sweep().
  """
  example = "--sweep=configs/ladder.py"
  return command_line.load_module(path, "get_sweep", example).get_sweep()


def make_backend(sweep: Sweep, results: pathlib.Path):
  """Where the flags say that runs are executed."""
  if _BACKEND.value == "local":
    return Local(_PARALLEL.value, _CORES.value, results, sweep.environment)
  from diloco.sweep.slurm import Slurm

  given = command_line.parse_options(_OPTIONS.value, place="--slurm_options")
  options = {k: int(v) if v.isdigit() else v for k, v in given.items()}
  cluster = "slurm" if _BACKEND.value == "slurm" else "local"
  return Slurm(_PARALLEL.value, results, sweep.environment, options, cluster)


def run() -> int:
  """What the flags ask for; returns the exit status."""
  results = pathlib.Path(str(_RESULTS.value))
  if _EXPORT.value:
    rows = Table(results, read_only=True).rows()
    path = pathlib.Path(_EXPORT.value)
    command_line.make_folder(path.parent, "--export")
    count = csv_file.export(rows, path)
    print(f"{count} runs written to {_EXPORT.value}")
    return 0
  if _IMPORT.value:
    command_line.make_folder(results, "--results")
    with alone(results):
      count = csv_file.load(pathlib.Path(_IMPORT.value), Table(results))
    print(f"{count} runs of {_IMPORT.value} taken over into {results}")
    return 0
  sweep = load_sweep(_SWEEP.value)
  if _SHOW.value:
    idle = Local(1, 0, results, {})  # Starts nothing.
    driver = Driver(sweep, results, idle, read_only=True)
    rows = driver.rows()
    print("\n".join(progress.lines(driver.cells({r["name"]: r for r in rows}), rows)))
    return 0
  command_line.make_folder(results, "--results")
  with alone(results):
    driver = Driver(sweep, results, make_backend(sweep, results))
    if _RETRY.value:
      driver.forget_failed()
    finished = drive(driver, progress.Live())
  return 0 if finished else 1


def main(argv) -> None:
  del argv
  try:
    sys.exit(run())
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
  flags.mark_flag_as_required("results")
  command_line.run(main)
