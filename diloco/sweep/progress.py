"""The table that a sweep shows while it runs."""

import sys
import time

from diloco.sweep.grid import describe


def lines(cells: list, rows: list[dict]) -> list[str]:
  """One line per cell: what it is, how far, its best point.

  Args:
    cells: `runner.Cell`s.
    rows: of the table.
  """
  count = {
    s: sum(r["status"] == s for r in rows) for s in ("done", "running", "failed")
  }
  wide = max((len(describe(c.cell)) for c in cells), default=4)
  name = max((len(c.grid.name) for c in cells), default=4)
  head = f"{'grid':<{name}} {'cell':<{wide}} {'state':<9}"
  out = [f"{head} {'runs':>7} {'loss':>8}  best"]
  for c in cells:
    s = c.search
    ended = len(s.points) - len(s.todo)
    tuned = {a.name: s.best[a.name] for a in c.grid.axes} if s.best else {}
    loss = f"{s.loss:.4f}" if s.best else "-"
    note = f"  at the bound of {', '.join(s.edge)}" if s.edge else ""
    out.append(
      f"{c.grid.name:<{name}} {describe(c.cell):<{wide}} {s.state:<9}"
      f" {ended:>3}/{len(s.points):<3} {loss:>8}  {describe(tuned)}{note}"
    )
  ended_cells = sum(c.search.state in ("interior", "edge", "failed") for c in cells)
  out.append(
    f"{ended_cells} of {len(cells)} cells, {count['done']} runs done,"
    f" {count['running']} running, {count['failed']} failed"
  )
  return out


class Live:
  """Redraws the table on a terminal; elsewhere says a line when something ends."""

  def __init__(self, every: float = 1.0):
    self._terminal, self._every = sys.stderr.isatty(), every
    self._height, self._last, self._ended = 0, 0.0, -1

  def __call__(self, cells: list, rows: list[dict]) -> None:
    ended = sum(row["status"] in ("done", "failed") for row in rows)
    if not self._terminal:
      if ended != self._ended:
        print(lines(cells, rows)[-1], file=sys.stderr, flush=True)
      self._ended = ended
      return
    if ended == self._ended and time.monotonic() - self._last < self._every:
      return
    text = lines(cells, rows)
    up = f"\x1b[{self._height}A\x1b[J" if self._height else ""
    print(up + "\n".join(text), file=sys.stderr, flush=True)
    self._height, self._last, self._ended = len(text), time.monotonic(), ended
