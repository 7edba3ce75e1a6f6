"""The best batch size of a cell, between those that were swept."""

import dataclasses

import numpy as np

from diloco.scaling_laws.fits import check_points
from diloco.scaling_laws.uncertainty import Numbers


@dataclasses.dataclass(frozen=True)
class Quadratic:
  """loss = a (log2 B - log2 B*)^2 + c, from runs at powers of two."""

  best_batch: float
  curvature: float
  loss: float


def fit_best_batch(
  batches: Numbers, losses: Numbers, name: str = "the best batch"
) -> Quadratic:
  """The batch size with the least loss, between powers of two (Section 6.1).

  Args:
    batches: B of each run [n], in tokens or any other unit, each once.
    losses: loss of the best learning rate at that B [n].
    name: the cell, for errors.

  Returns:
    The minimum of the quadratic in log2 B; best_batch has the unit of batches.

  Raises:
    ValueError: fewer than three batch sizes, a curve without a minimum, or a
      minimum outside the range swept.
  """
  b, y = np.asarray(batches, float), np.asarray(losses, float)
  check_points(b, y, np.ones_like(b), name)
  if len(b) < 3:
    raise ValueError(
      f"{name} has runs at {len(b)} batch size(s); a quadratic needs 3: sweep more"
      " powers of two."
    )
  x = np.log2(b)
  center = x.mean()
  a, slope, const = np.polyfit(x - center, y, 2)
  low, high = b.min(), b.max()
  if a <= 0:
    raise ValueError(
      f"{name}: the loss over log2 B has no minimum between {low:g} and {high:g};"
      " extend the sweep on the side where the loss falls."
    )
  best = 2 ** (center - slope / (2 * a))
  if not low <= best <= high:
    side = "smaller" if best < low else "larger"
    raise ValueError(
      f"{name}: the quadratic's minimum {best:g} lies outside the batch sizes swept,"
      f" {low:g} to {high:g}; add {side} ones."
    )
  return Quadratic(float(best), float(a), float(const - slope**2 / (4 * a)))
