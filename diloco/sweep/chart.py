"""What the chart of a sweep shows; `diloco.reproduce.comparison` draws it. No JAX."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

PLAIN = "data-parallel"
ACCURACY = "accuracy (%)"
LOSS = "held-out loss (nats per token)"
# The x of a chart that compares the parameters of a run (2501.18512, table 3).
EVALUATED = "evaluated"
# Columns that `frame` adds to the keys of the points.
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
      the points, such as a tuned rate. Without any accuracy, its panel is left out.
    against: chooses the point with which a point is compared. Empty: the sweep's first
      cell. PLAIN: data-parallel at the same x. Else a key of the points, whose value is
      the x of the other point.
    along: the column with the numbers of the x axis; "": `x`.
    words: {key: {value of the points: what the table and the figure say}}.
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
    """Whether the points name the x with which they are compared."""
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
