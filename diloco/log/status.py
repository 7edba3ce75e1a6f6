"""The status of runs: functions that readers of a folder share, and a list of readers.

The list is `READERS`. A module `status` in a folder of `contrib/` adds its own reader.
"""

import contextlib
import datetime
import pathlib
import types
from collections.abc import Callable, Sequence
from typing import NamedTuple

from diloco.log.workdir import title
from diloco.util import files, remote
from diloco.util.types import Json

# A run has probably stopped if it adds no line for _PATIENCE times the usual time
# between two lines. This must be at least _LEAST_S seconds, because evaluations and
# checkpoints take time.
_PATIENCE, _LEAST_S = 20, 60


class Status(NamedTuple):
  """The status of a run.

  Attributes:
    title: the run in a few words, such as its algorithm, M and H.
    news: {heading: text}, shown for each run.
    details: {heading: text}, also shown if there is only one run.
  """

  title: str
  news: dict[str, str]
  details: dict[str, str]


# {file or folder that identifies the kind of a folder: function (folder, time) that
# reads such a folder}.
READERS: dict[str, Callable[[pathlib.Path, float], Status]] = {}


def heading(config: Json) -> str:
  """Describes a config in a few words."""
  if not config:
    return "config not known, because there is no config.json"
  try:
    return title(types.SimpleNamespace(**config))
  except AttributeError:
    return "config not known, because config.json is not that of a run"


def progress(count: int, total: int | None) -> str:
  """Formats a count, such as "40 of 400"."""
  return f"{count:,}" + (f" of {total:,}" if total else "")


def by_fragment(steps: dict[int, int]) -> str:
  """Describes {fragment: step of its last sync}."""
  return ", ".join(f"fragment {p} at {t:,}" for p, t in sorted(steps.items()))


def checkpoint(steps: Sequence[int]) -> dict[str, str]:
  """Describes the newest checkpoint; `steps` must have the newest step first."""
  return {"checkpoint": f"step {steps[0]:,}" if steps else "none yet"}


def duration(seconds: float) -> str:
  """Formats seconds as hours, minutes and seconds."""
  return str(datetime.timedelta(seconds=round(seconds)))


def last_line(
  path: pathlib.Path, now: float, usual: float, done: bool
) -> dict[str, str]:
  """Describes how long ago a file changed, and whether the run has ended.

  Args:
    path: a file that grows as the run goes on.
    usual: seconds between two of its lines.
    done: whether the run is finished.
  """
  if done:
    return {"state": "finished"}
  age = now - path.stat().st_mtime
  # A bucket gets new lines only together with checkpoints.
  stale = age > max(_PATIENCE * usual, _LEAST_S) and not remote.address_of(path)
  state = "probably stopped" if stale else ""
  if has_ended(path.parent):
    state = "stopped"
  if not state:
    return {"last line": f"{max(age, 0):.0f} s ago"}
  return {"last line": f"{duration(age)} ago", "state": state}


def has_ended(folder: pathlib.Path) -> bool:
  """Returns whether the process that locked a folder is known to have ended."""
  with contextlib.suppress(OSError):
    return files.has_ended((folder / ".lock").read_text())
  return False
