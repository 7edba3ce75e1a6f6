"""Draws the schedule of a run from its log: inner steps, sends, merges.

python -m diloco draw_run --workdir=runs/sample --first=17 --last=62 --out=runs/run.png

`python -m diloco simulate schedule` draws the schedule of a config, without a run.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from diloco.config import Config
from diloco.errors import ConfigError
from diloco.log import workdir as log
from diloco.simulate import schedule_figure
from diloco.simulate.schedule_figure import Send
from diloco.util import palette
from diloco.util.command import Parser, as_path, guarded


def read(workdir: pathlib.Path) -> tuple[Config, list[Send], int]:
  """Reads a run's config, the records of its sends, and the last step that is logged.

  Raises:
    ConfigError: the folder holds no run that synchronises replicas.
  """
  c, [records] = log.read(workdir, "send", "step", name="--workdir")
  if not c.make_fragments():
    raise ConfigError(f"--workdir is {workdir}, a data-parallel run; use a DiLoCo run.")
  sends = [Send(r["step"], r["fragment"], r["bytes"]) for r in records["send"]]
  steps = [r["step"] for some in records.values() for r in some]
  return c, sends, max(steps, default=0)


def check(sends: Sequence[Send], first: int, last: int) -> None:
  """Raises a ConfigError if no send lies in steps first..last."""
  steps = [send.step for send in sends]
  if not any(first <= step <= last for step in steps):
    known = f"sends from step {min(steps)} to {max(steps)}" if steps else "no send"
    raise ConfigError(
      f"--first is {first} and --last is {last}, but the log has {known}; choose steps"
      " with a send."
    )


def draw(args: argparse.Namespace) -> None:
  """Writes the picture."""
  c, sends, done = read(args.workdir)
  schedule_figure.check(c, args.first, args.last, args.out)
  check(sends, args.first, args.last)
  # A run that still goes on has not merged what would arrive later.
  last = min(args.last, done)
  palette.save(lambda: schedule_figure.make(c, sends, args.first, last), args.out)
  print(args.out)


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco draw_run", description=__doc__)
  add, path = parser.add_argument, as_path
  add("--workdir", type=path, required=True, help="folder of a run of DiLoCo")
  add("--first", type=int, default=1, help="first inner step to draw; default 1")
  add("--last", type=int, default=60, help="last inner step to draw; default 60")
  add("--out", type=path, required=True, help="picture to write, such as run.png")
  return guarded(draw, parser.parse_args(argv), mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
