"""Draws the schedule of a run from its log: inner steps, sends, merges.

python -m diloco draw_run --workdir=/tmp/sample --first=17 --last=62 --out=/tmp/run.png

`python -m diloco simulate schedule` draws the schedule of a config, without a run.
"""

import pathlib
from collections.abc import Sequence

from absl import flags

from diloco.config import Config, command_line
from diloco.errors import ConfigError
from diloco.log import workdir as log
from diloco.simulate import schedule_figure
from diloco.simulate.schedule_figure import Send
from diloco.util import palette

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of DiLoCo.")
_FIRST = flags.DEFINE_integer("first", 1, "First inner step to draw.", lower_bound=1)
_LAST = flags.DEFINE_integer("last", 60, "Last inner step to draw.")
_OUT = flags.DEFINE_string("out", None, "Picture to write, for example run.png.")


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


def main(argv) -> None:
  del argv
  c, sends, done = read(pathlib.Path(str(_WORKDIR.value)))
  first, last, out = _FIRST.value, _LAST.value, pathlib.Path(str(_OUT.value))
  schedule_figure.check(c, first, last, out)
  check(sends, first, last)
  # A run that still goes on has not merged what would arrive later.
  last = min(last, done)
  palette.save(lambda: schedule_figure.make(c, sends, first, last), out)
  print(out)


if __name__ == "__main__":
  flags.mark_flags_as_required(["workdir", "out"])
  command_line.run(main)
