"""Searches the cells of a sweep: decides the next runs from the losses so far.

Scaling Laws for DiLoCo (arXiv 2503.09799), Section 3.1: a grid grows until its best
point is interior.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from diloco.sweep.grid import Grid, Point, describe, key


@dataclasses.dataclass(frozen=True)
class Search:
  """The progress of the search of one cell.

  Attributes:
    grid, cell: the grid, and its cell that is searched.
    state: waiting (for the cell of `like`), searching, interior, edge or failed.
    points: all points of the cell so far.
    todo: the points that have no result yet.
    best: the point with the least loss so far; None before the first result.
    loss: the loss of `best`.
    edge: names of the axes at whose end the best point lies.
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
    ValueError: a cell starts from a cell that does not come before it.
  """
  latest: dict[str, Search] = {}  # {key of a cell: its newest search}.
  searches = list[Search]()
  for grid in grids:
    for cell in grid.cells:
      source = grid.like(cell)
      if source is not None and key(source) not in latest:
        raise ValueError(
          f"grid {grid.name!r}: the cell {describe(cell)} starts from"
          f" {describe(source)}, which is no earlier cell; add it, or change `like`."
        )
      before = None if source is None else latest[key(source)]
      if before and not before.has_best:
        state = "failed" if before.ended else "waiting"
        latest[key(cell)] = Search(grid, cell, state)
      else:
        latest[key(cell)] = search(grid, cell, before.best if before else None, loss)
      searches.append(latest[key(cell)])
  return searches


def search(grid: Grid, cell: Point, start: Point | None, loss: Loss) -> Search:
  """Searches one cell as far as losses are known.

  `_first_points` come first, then the untried neighbours of the best point along every
  axis. The search ends when the losses of all neighbours of the best point are known
  and no neighbour is better.

  Args:
    grid: the cell's grid.
    cell: a cell of the grid.
    start: the best point of the earlier cell from which this cell starts, if any.
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
