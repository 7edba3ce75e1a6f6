"""Shows the cells and failures of a sweep while it runs."""

import collections
import shutil
import sys
from collections.abc import Collection, Sequence

from diloco.sweep.grid import Search, describe
from diloco.sweep.table import Row


def lines(cells: Sequence[Search], rows: Collection[Row]) -> list[str]:
  """Returns a line per cell with its best point, then failures, then a total."""
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
  count = collections.Counter(row["status"] for row in rows)
  total = (
    f"{sum(c.ended for c in cells)} of {len(cells)} cells, {count['done']} runs done,"
    f" {count['running']} running, {count['failed']} failed"
  )
  return [*out, *failures(rows), total]


def failures(rows: Collection[Row], most: int = 3) -> list[str]:
  """Returns the last `most` reasons of failures, each once; counts the others."""
  reasons = list(dict.fromkeys(r["error"] for r in rows if r["status"] == "failed"))
  shown = [f"failed: {reason}" for reason in reasons[-most:]]
  more = len(reasons) - len(shown)
  return [f"{more} more reasons: see --export", *shown] if more else shown


class Live:
  """Shows progress: on a terminal, redraws all lines; elsewhere, prints new lines."""

  def __init__(self):
    self._height, self._ended, self._failures = 0, -1, list[str]()

  def __call__(self, cells: Sequence[Search], rows: Collection[Row]) -> None:
    ended = sum(row["status"] in ("done", "failed") for row in rows)
    if sys.stderr.isatty():
      # A wrapped line would count as one line but take two on the terminal.
      width = shutil.get_terminal_size().columns
      text = [line[:width] for line in lines(cells, rows)]
      up = f"\x1b[{self._height}A\x1b[J" if self._height else ""
      print(up + "\n".join(text), file=sys.stderr, flush=True)
      self._height = len(text)
    elif ended != self._ended:
      found = failures(rows)
      new = [line for line in found if line not in self._failures]
      print(*new, lines(cells, rows)[-1], sep="\n", file=sys.stderr, flush=True)
      self._ended, self._failures = ended, found
