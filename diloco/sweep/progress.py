"""Shows the cells, runs and failures of a sweep, before, while and after it runs."""

import collections
import datetime
import shutil
import signal
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

from diloco.checkpoint.record import steps_of
from diloco.log import metrics
from diloco.log.workdir import backwards
from diloco.sweep.grid import Point, describe
from diloco.sweep.search import Search
from diloco.sweep.table import Row


def lines(
  cells: Sequence[Search],
  rows: Collection[Row],
  waiting: Mapping[str, Point] = {},
  room: int = 0,
) -> list[str]:
  """Lists cells with their best points, running and waiting runs, failures, a total.

  Args:
    cells: the searches of all cells.
    rows: all runs that were started.
    waiting: {name: point} of the waiting runs to list.
    room: if there would be more lines, only cells with runs to do are listed, and of
      these not more than there is room for. 0: all cells are listed.
  """
  below = [*_runs(rows, waiting), *failures(rows), _total(cells, rows)]
  space = room - len(below) - 1
  if room and len(cells) > space:
    cells = [c for c in cells if c.state == "searching"][: max(space, 0)]
  return [*_table_of_cells(cells), *below]


def _total(cells: Sequence[Search], rows: Collection[Row]) -> str:
  count = collections.Counter(row["status"] for row in rows)
  return (
    f"{sum(c.ended for c in cells)} of {len(cells)} cells, {count['done']} runs done,"
    f" {count['running']} running, {count['failed']} failed"
  )


def _table_of_cells(cells: Sequence[Search]) -> list[str]:
  """Returns a header, and a line per cell with its best point."""
  wide = max((len(describe(c.cell)) for c in cells), default=4)
  name = max((len(c.grid.name) for c in cells), default=4)
  head = f"{'grid':<{name}} {'cell':<{wide}} {'state':<9}"
  out = [f"{head} {'runs':>7} {'loss':>8}  best"]
  for c in cells:
    ended = len(c.points) - len(c.todo)
    tuned = {a.name: c.best[a.name] for a in c.grid.axes} if c.best else {}
    loss = f"{c.loss:.4f}" if c.best else "-"
    edge = f"  at the bound of {', '.join(c.edge)}" if c.edge else ""
    out.append(
      f"{c.grid.name:<{name}} {describe(c.cell):<{wide}} {c.state:<9}"
      f" {ended:>3}/{len(c.points):<3} {loss:>8}  {describe(tuned)}{edge}"
    )
  return out


def _runs(rows: Iterable[Row], waiting: Mapping[str, Point]) -> list[str]:
  """Returns a line per running run, with its step, and per waiting run."""
  listed = [
    ("running", row["name"], _position(row), row["point"])
    for row in rows
    if row["status"] == "running"
  ]
  listed += [("waiting", name, "", point) for name, point in waiting.items()]
  wide = max((len(position) for _, _, position, _ in listed), default=0)
  return [f"{s} {n}  {at:<{wide}}  {describe(point)}" for s, n, at, point in listed]


def _position(row: Row) -> str:
  """Returns the step of a run and the time of training that is left."""
  records = map(metrics.as_record, backwards(row["folder"] / metrics.FILE))
  last = next((r for r in records if r.get("kind") == "step"), None)
  if not last:
    return "starting"
  train, rate = row["config"]["train"], last.get("tokens_per_s")
  text = f"step {last['step']:,} of {train['steps']:,}"
  if not rate:
    return text
  seconds = round((train["tokens"] - last["tokens"]) / rate)
  return f"{text}, {datetime.timedelta(seconds=seconds)} left"


def failures(rows: Collection[Row], most: int = 3) -> list[str]:
  """Returns the last `most` reasons of failures, each once; counts the others."""
  reasons = list(dict.fromkeys(r["error"] for r in rows if r["status"] == "failed"))
  shown = [f"failed: {reason}" for reason in reasons[-most:]]
  more = len(reasons) - len(shown)
  return [f"{more} more reasons: see --export", *shown] if more else shown


def stopped(
  number: int, cells: Sequence[Search], rows: Collection[Row], waiting: int
) -> str:
  """Says what a signal has stopped, and what is left.

  Args:
    number: the signal.
    cells, rows: as for `lines`. Runs that are still running outlive the driver.
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
  """Shows progress: on a terminal, redraws all lines; elsewhere, prints new lines."""

  def __init__(self) -> None:
    self._height, self._ended, self._failures = 0, -1, list[str]()

  def __call__(self, cells: Sequence[Search], rows: Collection[Row]) -> None:
    ended = sum(row["status"] in ("done", "failed") for row in rows)
    if sys.stderr.isatty():
      # A wrapped line would count as one line but take two on the terminal, and the
      # cursor cannot go above the terminal's first line.
      width, height = shutil.get_terminal_size()
      text = lines(cells, rows, room=height - 1)
      text = [line[:width] for line in text[1 - height :]]
      if all(cell.ended for cell in cells):
        text = lines(cells, rows)  # Stays there.
      up = f"\x1b[{self._height}A\x1b[J" if self._height else ""
      print(up + "\n".join(text), file=sys.stderr, flush=True)
      self._height = len(text)
    elif ended != self._ended:
      found = failures(rows)
      new = [line for line in found if line not in self._failures]
      print(*new, _total(cells, rows), sep="\n", file=sys.stderr, flush=True)
      self._ended, self._failures = ended, found
