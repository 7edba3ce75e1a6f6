"""What a sweep tries: cells, the hyperparameters tuned in each, and what to run next.

Scaling Laws for DiLoCo (arXiv 2503.09799), Section 3.1: learning rates are powers of
sqrt 2, batches powers of 2, and a grid is extended until its best point is interior.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

Point = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Axis:
  """One tuned hyperparameter.

  Attributes:
    name: its key in a point.
    values: the first values to try; of a closed axis all that there are.
    first: of a closed axis, those to try first; empty: all.
    ratio: values are powers of it, and the axis grows in both directions; 0 closes
      the axis.
    low, high: bounds that growing respects.
  """

  name: str
  values: tuple[float, ...]
  first: tuple[float, ...] = ()
  ratio: float = 0.0
  low: float = 0.0
  high: float = math.inf

  def neighbours(self, value: float) -> list[float]:
    """The values next to `value` on either side, as far as the axis allows."""
    if not self.ratio:
      i = self.values.index(value)
      return [self.values[j] for j in (i - 1, i + 1) if 0 <= j < len(self.values)]
    near = [power(self.ratio, exponent(self.ratio, value) + d) for d in (-1, 1)]
    return [v for v in near if self.low <= v <= self.high]


@dataclasses.dataclass(frozen=True)
class Grid:
  """Cells, in each of which the same axes are tuned.

  Attributes:
    name: of the grid, for the table.
    cells: what is compared, e.g. {'size': 's1', 'algorithm': 'diloco', 'replicas': 2}.
    axes: what is tuned in every cell; without any, a cell is one run.
    like: maps a cell to another whose best point this one starts from, or to None.
      The values of all axes that the two share come from there, as do those that
      the cell does not set. The other cell is searched first.
  """

  name: str
  cells: Sequence[Point]
  axes: Sequence[Axis] = ()
  like: Callable[[Point], Point | None] = lambda cell: None


@dataclasses.dataclass(frozen=True)
class Sweep:
  """A whole sweep, as a sweep file's `get_sweep()` returns it.

  Attributes:
    config: makes the config of a point.
    grids: searched in order; a cell may start from one of an earlier or the same. A
      later grid may search the cells of an earlier one along more axes.
    environment: variables of the runs' processes.
  """

  config: Callable[[Point], ml_collections.ConfigDict]
  grids: Sequence[Grid]
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    for grid in self.grids:
      seen: set[str] = set()
      for cell in grid.cells:
        if key(cell) in seen:
          raise ValueError(
            f"grid {grid.name!r} has the cell {describe(cell)} twice; each cell of a"
            " grid is searched once: remove one."
          )
        seen.add(key(cell))
      for axis in grid.axes:
        _check_axis(grid, axis)


@dataclasses.dataclass(frozen=True)
class Search:
  """How far the search of one cell has come.

  Attributes:
    todo: points to run now.
    best: the point with the least loss so far, None before the first result.
    loss: its loss.
    state: waiting (for the cell it starts from), searching, interior, edge or failed.
    edge: the axes whose bound the best point touches.
    points: all points that belong to the cell so far.
  """

  todo: list[Point]
  best: Point | None
  loss: float
  state: str
  edge: tuple[str, ...] = ()
  points: tuple[Point, ...] = ()


def search(
  grid: Grid, cell: Point, start: Point | None, losses: Mapping[str, float]
) -> Search:
  """What to run next in a cell.

  Args:
    grid: the cell's grid.
    cell: one of its cells.
    start: the best point of the cell it starts from, None without one.
    losses: loss by `key(point)` of every finished run, inf for one that failed.

  Returns:
    The points of the first grid that have no result; after that the missing
    neighbours of the best point along every axis; nothing once both neighbours of
    each axis are there and no better.
  """
  points = _first_points(grid, cell, start)
  known = {key(p) for p in points}
  while True:
    todo = [p for p in points if key(p) not in losses]
    done = [p for p in points if key(p) in losses]
    best = min(done, key=lambda p: losses[key(p)], default=None)
    loss = losses[key(best)] if best else math.inf
    if todo:
      return Search(todo, best, loss, "searching", points=tuple(points))
    assert best is not None
    if loss == math.inf:
      return Search([], None, loss, "failed", points=tuple(points))
    grown = [p for a in grid.axes for p in _beside(a, best) if key(p) not in known]
    if not grown:
      edge = tuple(a.name for a in grid.axes if _touches(a, best))
      state = "edge" if edge else "interior"
      return Search([], best, loss, state, edge, tuple(points))
    points += grown
    known |= {key(p) for p in grown}


def key(point: Mapping[str, Any]) -> str:
  """A point's identity, whatever the order of its fields."""
  return json.dumps(point, sort_keys=True)


def describe(point: Mapping[str, Any]) -> str:
  """A point for people: size=s1 algorithm=diloco."""
  return " ".join(f"{k}={_short(v)}" for k, v in point.items())


def power(ratio: float, k: int) -> float:
  """ratio^k to six digits, an int where it is whole: the same number every time."""
  value = float(f"{ratio**k:.6g}")
  return int(value) if value == int(value) else value


def exponent(ratio: float, value: float) -> int:
  """The k of the power of `ratio` that is nearest to `value`."""
  return round(math.log(value) / math.log(ratio))


def powers(ratio: float, low: int, high: int) -> tuple[float, ...]:
  """ratio^low ... ratio^high."""
  return tuple(power(ratio, k) for k in range(low, high + 1))


def _first_points(grid: Grid, cell: Point, start: Point | None) -> list[Point]:
  if start is None:
    values = itertools.product(*(a.first or a.values for a in grid.axes))
    names = [a.name for a in grid.axes]
    return [{**cell, **dict(zip(names, v))} for v in values]
  inherited = {**start, **cell}
  missing = [a for a in grid.axes if a.name not in start]
  values = itertools.product(*(a.first or a.values for a in missing))
  return [{**inherited, **dict(zip((a.name for a in missing), v))} for v in values]


def _beside(axis: Axis, point: Point) -> list[Point]:
  return [{**point, axis.name: v} for v in axis.neighbours(point[axis.name])]


def _touches(axis: Axis, point: Point) -> bool:
  alone = not axis.ratio and len(axis.values) == 1
  return not alone and len(axis.neighbours(point[axis.name])) < 2


def _check_axis(grid: Grid, axis: Axis) -> None:
  if not axis.values:
    raise ValueError(
      f"axis {axis.name!r} of grid {grid.name!r} is empty; give it values."
    )
  if len(set(axis.values)) < len(axis.values):
    raise ValueError(
      f"axis {axis.name!r} of grid {grid.name!r} has a value twice in {axis.values};"
      " remove one."
    )
  for value in axis.values if axis.ratio else ():
    if value != power(axis.ratio, exponent(axis.ratio, value)):
      near = power(axis.ratio, exponent(axis.ratio, value))
      raise ValueError(
        f"axis {axis.name!r} of grid {grid.name!r} has the value {value}, which is no"
        f" power of its ratio {axis.ratio:g}; the nearest is {near} (powers())."
      )


def _short(value) -> str:
  return f"{value:.4g}" if isinstance(value, float) else str(value)
