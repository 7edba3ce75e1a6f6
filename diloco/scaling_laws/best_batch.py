"""The best batch size of a cell, between the batch sizes that were swept."""

import numpy as np

from diloco.scaling_laws.fits import check_points
from diloco.scaling_laws.uncertainty import Numbers


def fit_best_batch(
  batches: Numbers, losses: Numbers, name: str = "the best batch"
) -> float:
  """Fits a quadratic in log2 B to the losses, and finds its minimum (Section 6.1).

  Args:
    batches: batch size B of each run [n], in any unit; no B occurs twice.
    losses: loss of the best learning rate at each B [n].
    name: the cell's name in errors.

  Returns:
    B at the minimum, in the unit of `batches`.

  Raises:
    ValueError: fewer than three batch sizes, no minimum, or a minimum outside the range
      of the batch sizes.
  """
  b, y = np.asarray(batches, float), np.asarray(losses, float)
  check_points(b, y, np.ones_like(b), name)
  if len(b) < 3:
    raise ValueError(
      f"{name}: only {len(b)} batch sizes were tried; the quadratic needs 3: add one."
    )
  x = np.log2(b)
  center = x.mean()
  curvature, slope, _ = np.polyfit(x - center, y, 2)
  low, high = b.min(), b.max()
  if curvature <= 0:
    raise ValueError(
      f"{name}: the loss over log2 B has no minimum between {low:g} and {high:g};"
      " extend the sweep on the side where the loss falls."
    )
  best = float(2 ** (center - slope / (2 * curvature)))
  if not low <= best <= high:
    raise ValueError(
      f"{name}: the quadratic's minimum {best:g} lies outside the batch sizes swept,"
      f" {low:g} to {high:g}; add {'smaller' if best < low else 'larger'} ones."
    )
  return best
