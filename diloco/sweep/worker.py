"""Trains several runs of a sweep together, for `diloco sweep --vectorize`.

python -m diloco worker RESULTS/runs/NAME RESULTS/runs/NAME ...

Each RUN has a config.json, and gets the files that diloco.main writes to --workdir. If
memory runs out, the worker starts itself again with half as many runs at once.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.sweep import saved, table
from diloco.together import groups
from diloco.util.command import Parser, guarded, in_range, interrupted


def run(args: argparse.Namespace) -> int:
  """Trains the runs of the folders; returns the exit status."""
  configs = [resolve(saved.get_config(str(f / "config.json"))) for f in args.run]
  if len({groups.alike(table.as_json(c)) for c in configs}) > 1:
    raise ConfigError(
      f"RUN are {', '.join(map(str, args.run))}, which differ in more than"
      f" {groups.FIELDS}; train them one by one by python -m diloco job RUN."
    )
  # Imported late, so that --help and errors in the arguments need no JAX.
  import jax

  from diloco import train
  from diloco.mesh import memory
  from diloco.mesh.compiling import announce_compilations
  from diloco.processes import stop
  from diloco.processes.peers import print_line
  from diloco.together import training as together

  stop.watch_signals()
  announce_compilations()
  runs = [together.Member(c, folder) for c, folder in zip(configs, args.run)]
  reason = groups.obstacle(table.as_json(configs[0]))
  if jax.device_count() > 1:
    reason = f"there are {jax.device_count()} devices, and one device trains a group"
  try:
    for group in _by_position(runs, args.most):
      if reason or len(group) == 1:
        print_line(f"Training one by one{': ' * bool(reason)}{reason}.")
        for one in group:
          stopped = False
          with one.own():
            stopped = not train.train(one.c, one.workdir)
          if stopped:
            return 0
      else:
        print_line(f"Training together: {' '.join(one.workdir.name for one in group)}.")
        if together.train(group):
          return 0
  except KeyboardInterrupt:
    return interrupted()
  except Exception as error:
    explanation = memory.explain(error)
    if not explanation:
      raise
    if reason or len(group) == 1:
      print(f"error: {explanation}")
      return 1
    size, half = len(group), len(group) // 2
    print_line(f"With {size} runs at once, {explanation} Now at most {half} at once.")
    # A new program frees all of the device's memory, and has the locks and the process
    # number of this one.
    os.execv(sys.executable, [*sys.orig_argv, f"--most={half}"])
  return 0


def _by_position(runs: Sequence, most: int) -> list[list]:
  """Makes groups of at most `most` runs whose newest checkpoints have the same step.

  A run is alone in its group if its last step is saved, if its checkpoint is damaged,
  or if it was extended: an extended run has another schedule (`Schedule.drained`).
  """
  from diloco.checkpoint.record import read_record, steps_of

  by_step: dict[object, list] = {}
  for one in runs:
    step = next(iter(steps_of(one.workdir)), 0)
    try:
      record = read_record(one.workdir, step) if step else None
      alone = record is not None and bool(record.finished or record.drained)
    except (ValueError, OSError, TypeError):
      alone = True
    by_step.setdefault(one.workdir if alone else step, []).append(one)
  return groups.at_most(most, by_step.values())


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco worker", description=__doc__)
  help_ = "folders --results/runs/NAME of a sweep, each with a config.json"
  parser.add_argument("run", metavar="RUN", type=pathlib.Path, nargs="+", help=help_)
  help_ = "the most runs to train at once"
  parser.add_argument("--most", type=in_range(1), default=1 << 30, help=help_)
  return guarded(run, parser.parse_args(argv), mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
