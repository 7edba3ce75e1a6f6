r"""Shows the progress of runs here or on another machine, by reading their files.

python -m diloco status runs/sample
watch -n 5 python -m diloco status runs/sites

WORKDIR is the --workdir of diloco.main or the --group of several sites. It can also be
a folder that contains them, such as the folder of a sweep or of a run of several sites.
"""

import argparse
import importlib
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence

from diloco.checkpoint.record import steps_of
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.log.status import (
  READERS,
  Status,
  by_fragment,
  checkpoint,
  duration,
  has_ended,
  heading,
  last_line,
  progress,
)
from diloco.log.workdir import backwards, read_config
from diloco.util import files, remote
from diloco.util.command import Parser, as_place, guarded
from diloco.util.shipped import PACKAGE
from diloco.util.types import Json

SUMMARY = "summary.json"
_RECENT = 20  # Newest logged steps; the median time between them counts as usual.


def of_run(folder: pathlib.Path, now: float) -> Status:
  """Reads the progress of a run, or of one site of a run."""
  config = read_config(folder)
  total = config.get("train", {}).get("steps")
  kinds = newest(folder, config)
  if not kinds["step"]:
    news = {"step": "none yet; compiling the first one"}
    if has_ended(folder):
      news = {"step": "none", "state": "stopped"}
    if _is_finished(folder, 0):
      news = {"step": "none", "state": "finished"}
    return Status(heading(config), news, {})
  step = kinds["step"][0]
  t, rate = step["step"], step["tokens_per_s"]
  done = _is_finished(folder, 0 if t == total else step["time"])
  times = [r["time"] for r in kinds["step"][:_RECENT]]
  usual = statistics.median(abs(a - b) for a, b in zip(times, times[1:] or times))
  age = last_line(folder / metrics.FILE, now, usual, done)
  saved = steps_of(folder)
  reached = max([t, *saved])  # A stopped run may save a later step than it logs.
  speed = f", {rate:,.0f} tokens/s" if rate else ""
  news = {"step": progress(reached, total) + speed}
  if rate and total and t < total and "state" not in age:
    left = (total - t) * step["tokens"] / t / rate
    news["step"] += f", {duration(left)} of training left"
  news["loss"] = f"{step['loss']:.4f}"
  if kinds["eval"]:
    loss, at = (kinds["eval"][0][name] for name in ("loss_outer", "step"))
    news["held-out"] = f"{'not finite' if loss is None else f'{loss:.4f}'} at {at:,}"
  details = dict[str, str]()
  if syncs := kinds["receive"]:
    # From old to new, so that the newest record of a fragment stays.
    details["last sync"] = by_fragment({r["fragment"]: r["step"] for r in syncs[::-1]})
  return Status(heading(config), news | age, details | checkpoint(saved))


def _is_finished(folder: pathlib.Path, trained: float) -> bool:
  """Returns whether a run has a summary that was written after the time `trained`.

  The last logged step does not show the end: a site may have jumped to the group's last
  step. A run resumed from an older checkpoint may still have its first summary.
  """
  path = folder / SUMMARY
  return files.read_json(path) is not None and trained <= path.stat().st_mtime


def newest(folder: pathlib.Path, config: Json) -> metrics.Kinds:
  """Returns the newest records of a run by kind, the newest first.

  Reads metrics.jsonl from its end, over as many steps as contain an evaluation and a
  receive of every fragment.
  """
  kinds: metrics.Kinds = {"step": [], "eval": [], "receive": []}
  every = config.get("eval", {}).get("every", 0)
  reach = max(2 * config.get("sync_every", 0), every, _RECENT)
  for line in backwards(folder / metrics.FILE):
    record = metrics.as_record(line)
    kind = record.get("kind")
    if kind in kinds:
      kinds[kind].append(record)
    if kind == "step" and record["step"] < kinds["step"][0]["step"] - reach:
      break
  return kinds


READERS[metrics.FILE] = of_run
for path in PACKAGE.glob("contrib/**/status.py"):
  name = path.relative_to(PACKAGE.parent).with_suffix("")
  importlib.import_module(".".join(name.parts))


def read(folder: pathlib.Path, now: float) -> Status:
  """Reads the status of the run in a folder; compares file times with `now`."""
  readers = (r for name, r in READERS.items() if (folder / name).exists())
  return next(readers, of_run)(folder, now)


def find(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns all folders of runs and sites: `folder` itself, and folders inside it.

  Raises:
    ConfigError: there is no run in the folder.
  """
  depths = (".", "*", "*/*", "*/*/*")  # The deepest is a sweep's runs/NAME/site-0.
  paths = [
    f for depth in depths for name in READERS for f in folder.glob(f"{depth}/{name}")
  ]
  # No metrics yet: the run still compiles its first step.
  if not paths and (folder / metrics.CONFIG).is_file():
    return [folder]
  if not folder.is_dir():
    raise ConfigError(f"WORKDIR is {str(folder)!r}, but there is no such folder.")
  if not paths:
    raise ConfigError(
      f"WORKDIR is {str(folder)!r}, where no run has written {' or '.join(READERS)}"
      " yet; give the --workdir of diloco.main, or the --group of sites."
    )
  return sorted({path.parent for path in paths})


def lines(folder: pathlib.Path | str, now: float) -> list[str]:
  """Describes the run of a folder, or each run in the folder in one line."""
  runs = find(remote.local_copy(folder, "WORKDIR"))
  if len(runs) == 1:
    title, news, details = read(runs[0], now)
    shown = {"run": f"{files.shown(runs[0])}: {title}"} | news | details
    return [f"{what:<12} {text}" for what, text in shown.items()]
  names = [os.path.relpath(run, os.path.commonpath(runs)) for run in runs]
  wide, run_lines = max(map(len, names)), list[str]()
  for run, name in zip(runs, names):
    parts = [f"{what} {text}" for what, text in read(run, now).news.items()]
    run_lines.append(f"{name:<{wide}}  {'; '.join(parts)}")
  return run_lines


def show(args: argparse.Namespace) -> None:
  """Prints the status of the runs in all given folders."""
  for folder in args.workdir:
    print("\n".join(lines(folder, time.time())))


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco status", description=__doc__)
  text = "folder of a run, of a group of sites, or of several of them"
  parser.add_argument("workdir", metavar="WORKDIR", type=as_place, nargs="+", help=text)
  return guarded(show, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
