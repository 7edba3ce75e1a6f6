"""How runs go on: what readers of a folder share, and who reads which folder.

A module `status` in a folder of `contrib/` adds its reader to `READERS`.
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

# A run has probably stopped if it adds no line for _PATIENCE times the usual time of a
# line, and for _LEAST_S seconds: evaluations and checkpoints take time too.
_PATIENCE, _LEAST_S = 20, 60


class Status(NamedTuple):
  """How a run goes on.

  Attributes:
    title: algorithm and numbers of the run.
    news: {what: text}, what is shown of each run of many.
    details: {what: text}, what is shown of a single run besides.
  """

  title: str
  news: dict[str, str]
  details: dict[str, str]


# {the file or folder that shows whose folder it is: reads that, at a time}.
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
  """Returns such as "40 of 400"."""
  return f"{count:,}" + (f" of {total:,}" if total else "")


def by_fragment(steps: dict[int, int]) -> str:
  """Describes {fragment: step of its last sync}."""
  return ", ".join(f"fragment {p} at {t:,}" for p, t in sorted(steps.items()))


def checkpoint(steps: Sequence[int]) -> dict[str, str]:
  """Describes the newest checkpoint of these steps, the newest first."""
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
  # A bucket gets new lines with the checkpoints only.
  stale = age > max(_PATIENCE * usual, _LEAST_S) and not remote.address_of(path)
  state = "probably stopped" if stale else ""
  if has_ended(path.parent):
    state = "stopped"
  if not state:
    return {"last line": f"{max(age, 0):.0f} s ago"}
  return {"last line": f"{duration(age)} ago", "state": state}


def has_ended(folder: pathlib.Path) -> bool:
  """Returns whether the process that locked a folder is known here, and has ended."""
  with contextlib.suppress(OSError):
    return files.has_ended((folder / ".lock").read_text())
  return False
