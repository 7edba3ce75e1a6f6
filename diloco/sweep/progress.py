"""The table that a sweep shows while it runs."""

import shutil
import sys
import time

from diloco.sweep.grid import describe


def lines(cells: list, rows: list[dict]) -> list[str]:
  """One line per cell: what it is, how far, its best point; then why runs failed.

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
  out += failures(rows)
  ended_cells = sum(c.search.state in ("interior", "edge", "failed") for c in cells)
  out.append(
    f"{ended_cells} of {len(cells)} cells, {count['done']} runs done,"
    f" {count['running']} running, {count['failed']} failed"
  )
  return out


def failures(rows: list[dict], most: int = 3) -> list[str]:
  """Why runs failed: each reason once, the latest last."""
  reasons = list(dict.fromkeys(r["error"] for r in rows if r["status"] == "failed"))
  shown = [f"failed: {reason}" for reason in reasons[-most:]]
  more = len(reasons) - len(shown)
  return [f"{more} more reasons: see --export", *shown] if more else shown


class Live:
  """Redraws the table on a terminal; elsewhere says a line when something ends."""

  def __init__(self, every: float = 1.0):
    self._terminal, self._every = sys.stderr.isatty(), every
    self._height, self._last, self._ended, self._failures = 0, 0.0, -1, list[str]()

  def __call__(self, cells: list, rows: list[dict]) -> None:
    ended = sum(row["status"] in ("done", "failed") for row in rows)
    if not self._terminal:
      if ended != self._ended:
        found = failures(rows)
        new = [line for line in found if line not in self._failures]
        print(*new, lines(cells, rows)[-1], sep="\n", file=sys.stderr, flush=True)
        self._failures = found
      self._ended = ended
      return
    if ended == self._ended and time.monotonic() - self._last < self._every:
      return
    # A line that the terminal wraps would be two to go up.
    width = shutil.get_terminal_size().columns
    text = [line[:width] for line in lines(cells, rows)]
    up = f"\x1b[{self._height}A\x1b[J" if self._height else ""
    print(up + "\n".join(text), file=sys.stderr, flush=True)
    self._height, self._last, self._ended = len(text), time.monotonic(), ended
