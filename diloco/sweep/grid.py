"""Defines what a sweep compares: cells, and hyperparameters to tune in each cell.

Scaling Laws for DiLoCo (arXiv 2503.09799), Section 3.1: learning rates are powers of
sqrt 2, batches are powers of 2.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence

import ml_collections

from diloco.errors import ConfigError
from diloco.sweep.chart import Chart
from diloco.util.command import one_line
from diloco.util.types import Json

Point = Json


@dataclasses.dataclass(frozen=True)
class Axis:
  """One tuned hyperparameter.

  Attributes:
    name: the hyperparameter's key in a point.
    values: without a ratio, all values; with a ratio, the values to try first.
    first: without a ratio, the values to try first; empty: all values.
    ratio: if not 0, all values are powers of this ratio, and the search extends the
      axis in both directions. 0: the axis does not grow.
    low, high: the least and the greatest value to which the axis may grow.

  Raises:
    ValueError: there are no values, a value occurs twice or is no power of the ratio,
      the ratio cannot make an axis grow, or `first` has a value that `values` lacks.
  """

  name: str
  values: tuple[float, ...]
  first: tuple[float, ...] = ()
  ratio: float = 0.0
  low: float = 0.0
  high: float = math.inf

  def __post_init__(self) -> None:
    _check_list(f"the values of axis {self.name!r}", self.values)
    if not self.values:
      raise ValueError(f"axis {self.name!r} is empty; give it values.")
    if len(set(self.values)) < len(self.values):
      raise ValueError(f"axis {self.name!r} has a value twice: {self.values}.")
    # The neighbours of a number are its neighbours in the list.
    if all(isinstance(value, int | float) for value in self.values):
      object.__setattr__(self, "values", tuple(sorted(self.values)))
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
      ValueError: the axis does not grow, and `value` is not one of its values; or
        the axis grows by a ratio, and `value` is not positive.
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

  def beside(self, point: Point) -> list[Point]:
    """Returns the points next to `point` along the axis."""
    return [{**point, self.name: v} for v in self.neighbours(point[self.name])]

  def ends_at(self, point: Point) -> bool:
    """Tells whether a point is at an end of the axis; one fixed value has no end."""
    alone = not self.ratio and len(self.values) == 1
    return not alone and len(self.beside(point)) < 2


@dataclasses.dataclass(frozen=True)
class Grid:
  """Cells in which the same axes are tuned.

  Attributes:
    name: the name that tables show with the grid's cells.
    cells: cases to compare, e.g. {'size': 's1', 'algorithm': 'diloco', 'replicas': 2}.
    axes: the axes tuned in every cell; without axes, a cell is one run.
    like: maps a cell to an earlier cell, or to None. The search of the cell starts from
      the best point of the earlier cell. That point gives all values that the cell does
      not set, also values of axes that both cells tune.

  Raises:
    ValueError: the grid has a cell or an axis twice, or a cell sets a value of an axis.
  """

  name: str
  cells: Sequence[Point]
  axes: Sequence[Axis] = ()
  like: Callable[[Point], Point | None] = lambda cell: None

  def __post_init__(self) -> None:
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
    chart: how to compare the cells in a table and a figure; None: no comparison.

  Raises:
    ValueError: there is no cell, an environment variable is not a text, or the chart
      asks for a key that no point has.
  """

  config: Callable[[Point], ml_collections.ConfigDict]
  grids: Sequence[Grid]
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  chart: Chart | None = None

  def __post_init__(self) -> None:
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

  A generator is refused, because a second loop over it would find nothing.
  """
  if not isinstance(values, list | tuple | range):
    raise ValueError(f"{name} are {values!r}; give a list or a tuple.")
  for value in values:
    if not isinstance(value, kind):
      raise ValueError(f"{name} have {value!r}, which is no {kind.__name__}.")


def key(point: Json) -> str:
  """Returns a text that identifies a point; the order of its fields does not matter."""
  return json.dumps(point, sort_keys=True)


def describe(point: Json) -> str:
  """Formats a point as readable text, such as size=s1 algorithm=diloco."""
  short = lambda value: f"{value:.4g}" if isinstance(value, float) else value
  return " ".join(f"{name}={short(value)}" for name, value in point.items())


def refusal(point: Point, error: Exception) -> ConfigError:
  """Returns what a user reads if the config of a point raised `error`."""
  if isinstance(error, ConfigError):
    return error
  kind, reason = type(error).__name__, one_line(error)  # A sweep file may raise any.
  return ConfigError(
    f"the sweep file's config at the point {describe(point)} raises {kind}: {reason}."
  )


def power(ratio: float, k: int) -> float:
  """Returns ratio^k, rounded to six digits, so that equal powers are equal numbers.

  The result is an int if it is a whole number.
  """
  value = float(f"{ratio**k:.6g}")
  return int(value) if value == int(value) else value


def exponent(ratio: float, value: float) -> int:
  """Returns the k for which ratio^k is nearest to `value`."""
  return round(math.log(value) / math.log(ratio))


def powers(ratio: float, low: int, high: int) -> tuple[float, ...]:
  """Returns ratio^low, ..., ratio^high."""
  return tuple(power(ratio, k) for k in range(low, high + 1))
