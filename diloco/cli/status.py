r"""Shows how runs go on, here or on another machine. Only reads the files of the runs.

python -m diloco status runs/sample
python -m diloco status runs/sites --follow=5

WORKDIR is the --workdir of diloco.main or of diloco.coordinator, or a folder of such
folders: that of a sweep, or of a run of several sites.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import statistics
import sys
import time
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from diloco.checkpoint.record import steps_of
from diloco.config import complete
from diloco.contrib.sites.calendar import Calendar
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.log.workdir import backwards, read_config, title
from diloco.util import files
from diloco.util.command import Parser, as_path, guarded, in_range

ROUNDS, SUMMARY = "rounds.jsonl", "summary.json"
# A run has probably stopped if it adds no line for _PATIENCE times the usual time of a
# line, and for _LEAST_S seconds: evaluations and checkpoints take time too.
_PATIENCE, _LEAST_S = 20, 60
_ROUND_S = 30  # Assumed seconds of a round: lines of rounds have no times.
_RECENT = 20  # The usual time is that of these newest steps.


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


def of_run(folder: pathlib.Path, now: float) -> Status:
  """Reads how a run, or a site of a run, goes on."""
  config = read_config(folder)
  total = config.get("train", {}).get("steps")
  found = newest(folder, config)
  if not found["step"]:
    news = {"step": "none yet; compiling the first one"}
    if _has_ended(folder):
      news = {"step": "none", "state": "stopped"}
    return Status(_title(config), news, {})
  step = found["step"][0]
  t, rate = step["step"], step["tokens_per_s"]
  done = t == total and files.read_json(folder / SUMMARY) is not None
  times = [r["time"] for r in found["step"][:_RECENT]]
  usual = statistics.median(abs(a - b) for a, b in zip(times, times[1:] or times))
  age = _age(folder / metrics.FILE, now, usual, done)
  news = {"step": _of(t, total) + (f", {rate:,.0f} tokens/s" if rate else "")}
  if rate and total and t < total and "state" not in age:
    left = (total - t) * step["tokens"] / t / rate
    news["step"] += f", {_time(left)} of training left"
  news["loss"] = f"{step['loss']:.4f}"
  if found["eval"]:
    evaluation = found["eval"][0]
    loss = evaluation["loss_outer"]
    text = "not finite" if loss is None else f"{loss:.4f}"
    news["held-out"] = f"{text} at {evaluation['step']:,}"
  details = dict[str, str]()
  if syncs := found["receive"]:
    # From old to new, so that the newest record of a fragment stays.
    details["last sync"] = _fragments({r["fragment"]: r["step"] for r in syncs[::-1]})
    if "sites" in syncs[0]:
      news["sites"] = f"{syncs[0]['sites']:g} in the last round"
  return Status(_title(config), news | age, details | _checkpoint(folder))


def newest(folder: pathlib.Path, config: dict[str, Any]) -> metrics.Kinds:
  """Returns the newest records of a run by kind, the newest first.

  Reads metrics.jsonl from its end, no further than needed: until there is an
  evaluation, and every fragment is received.
  """
  found: metrics.Kinds = {"step": [], "eval": [], "receive": []}
  every = config.get("eval", {}).get("every", 0)
  reach = max(2 * config.get("sync_every", 0), every, _RECENT)
  for line in backwards(folder / metrics.FILE):
    record = metrics.as_record(line)
    kind = record.get("kind")
    if kind in found:
      found[kind].append(record)
    if kind == "step" and record["step"] < found["step"][0]["step"] - reach:
      break
  return found


def of_coordinator(folder: pathlib.Path, now: float) -> Status:
  """Reads how the rounds of a run of several sites go on."""
  config, rounds = read_config(folder), list[dict[str, Any]]()
  for line in backwards(folder / ROUNDS):
    with contextlib.suppress(ValueError):  # The last line may be cut short.
      rounds.append(json.loads(line))
  if not rounds:
    return Status(_title(config), {"round": "none closed yet"}, {})
  last, total, sites = rounds[0], None, None
  with contextlib.suppress(ConfigError):
    calendar = Calendar(complete(config))
    total, sites = len(calendar.rounds), calendar.sites
  syncs, sent, refused = dict[int, int](), dict[str, int](), dict[int, list[int]]()
  for r in rounds:
    syncs.setdefault(r["fragment"], r["step"])
    for site in r["tokens"]:
      sent.setdefault(site, r["step"])
    for site in r.get("refused", ()):
      refused.setdefault(site, []).append(r["step"])
  inside = sorted(last["tokens"], key=int)
  news = {
    "round": f"{_of(last['round'] + 1, total)}, step {last['step']:,}",
    "sites": f"{_of(len(inside), sites)} in the last round: {', '.join(inside)}",
  }
  if away := sorted(sent.keys() - inside, key=int):
    news["away"] = ", ".join(f"{k} since step {sent[k]:,}" for k in away)
  if refused:
    news["refused"] = ", ".join(
      f"{len(steps)} of site {k}, the last of step {steps[0]:,}"
      for k, steps in sorted(refused.items())
    )
  ended = files.read_json(folder / "coordinator.json") is not None
  done = ended and last["round"] + 1 == total  # Else the run is extended.
  news |= _age(folder / ROUNDS, now, _ROUND_S, done)
  details = {"last sync": _fragments(syncs)} | _checkpoint(folder)
  return Status(_title(config), news, details)


# {a file or folder that only this kind of folder has: the function that reads it}
READERS = {
  metrics.FILE: of_run,
  ROUNDS: of_coordinator,
  "journal": of_coordinator,  # Before the first round closes.
}


def read(folder: pathlib.Path, now: float) -> Status:
  """Reads the status of the run in a folder; compares file times with `now`."""
  readers = (r for name, r in READERS.items() if (folder / name).exists())
  return next(readers, of_run)(folder, now)


def find(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders of runs: the folder itself and those in it, also of sites.

  Raises:
    ConfigError: there is no run.
  """
  depths = (".", "*", "*/*", "*/*/*")  # A sweep has runs/NAME/site-0 at most.
  found = [
    f for depth in depths for name in READERS for f in folder.glob(f"{depth}/{name}")
  ]
  # No metrics yet: the run still compiles its first step.
  if not found and (folder / metrics.CONFIG).is_file():
    return [folder]
  if not folder.is_dir():
    raise ConfigError(f"WORKDIR is {str(folder)!r}, but there is no such folder.")
  if not found:
    raise ConfigError(
      f"WORKDIR is {str(folder)!r}, where no run has written {' or '.join(READERS)}"
      " yet; give the --workdir of diloco.main or of diloco.coordinator."
    )
  return sorted({path.parent for path in found})


def lines(folder: pathlib.Path, now: float) -> list[str]:
  """Describes the run of a folder, or each run in the folder in one line."""
  runs = find(folder)
  if len(runs) == 1:
    title, news, details = read(runs[0], now)
    shown = {"run": f"{runs[0]}: {title}"} | news | details
    return [f"{what:<12} {text}" for what, text in shown.items()]
  names = [os.path.relpath(run, os.path.commonpath(runs)) for run in runs]
  wide, found = max(map(len, names)), list[str]()
  for run, name in zip(runs, names):
    parts = [f"{what} {text}" for what, text in read(run, now).news.items()]
    found.append(f"{name:<{wide}}  {'; '.join(parts)}")
  return found


def _title(config: dict[str, Any]) -> str:
  if not config:
    return "config not known, because there is no config.json"
  return title(types.SimpleNamespace(**config))


def _of(count: int, total: int | None) -> str:
  return f"{count:,}" + (f" of {total:,}" if total else "")


def _fragments(steps: dict[int, int]) -> str:
  return ", ".join(f"fragment {p} at {t:,}" for p, t in sorted(steps.items()))


def _checkpoint(folder: pathlib.Path) -> dict[str, str]:
  steps = steps_of(folder)
  return {"checkpoint": f"step {steps[0]:,}" if steps else "none yet"}


def _time(seconds: float) -> str:
  return str(datetime.timedelta(seconds=round(seconds)))


def _age(path: pathlib.Path, now: float, usual: float, done: bool) -> dict[str, str]:
  if done:
    return {"state": "finished"}
  age = now - path.stat().st_mtime
  state = "probably stopped" * (age > max(_PATIENCE * usual, _LEAST_S))
  if _has_ended(path.parent):
    state = "stopped"
  if not state:
    return {"last line": f"{max(age, 0):.0f} s ago"}
  return {"last line": f"{_time(age)} ago", "state": state}


def _has_ended(folder: pathlib.Path) -> bool:
  """Returns whether the process that locked a folder ran here, and has ended."""
  with contextlib.suppress(OSError):
    return files.has_ended((folder / ".lock").read_text())
  return False


def show(args: argparse.Namespace) -> None:
  """Prints the lines of all folders; again and again with --follow."""
  while True:
    found = [line for folder in args.workdir for line in lines(folder, time.time())]
    if args.follow and sys.stdout.isatty():
      print("\x1b[H\x1b[J", end="")  # Clears the terminal.
    print("\n".join(found), flush=True)
    if not args.follow:
      return
    time.sleep(args.follow)


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco status", description=__doc__)
  add = parser.add_argument
  text = "folder of a run, of a coordinator, or of several of them"
  add("workdir", metavar="WORKDIR", type=as_path, nargs="+", help=text)
  text = "show it again every so many seconds; default 10"
  kind = in_range(0.1, 86_400.0)
  add("--follow", type=kind, nargs="?", const=10, metavar="SECONDS", help=text)
  return guarded(show, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
