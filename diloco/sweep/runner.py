"""The driver: asks the grids what to run, starts runs, books results.

Everything that matters is on disk: the table and, per run, config.json, checkpoints,
summary.json or ended.json. The driver can be killed at any moment and started again.
"""

import dataclasses
import json
import math
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

from diloco.config import ConfigError, resolve
from diloco.sweep import grid as grid_lib
from diloco.sweep.grid import Grid, Point, Search, Sweep
from diloco.sweep.table import Table, digest, git_revision

# Times in a row that a run may vanish without an end (killed, out of memory, node
# lost) before it counts as failed. One that stopped and saved has not vanished.
ATTEMPTS = 5


class Backend(Protocol):
  """Where runs are executed."""

  def start(self, run: pathlib.Path) -> None:
    """Starts the run of a directory."""

  def running(self, run: pathlib.Path) -> bool:
    """Whether a run is queued or running, whoever started it."""

  def slots(self) -> int:
    """How many more runs may be started."""

  def stop(self) -> None:
    """Asks the runs that depend on this process to save and end."""


@dataclasses.dataclass(frozen=True)
class Cell:
  """One cell of one grid with the state of its search."""

  grid: Grid
  cell: Point
  search: Search


class Driver:
  """One pass of `step` after another until nothing is left to run.

  Args:
    sweep: what to run.
    results: the results directory.
    backend: where to run it.
    read_only: for `cells` and `rows` alone; nothing is created or written.

  Raises:
    ValueError: read_only, and there are no results.
  """

  def __init__(
    self,
    sweep: Sweep,
    results: pathlib.Path,
    backend: Backend,
    read_only: bool = False,
  ):
    self._sweep, self._results, self._backend = sweep, results, backend
    self._table = Table(results, read_only)
    self._revision = git_revision()
    self._known = self._table.names()
    self._names: dict[str, str] = {}  # Run's name by the point's key.
    self._configs: dict[str, dict] = {}  # Resolved config by the run's name.
    self._refused: dict[str, str] = {}  # Error by key of points without a config.

  def step(self) -> list[Cell]:
    """Books what has ended, starts what is due; returns all cells."""
    self._collect()
    rows = {row["name"]: row for row in self._table.rows()}
    cells = self.cells(rows)
    self._book_refusals(rows)
    for cell in cells:
      for point in cell.search.todo:
        name = self._name(point)
        if name is None or self._backend.running(self._directory(name)):
          continue
        if self._backend.slots() < 1:
          return cells
        self._start(name, point)
    return cells

  def cells(self, rows: dict[str, dict[str, Any]]) -> list[Cell]:
    """The state of every cell, in the order of the sweep file."""
    losses, found = _Losses(self, rows), list[Cell]()
    by_key: dict[str, Search] = {}
    for grid in self._sweep.grids:
      waiting = list(grid.cells)
      while waiting:
        later = []
        for cell in waiting:
          before = grid.like(cell)
          if before is not None and grid_lib.key(before) not in by_key:
            later.append(cell)
            continue
          state = self._search(grid, cell, before, by_key, losses)
          by_key[grid_lib.key(cell)] = state
          found.append(Cell(grid, cell, state))
        if len(later) == len(waiting):
          raise ValueError(
            f"grid {grid.name!r}: the cell {grid_lib.describe(waiting[0])} starts from"
            f" {grid_lib.describe(grid.like(waiting[0]) or {})}, which no grid up to"
            " this one has; add that cell or change `like`."
          )
        waiting = later
    return found

  def rows(self) -> list[dict[str, Any]]:
    return self._table.rows()

  def forget_failed(self) -> None:
    """Lets failed runs run again."""
    self._table.forget_failed()

  def stop(self) -> None:
    """Ends the runs of this driver (they save) and the table."""
    self._backend.stop()
    self._collect()
    self._table.close()

  def _search(self, grid, cell, before, by_key, losses) -> Search:
    start = None
    if before is not None:
      earlier = by_key[grid_lib.key(before)]
      if earlier.state == "failed":
        return Search([], None, math.inf, "failed")
      if earlier.state not in ("interior", "edge"):
        return Search([], None, math.inf, "waiting")
      start = earlier.best
    return grid_lib.search(grid, cell, start, losses)

  def _start(self, name: str, point: Point) -> None:
    directory = self._directory(name)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(self._configs[name], indent=1))
    part.replace(path)
    for earlier in ("ended.json", "summary.json"):  # Of an attempt that failed.
      (directory / earlier).unlink(missing_ok=True)
    self._table.start(name, point, self._configs[name], self._revision)
    self._table.forget(_refusal(point))  # The sweep file was mended.
    try:
      self._backend.start(directory)
    except (ValueError, OSError):
      self._table.interrupt(name, vanished=0)  # It never started.
      raise

  def _collect(self) -> None:
    """Books the ends of runs that the table still has as running."""
    for row in self._table.rows():
      directory = self._directory(row["name"])
      if row["status"] != "running" or self._backend.running(directory):
        continue
      summary, ended = (
        _read(directory / "summary.json"),
        _read(directory / "ended.json"),
      )
      loss = summary["eval_loss"]["outer"] if summary is not None else 0.0
      if not math.isfinite(loss):
        self._table.fail(
          row["name"],
          f"the held-out loss of the final evaluation is {loss}; see"
          f" {directory / 'metrics.jsonl'}.",
        )
      elif summary is not None:
        self._table.finish(row["name"], summary)
      elif ended is not None and ended["failed"]:
        self._table.fail(row["name"], ended["error"])
      elif ended is not None:
        self._table.interrupt(row["name"], vanished=0)
      elif (vanished := (row["vanished"] or 0) + 1) < ATTEMPTS:
        self._table.interrupt(row["name"], vanished)
      else:
        self._table.fail(
          row["name"],
          f"vanished {vanished} times in a row without an end (killed, or out of"
          f" memory); see {directory / 'log.txt'}.",
        )

  def _name(self, point: Point) -> str | None:
    """The run of a point, None (and noted) if its config cannot work."""
    key = grid_lib.key(point)
    if key in self._refused:
      return None
    if key not in self._names:
      try:
        resolved = resolve(self._sweep.config(dict(point)))
        config = json.loads(json.dumps(resolved.to_dict()))
      except Exception as error:  # Whatever a sweep file does wrong.
        self._refused[key] = _reason(error, point)
        return None
      name = self._known.get(digest(config), digest(config))
      self._names[key], self._configs[name] = name, config
    return self._names[key]

  def _book_refusals(self, rows: dict[str, dict[str, Any]]) -> None:
    """Books points without a config, each once, as runs that failed unstarted."""
    for key, error in self._refused.items():
      row = rows.get(_refusal(json.loads(key)))
      if row is None or row["error"] != error:
        self._table.refuse(_refusal(json.loads(key)), json.loads(key), error)

  def _directory(self, name: str) -> pathlib.Path:
    return self._results / "runs" / name


class _Losses(dict):
  """Loss by key of a point, inf where it failed; absent while it has not ended."""

  def __init__(self, driver: Driver, rows: dict[str, dict[str, Any]]):
    super().__init__()
    self._driver, self._rows = driver, rows

  def __contains__(self, key) -> bool:
    return self._loss(key) is not None

  def __getitem__(self, key):
    return self._loss(key)

  def _loss(self, key: str) -> float | None:
    name = self._driver._name(json.loads(key))
    if name is None:
      return math.inf
    row = self._rows.get(name)
    if row is None or row["status"] in ("running", "interrupted"):
      return None
    # SQLite keeps NaN as NULL; older code booked such runs as done.
    return math.inf if row["loss"] is None else row["loss"]


def drive(
  driver: Driver,
  show: Callable[[list[Cell], list[dict]], None],
  pause: float = 2.0,
) -> bool:
  """Runs a sweep to its end. The caller holds `table.alone` of its results.

  Args:
    driver: of the sweep.
    show: called with cells and rows after every pass.
    pause: seconds between passes.

  Returns:
    False if SIGTERM or SIGINT ended it early.
  """
  stopped = False

  def stop(*_):
    nonlocal stopped
    stopped = True

  previous = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
  try:
    while not stopped:
      cells = driver.step()
      show(cells, driver.rows())
      if not any(c.search.state in ("searching", "waiting") for c in cells):
        break
      time.sleep(pause)
  finally:
    driver.stop()
    for number, handler in previous.items():
      signal.signal(number, handler)
  return not stopped


def _reason(error: Exception, point: Point) -> str:
  """Why a point has no config, in one line."""
  text = " ".join(str(error).split())
  if isinstance(error, ConfigError):
    return text
  if isinstance(error, KeyError):
    return (
      f"the sweep file's config needs {text}, which the point"
      f" {grid_lib.describe(point)} has not; add it to the cells or as an axis."
    )
  return f"the sweep file's config raises {type(error).__name__}: {text}"


def _refusal(point: Point) -> str:
  """Name of the row of a point without a config."""
  return digest({"refused": point})


def _read(path: pathlib.Path) -> dict | None:
  try:
    return json.loads(path.read_text())
  except (FileNotFoundError, json.JSONDecodeError):
    return None
