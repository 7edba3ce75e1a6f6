"""Describes the chart that `diloco.reproduce.comparison` draws. Imports no JAX."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

PLAIN = "data-parallel"
ACCURACY = "accuracy (%)"
LOSS = "held-out loss (nats per token)"
# The x of a chart that compares a run's first replica, the mean of its replicas and its
# outer parameters (2501.18512, table 3).
EVALUATED = "evaluated"
# Columns that `comparison.frame` adds to the keys of the points.
_ADDED = (EVALUATED, "choice", "loss", "more", "accuracy", "bytes", "per_token", "seed")


@dataclasses.dataclass(frozen=True)
class Chart:
  """How the cells of a sweep are compared.

  Attributes:
    title: title of the figure.
    x: the key of the points along the x axis, or EVALUATED.
    by: keys of the points; points with equal values of these keys form a curve.
    xlabel: label of the x axis.
    log: whether the x axis is logarithmic.
    y: (column, label) of each panel. A column is `loss`, `more`, `accuracy` or a key of
      the points, such as a tuned rate. A panel without any value is left out.
    against: the point with which each point is compared. "": the sweep's first cell.
      PLAIN: the data-parallel point at the same x. Any other text: a key of the points,
      whose value is the x of the point to compare with.
    along: the column with the numbers of the x axis; "" means the column `x`.
    words: {key: {value: the text that the table and the figure show instead}}.
  """

  title: str
  x: str
  by: tuple[str, ...] = ()
  xlabel: str = ""
  log: bool = False
  y: tuple[tuple[str, str], ...] = (("loss", LOSS),)
  against: str = ""
  along: str = ""
  words: Mapping[str, Mapping[Any, str]] = dataclasses.field(default_factory=dict)

  @property
  def by_name(self) -> bool:
    """Whether `against` is a key, whose value is the x of the point to compare with."""
    return self.against not in ("", PLAIN)

  def check(self, keys: Collection[str]) -> None:
    """Raises a ValueError if the chart asks for a key that no point has."""
    asked = {self.x, *self.by, *(column for column, _ in self.y)}
    asked |= {self.along} if self.along else set()
    if self.against:
      asked.add("algorithm" if self.against == PLAIN else self.against)
    for name in sorted(asked - {*keys, *_ADDED}):
      raise ValueError(
        f"the chart asks for {name!r}, which no cell or axis has; they have"
        f" {', '.join(sorted(keys))}."
      )
