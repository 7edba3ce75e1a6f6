"""Shows the cells, runs and failures of a sweep: before, during and after it."""

import collections
import signal
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

import pandas as pd

from diloco.checkpoint.record import steps_of
from diloco.log import metrics, status
from diloco.log.workdir import backwards
from diloco.sweep.grid import Point, describe
from diloco.sweep.search import Search
from diloco.sweep.table import Row


def lines(
  cells: Sequence[Search],
  rows: Collection[Row],
  waiting: Mapping[str, Point] = {},
) -> list[str]:
  """Lists cells with their best points, running and waiting runs, failures and a total.

  Args:
    cells: the searches of all cells.
    rows: the rows of all runs that were started.
    waiting: {name: point} of the waiting runs to list.
  """
  table = _table_of_cells(cells) if cells else []
  return [*table, *_runs(rows, waiting), *failures(rows), _total(cells, rows)]


def _total(cells: Sequence[Search], rows: Collection[Row]) -> str:
  count = collections.Counter(row["status"] for row in rows)
  return (
    f"{sum(c.ended for c in cells)} of {len(cells)} cells, {count['done']} runs done,"
    f" {count['running']} running, {count['failed']} failed"
  )


def _table_of_cells(cells: Sequence[Search]) -> list[str]:
  """Returns a header, and a line per cell with its best point."""
  rows = []
  for c in cells:
    tuned = {a.name: c.best[a.name] for a in c.grid.axes} if c.best else {}
    edge = f"  at the bound of {', '.join(c.edge)}" if c.edge else ""
    rows.append(
      {
        "grid": c.grid.name,
        "cell": describe(c.cell),
        "state": c.state,
        "runs": f"{len(c.points) - len(c.todo)}/{len(c.points)}",
        "loss": f"{c.loss:.4f}" if c.best else "-",
        "best": describe(tuned) + edge,
      }
    )
  return pd.DataFrame(rows).to_string(index=False).splitlines()


def _runs(rows: Iterable[Row], waiting: Mapping[str, Point]) -> list[str]:
  """Returns a line for each running run, with its step, and for each waiting run."""
  listed = [
    ("running", row["name"], _position(row), row["point"])
    for row in rows
    if row["status"] == "running"
  ]
  listed += [("waiting", name, "", point) for name, point in waiting.items()]
  wide = max((len(position) for _, _, position, _ in listed), default=0)
  return [f"{s} {n}  {at:<{wide}}  {describe(point)}" for s, n, at, point in listed]


def _position(row: Row) -> str:
  """Returns the step of a run and the training time that is left."""
  records = map(metrics.as_record, backwards(row["folder"] / metrics.FILE))
  last = next((r for r in records if r.get("kind") == "step"), None)
  if not last:
    return "starting"
  train, rate = row["config"]["train"], last.get("tokens_per_s")
  text = f"step {status.progress(last['step'], train['steps'])}"
  left = train["tokens"] - last["tokens"]
  return f"{text}, {status.duration(left / rate)} left" if rate else text


def failures(rows: Collection[Row], most: int = 3) -> list[str]:
  """Returns the last distinct failure reasons, at most `most`; counts the others."""
  reasons = list(dict.fromkeys(r["error"] for r in rows if r["status"] == "failed"))
  shown = [f"failed: {reason}" for reason in reasons[-most:]]
  more = len(reasons) - len(shown)
  return [f"{more} more reasons: see --export", *shown] if more else shown


def stopped(
  number: int, cells: Sequence[Search], rows: Collection[Row], waiting: int
) -> str:
  """Describes a sweep that a signal has stopped: its runs, and what is left to run.

  Args:
    number: the number of the signal.
    cells, rows: as for `lines`. Runs that still run are jobs that outlive the driver.
    waiting: how many runs were never started.
  """
  name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
  begun = [row["folder"] for row in rows if row["status"] == "interrupted"]
  saved = sum(bool(steps_of(folder)) for folder in begun)
  return (
    f"{name}: {_total(cells, rows)}, {len(begun)} stopped ({saved} with a checkpoint),"
    f" {waiting} waiting; the same command goes on."
  )


class Live:
  """Prints new failures and the total whenever more runs have ended."""

  def __init__(self) -> None:
    self._ended, self._failures = -1, list[str]()

  def __call__(self, cells: Sequence[Search], rows: Collection[Row]) -> None:
    ended = sum(row["status"] in ("done", "failed") for row in rows)
    if ended != self._ended:
      failed = failures(rows)
      new = [line for line in failed if line not in self._failures]
      print(*new, _total(cells, rows), sep="\n", file=sys.stderr, flush=True)
      self._ended, self._failures = ended, failed
