"""Decides what a sweep tries: cells, hyperparameters to tune, and the next runs.

Scaling Laws for DiLoCo (arXiv 2503.09799), Section 3.1: learning rates are powers of
sqrt 2, batches are powers of 2, and a grid grows until its best point is interior.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_collections

if TYPE_CHECKING:
  from diloco.sweep.chart import Chart

Point = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Axis:
  """One tuned hyperparameter.

  Attributes:
    name: its key in a point.
    values: without a ratio, all values; with a ratio, the values to try first.
    first: without a ratio, the values to try first; empty: all values.
    ratio: all values are powers of the ratio, and the axis grows in both directions. 0:
      the axis does not grow.
    low, high: the least and the greatest value to which the axis may grow.

  Raises:
    ValueError: there are no values, a value occurs twice or is no power of the ratio,
      the ratio cannot make an axis grow, or `first` has other values.
  """

  name: str
  values: tuple[float, ...]
  first: tuple[float, ...] = ()
  ratio: float = 0.0
  low: float = 0.0
  high: float = math.inf

  def __post_init__(self):
    _check_list(f"the values of axis {self.name!r}", self.values)
    if not self.values:
      raise ValueError(f"axis {self.name!r} is empty; give it values.")
    if len(set(self.values)) < len(self.values):
      raise ValueError(f"axis {self.name!r} has a value twice: {self.values}.")
    if not self.ratio and not {*self.first} <= {*self.values}:
      raise ValueError(
        f"axis {self.name!r} begins with {self.first}, which are not all among its"
        f" values {self.values}; add them."
      )
    if self.ratio and not (1 < self.ratio < math.inf and min(self.values) > 0):
      raise ValueError(
        f"axis {self.name!r} has the ratio {self.ratio} and the values {self.values};"
        " give a ratio above 1 and positive values, or leave the ratio out."
      )
    for value in self.values if self.ratio else ():
      near = power(self.ratio, exponent(self.ratio, value))
      if value != near:
        raise ValueError(
          f"axis {self.name!r} has the value {value}, which is no power of its ratio"
          f" {self.ratio:g}; the nearest is {near} (see powers())."
        )

  def neighbours(self, value: float) -> list[float]:
    """Returns the values next to `value` on both sides, if the axis has them.

    Raises:
      ValueError: the axis does not grow, and `value` is not one of its values; or it
        grows by a ratio, and `value` is not positive.
    """
    if self.ratio and value <= 0:
      raise ValueError(
        f"axis {self.name!r} has the ratio {self.ratio:g}, but starts from {value};"
        " leave the ratio out, or change `like`."
      )
    if not self.ratio:
      if value not in self.values:
        raise ValueError(
          f"axis {self.name!r} starts from {value}, which is none of {self.values};"
          " add the value, or change `like`."
        )
      i = self.values.index(value)
      return [self.values[j] for j in (i - 1, i + 1) if 0 <= j < len(self.values)]
    near = [power(self.ratio, exponent(self.ratio, value) + d) for d in (-1, 1)]
    return [v for v in near if self.low <= v <= self.high]

  def check_start(self, source: "Axis") -> None:
    """Checks that the axis can start from every value that another may end at.

    Raises:
      ValueError: it cannot; see `neighbours`.
    """
    ends = list(source.values)
    for value in ends:  # Gets longer, until a fixed axis refuses a value or has all.
      self.neighbours(value)
      if not self.ratio:
        ends += [near for near in source.neighbours(value) if near not in ends]

  def beside(self, point: Point) -> list[Point]:
    """Returns the points next to `point` along the axis."""
    return [{**point, self.name: v} for v in self.neighbours(point[self.name])]

  def ends_at(self, point: Point) -> bool:
    """Tells whether a point lies on a bound. A single fixed value is not a bound."""
    alone = not self.ratio and len(self.values) == 1
    return not alone and len(self.beside(point)) < 2


@dataclasses.dataclass(frozen=True)
class Grid:
  """Cells in which the same axes are tuned.

  Attributes:
    name: the name shown with its cells.
    cells: cases to compare, e.g. {'size': 's1', 'algorithm': 'diloco', 'replicas': 2}.
    axes: the axes tuned in every cell; without axes, a cell is one run.
    like: maps a cell to the earlier cell whose best point it starts from, or to None.
      That point gives all values that this cell does not set, also values of axes that
      both cells tune.

  Raises:
    ValueError: a cell or an axis occurs twice in the grid, or a cell sets the value of
      an axis.
  """

  name: str
  cells: Sequence[Point]
  axes: Sequence[Axis] = ()
  like: Callable[[Point], Point | None] = lambda cell: None

  def __post_init__(self):
    _check_list(f"the cells of grid {self.name!r}", self.cells, dict)
    _check_list(f"the axes of grid {self.name!r}", self.axes, Axis)
    names = [axis.name for axis in self.axes]
    for name in names:
      if names.count(name) > 1:
        raise ValueError(f"grid {self.name!r} has the axis {name!r} twice.")
    keys = [key(cell) for cell in self.cells]
    for cell in self.cells:
      if keys.count(key(cell)) > 1:
        raise ValueError(f"grid {self.name!r} has the cell {describe(cell)} twice.")
      for name in {*names} & {*cell}:
        raise ValueError(
          f"grid {self.name!r} tunes {name}, but its cell {describe(cell)} sets {name};"
          " leave it out of the cell, or drop the axis."
        )


@dataclasses.dataclass(frozen=True)
class Sweep:
  """A whole sweep, which `get_sweep()` of a sweep file returns.

  Attributes:
    config: makes the config of a point.
    grids: the grids, in the order of search. A later grid may search the cells of an
      earlier grid along more axes.
    environment: additional environment variables of the runs' processes.
    chart: how to compare the cells in a table and a figure; None: not at all.

  Raises:
    ValueError: there is no cell, an environment variable is not a text, or the chart
      asks for what no point has.
  """

  config: Callable[[Point], ml_collections.ConfigDict]
  grids: Sequence[Grid]
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  chart: "Chart | None" = None

  def __post_init__(self):
    _check_list("the grids of a sweep", self.grids, Grid)
    if not any(grid.cells for grid in self.grids):
      raise ValueError("the sweep has no cell to run; give its grids cells.")
    for name, value in self.environment.items():
      if not isinstance(value, str):
        raise ValueError(f"environment has {name}={value!r}; give the value as a text.")
    if self.chart:
      axes = {axis.name for grid in self.grids for axis in grid.axes}
      self.chart.check(
        axes.union(*(cell for grid in self.grids for cell in grid.cells))
      )


def _check_list(name: str, values: object, kind: type = object) -> None:
  """Raises a ValueError unless `values` is a list, a tuple or a range of `kind`.

  A generator is refused, because it would be empty when it is read again.
  """
  if not isinstance(values, list | tuple | range):
    raise ValueError(f"{name} are {values!r}; give a list or a tuple.")
  for value in values:
    if not isinstance(value, kind):
      raise ValueError(f"{name} have {value!r}, which is no {kind.__name__}.")


@dataclasses.dataclass(frozen=True)
class Search:
  """The progress of the search of one cell.

  Attributes:
    grid, cell: the searched cell and its grid.
    state: waiting (for the cell in `like`), searching, interior, edge or failed.
    points: all points of the cell so far.
    todo: the points that have no result yet.
    best: the point with the least loss so far; None before the first result.
    loss: the loss of `best`.
    edge: the axes whose bound the best point touches.
  """

  grid: Grid
  cell: Point
  state: str
  points: Sequence[Point] = ()
  todo: Sequence[Point] = ()
  best: Point | None = None
  loss: float = math.inf
  edge: Sequence[str] = ()

  @property
  def ended(self) -> bool:
    return self.has_best or self.state == "failed"

  @property
  def has_best(self) -> bool:
    """Whether the search has ended, and `best` is its result."""
    return self.state in ("interior", "edge")


# The loss of a point: inf if its run failed, None if the run has not ended.
Loss = Callable[[Point], float | None]


def search_all(grids: Sequence[Grid], loss: Loss) -> list[Search]:
  """Searches all cells of all grids, in order.

  Raises:
    ValueError: a cell starts from a cell that is not an earlier one.
  """
  latest: dict[str, Search] = {}  # By the cell's key.
  found = list[Search]()
  for grid in grids:
    for cell in grid.cells:
      source = grid.like(cell)
      if source is not None and key(source) not in latest:
        raise ValueError(
          f"grid {grid.name!r}: the cell {describe(cell)} starts from"
          f" {describe(source)}, which is no earlier cell; add it, or change `like`."
        )
      before = None if source is None else latest[key(source)]
      latest[key(cell)] = _search_after(before, grid, cell, loss)
      found.append(latest[key(cell)])
  return found


def check_starts(grids: Sequence[Grid]) -> None:
  """Checks that every axis can start from all values that `like` may give it.

  Args:
    grids: every cell starts from an earlier one; see `search_all`.

  Raises:
    ValueError: a cell may start from a value that an axis does not have.
  """
  known: dict[str, dict[str, Axis]] = {}  # The values of each name, by the cell's key.
  for grid in grids:
    for cell in grid.cells:
      source = grid.like(cell)
      start = {} if source is None else known[key(source)]
      for axis in grid.axes:
        if axis.name in start:
          axis.check_start(start[axis.name])
      given = {name: Axis(name, (value,)) for name, value in cell.items()}
      tuned = {axis.name: axis for axis in grid.axes}
      known[key(cell)] = start | given | tuned


def _search_after(before: Search | None, grid: Grid, cell: Point, loss: Loss) -> Search:
  if before is None:
    return search(grid, cell, None, loss)
  if before.ended and before.best is not None:
    return search(grid, cell, before.best, loss)
  return Search(grid, cell, "failed" if before.ended else "waiting")


def search(grid: Grid, cell: Point, start: Point | None, loss: Loss) -> Search:
  """Searches one cell as far as losses are known.

  The points of the first grid come first, then the missing neighbours of the best point
  along every axis. The search ends when both neighbours of every axis are known and
  none is better.

  Args:
    grid: the cell's grid.
    cell: a cell of the grid.
    start: the best point of the cell from which this one starts, if any.
    loss: the loss of a point.
  """
  points = _first_points(grid, cell, start or {})
  while True:
    losses = [loss(point) for point in points]
    todo = [p for p, value in zip(points, losses) if value is None]
    ended = [(value, p) for p, value in zip(points, losses) if value is not None]
    least, best = min(ended, key=lambda pair: pair[0], default=(math.inf, None))
    if todo:
      return Search(grid, cell, "searching", points, todo, best, least)
    if best is None or least == math.inf:
      return Search(grid, cell, "failed", points)
    near = [point for axis in grid.axes for point in axis.beside(best)]
    missing = [point for point in near if point not in points]
    if not missing:
      edge = [axis.name for axis in grid.axes if axis.ends_at(best)]
      state = "edge" if edge else "interior"
      return Search(grid, cell, state, points, [], best, least, edge)
    points += missing


def _first_points(grid: Grid, cell: Point, start: Point) -> list[Point]:
  axes = [axis for axis in grid.axes if axis.name not in start]
  choices = itertools.product(*(axis.first or axis.values for axis in axes))
  names = [axis.name for axis in axes]
  return [{**start, **cell, **dict(zip(names, values))} for values in choices]


def key(point: Mapping[str, Any]) -> str:
  """Returns a text that identifies a point; the order of its fields does not matter."""
  return json.dumps(point, sort_keys=True)


def describe(point: Mapping[str, Any]) -> str:
  """Formats a point as readable text: size=s1 algorithm=diloco."""
  short = lambda value: f"{value:.4g}" if isinstance(value, float) else value
  return " ".join(f"{name}={short(value)}" for name, value in point.items())


def power(ratio: float, k: int) -> float:
  """Returns ratio^k, rounded so that the result is always the same number.

  The result has six digits. It is an int if it is a whole number.
  """
  value = float(f"{ratio**k:.6g}")
  return int(value) if value == int(value) else value


def exponent(ratio: float, value: float) -> int:
  """Returns the k for which ratio^k is nearest to `value`."""
  return round(math.log(value) / math.log(ratio))


def powers(ratio: float, low: int, high: int) -> tuple[float, ...]:
  """Returns ratio^low, ..., ratio^high."""
  return tuple(power(ratio, k) for k in range(low, high + 1))
