"""The driver of a sweep: asks the grids what to run, and starts and watches runs.

The run directories hold the whole state, so you may kill and restart the driver.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from diloco.checkpoint.record import steps_of
from diloco.config import resolve
from diloco.config.comparable import apart, basis
from diloco.errors import ConfigError
from diloco.spec import plugins
from diloco.sweep import progress, table
from diloco.sweep.grid import Point, Sweep, describe, key, refusal
from diloco.sweep.job import handled
from diloco.sweep.search import Search, search_all
from diloco.sweep.table import Row
from diloco.together import groups
from diloco.tokenizer import vocabulary
from diloco.util import files
from diloco.util.command import one_line
from diloco.util.types import Json

# A run counts as failed after it has vanished (was killed, ran out of memory, lost its
# node) this many times in a row without a newer checkpoint. A run that stopped and
# saved has not vanished.
ATTEMPTS = 5


class Backend(Protocol):
  """Executes runs.

  Attributes:
    detached: whether runs are jobs that outlive this process. If they are, a signal may
      interrupt `start` and `running`, which may wait long for another program.
  """

  detached: bool

  def start(self, *runs: pathlib.Path) -> None:
    """Starts one process that trains the runs of some directories."""

  def running(self, run: pathlib.Path) -> bool:
    """Tells whether a run is queued or running, no matter which driver started it."""

  def stop(self) -> None:
    """Asks the runs that depend on this process to save and end; waits for them."""

  def kill(self) -> None:
    """Kills the runs that depend on this process."""


@dataclasses.dataclass(frozen=True)
class Plan:
  """The run of a point: its name and config, or the error if the config is invalid."""

  point: Point
  name: str
  config: Json
  error: str = ""


class Driver:
  """Runs a sweep, one `step` after another.

  Args:
    results: the results directory; only `step` and `settle` write there.
      None: there are no runs, and no run is started.
    backend: executes the runs.
    parallel: the most processes at a time, including those of an earlier driver.
    vectorize: the most runs that one process trains together.

  Attributes:
    rows: the rows of all runs by name, after the last step.
  """

  def __init__(
    self,
    sweep: Sweep,
    results: pathlib.Path | None,
    backend: Backend,
    parallel: int = 1,
    vectorize: int = 1,
  ):
    self.sweep, self.results, self.backend = sweep, results, backend
    self.parallel, self.vectorize = parallel, vectorize
    self.rows = table.read_rows(results)
    self._plans: dict[str, Plan] = {}  # {key of the point: its plan}.

  @functools.cached_property
  def _names(self) -> dict[str, str]:
    """Names of runs by the digest of their configs, computed at the first use.

    Some configs need plug-ins, which the sweep file has imported by then.
    """
    return table.names_by_digest(self.rows)

  def step(self) -> list[Search]:
    """Notes vanished runs and starts new runs; returns all cells."""
    self.settle()
    cells = self.cells()
    for plan in self.refused():
      directory = self._path(plan.name)
      table.note(directory, point=plan.point)
      table.note_end(directory, failed=True, error=plan.error)
      self.rows[plan.name] = table.read_row(directory)
    todo = self.todo(cells)
    # Does not ask the backend again: a run that ended after `settle` would restart.
    alive = {name for name, row in self.rows.items() if row["status"] == "running"}
    # Slurm may have put an interrupted run back into its queue.
    alive |= {n for n in todo if n not in alive and self.backend.running(self._path(n))}
    busy = {self.rows.get(name, {}).get("group") or name for name in alive}
    due = {name: plan.config for name, plan in todo.items() if name not in alive}
    together = groups.split(due, self.vectorize)
    for names in together[: max(self.parallel - len(busy), 0)]:
      self._start([todo[name] for name in names])
    return cells

  def cells(self) -> list[Search]:
    """Searches all cells; the losses come from `rows`.

    Raises:
      ConfigError: the losses cannot be compared.
    """
    cells = search_all(self.sweep.grids, self._loss)
    table.check_texts(self.asked(cells))
    for cell in cells:
      configs = [c for point in cell.points if (c := self._plan(point).config)]
      for c in configs[1:]:
        if differences := apart(basis(configs[0], {}), basis(c, {})):
          raise ConfigError(
            f"the cell {describe(cell.cell)} has points that differ in"
            f" {' and '.join(differences)}, so their losses cannot be compared; give"
            " each value a cell."
          )
    return cells

  def todo(self, cells: list[Search]) -> dict[str, Plan]:
    """Returns the runs without a result that the cells ask for, by name."""
    todo: dict[str, Plan] = {}
    for plan in [self._plan(point) for cell in cells for point in cell.todo]:
      todo.setdefault(plan.name, plan)
    return todo

  def least(self) -> list[Plan]:
    """Returns the runs to come if no search finds a point better than its best so far.

    A search that has not begun is assumed to start at its best point. So at least these
    runs are left.
    """
    assumed: dict[str, float] = {}

    def loss(point: Point) -> float:
      known = self._loss(point)
      # Each assumed loss exceeds all known losses and all earlier assumed losses.
      return (
        known
        if known is not None
        else assumed.setdefault(key(point), 1e9 + len(assumed))
      )

    cells = search_all(self.sweep.grids, loss)
    plans = [self._plan(point) for cell in cells for point in cell.points]
    return [*{p.name: p for p in plans if key(p.point) in assumed}.values()]

  def best_rows(self) -> list[tuple[Search, Row | None]]:
    """Returns all cells, each with the row of its best run."""
    row = lambda best: self.rows.get(self._plan(best).name) if best else None
    return [(cell, row(cell.best)) for cell in self.cells()]

  def asked(self, cells: list[Search]) -> list[Row]:
    """Returns the rows of the runs that the cells have asked for so far."""
    names = dict.fromkeys(self._plan(p).name for cell in cells for p in cell.points)
    return [self.rows[name] for name in names if name in self.rows]

  def refused(self) -> list[Plan]:
    """Returns the plans without a valid config, if no row has their error yet."""
    noted = lambda plan: self.rows.get(plan.name, {}).get("error")
    return [p for p in self._plans.values() if p.error and p.error != noted(p)]

  def settle(self, stopped: bool = False) -> None:
    """Reads all runs, and notes the ends of runs that are no longer running.

    Args:
      stopped: whether the backend stopped or killed these runs. If it did, the runs do
        not count as vanished.
    """
    self.rows = table.read_rows(self.results, self.rows)
    for name, row in self.rows.items():
      if row["status"] == "running" and not self.backend.running(row["folder"]):
        self.rows[name] = _settled(row["folder"], stopped)

  def _loss(self, point: Point) -> float | None:
    """Returns the loss of a point's run: inf if it failed, None if it has not ended."""
    plan = self._plan(point)
    row = self.rows.get(plan.name)
    if plan.error or (row and row["status"] == "failed"):
      return math.inf
    return row["loss"] if row else None

  def _plan(self, point: Point) -> Plan:
    name = key(point)
    if name not in self._plans:
      self._plans[name] = self._make_plan(point)
    return self._plans[name]

  def _make_plan(self, point: Point) -> Plan:
    try:
      config = table.as_json(resolve(self.sweep.config(dict(point))))
    except Exception as error:
      return Plan(point, _refused_name(point), {}, one_line(refusal(point, error)))
    name = table.digest(config)
    return Plan(point, self._names.get(name, name), config)

  def _start(self, plans: Sequence[Plan]) -> None:
    for plan in plans:
      vocabulary.check_data(plan.config["data"])
    revision = table.git_revision()  # The runs import the code as it is now.
    directories = [self._prepare(plan, plans[0].name, revision) for plan in plans]
    try:
      self.backend.start(*directories)
    except (ValueError, OSError):
      for directory in directories:
        table.note(directory, running=False)
      raise

  def _prepare(self, plan: Plan, group: str, revision: str) -> pathlib.Path:
    """Writes config and notes of a run that starts now; returns its folder."""
    directory = self._path(plan.name)
    row = table.read_row(directory)
    files.write_json(directory / "config.json", plan.config)
    plugins.keep(plan.config["plugins"], directory)
    table.note(
      directory,
      point=row["point"] or plan.point,
      group=group,
      revision=revision,
      attempts=row["attempts"] + 1,
      vanished=row["vanished"],
      running=True,
    )
    table.forget_end(directory)
    # Deletes the row that the point has if its config was not valid earlier.
    shutil.rmtree(self._path(_refused_name(plan.point)), ignore_errors=True)
    self.rows[plan.name] = table.read_row(directory)
    return directory

  def _path(self, name: str) -> pathlib.Path:
    assert self.results  # Without a results directory, no run starts.
    return self.results / "runs" / name


def drive(
  driver: Driver,
  show: Callable[[list[Search], Collection[Row]], None],
  pause: float = 2.0,
) -> int:
  """Runs a sweep to its end. The caller must hold the lock of `table.alone`.

  SIGINT (Ctrl-C) and SIGTERM stop the sweep: the backend's runs save and end. A second
  signal kills these runs.

  Args:
    driver: runs the sweep, one step after another.
    show: called after every step with all cells and the rows of their runs.
    pause: seconds between steps.

  Returns:
    The exit status: 128 + the signal that stopped the sweep early, 1 if a cell has
    failed, else 0.
  """
  received: list[int] = []
  # A signal may interrupt a step only if jobs outlive the driver. Otherwise `stop`
  # might not know the run that was just started.
  interruptible = driver.backend.detached
  ended = False

  def receive(number: int, frame: object) -> None:
    received.append(number)
    if interruptible:
      raise KeyboardInterrupt

  with handled((signal.SIGTERM, signal.SIGINT), receive):
    try:
      while not received:
        cells = driver.step()
        show(cells, driver.asked(cells))
        if ended := all(cell.ended for cell in cells):
          # The processes of the last runs end by themselves.
          return int(any(cell.state == "failed" for cell in cells))
        end = time.monotonic() + pause
        while not received and time.monotonic() < end:
          time.sleep(min(pause, 0.1))
    except KeyboardInterrupt:
      pass
    finally:
      with contextlib.suppress(KeyboardInterrupt):
        interruptible = True
        if len(received) < 2 and not ended:
          driver.backend.stop()
      interruptible = False
      if len(received) > 1:
        driver.backend.kill()
  if not driver.backend.detached:
    driver.settle(stopped=True)
  cells = driver.cells()
  waiting = len(driver.todo(cells).keys() - driver.rows.keys())
  rows = driver.asked(cells)
  print(progress.stopped(received[0], cells, rows, waiting), file=sys.stderr)
  return 128 + received[0]


def _settled(directory: pathlib.Path, stopped: bool) -> Row:
  """Notes the end of a run that is no longer running; returns its row.

  The job may have noted the end after the caller read the row. If neither the job nor
  the trainer noted an end, the run has vanished, unless it was `stopped`.
  """
  row = table.read_row(directory)
  step = max(steps_of(directory), default=0)
  earlier = row["vanished"] if step <= row["saved"] else 0
  vanished = earlier + (not stopped)
  if row["status"] != "running":
    return row
  if files.read_json(directory / "summary.json"):
    table.note_end(directory, failed=False)
  elif stopped or vanished < ATTEMPTS:
    table.note(directory, running=False, vanished=vanished, saved=step)
  else:
    log = directory / "log.txt"
    why = f"killed or out of memory, unless {log} says why"
    error = f"vanished {vanished} times in a row ({why})."
    table.note_end(directory, failed=True, error=error)
  return table.read_row(directory)


def _refused_name(point: Point) -> str:
  """Returns the name of the row for a point without a valid config."""
  return table.digest({"refused": point})
