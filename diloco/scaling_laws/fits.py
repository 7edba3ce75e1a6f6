"""Fits power laws by least squares on logarithms, with their uncertainty.

Scaling Laws for DiLoCo (arXiv 2503.09799), Sections 6.1 to 6.3. N is the number of
parameters, M of replicas; y is a loss, a learning rate or a batch size.
"""

import dataclasses

import numpy as np
import pandas as pd

from diloco.scaling_laws.uncertainty import (
  Array,
  Interval,
  LeastSquares,
  Numbers,
  exponentials,
)


@dataclasses.dataclass(frozen=True)
class PowerLaw:
  """y = A N^alpha M^beta; beta is 0 for a law in N alone."""

  A: float
  alpha: float
  beta: float = 0.0

  def __call__(self, params: float, replicas: float = 1) -> float:
    """Returns y at N parameters and M replicas."""
    return float(self.A * params**self.alpha * replicas**self.beta)


@dataclasses.dataclass(frozen=True)
class Fit(LeastSquares):
  """A power law fitted to points.

  Attributes:
    values: y of each point, float64 [n].
    q: log A, alpha and perhaps beta.
  """

  values: Array

  @property
  def law(self) -> PowerLaw:
    """The fitted law."""
    log_a, *exponents = map(float, self.q)
    return PowerLaw(float(np.exp(log_a)), *exponents)

  def log_y(self, params: Numbers, replicas: Numbers) -> tuple[Array, Array]:
    x = _columns(params, replicas, len(self.names))
    return x @ self.q, x

  def interval(self) -> dict[str, Interval]:
    """Returns the 90% interval of each parameter; for A, from the interval of log A."""
    intervals = super().interval()
    return intervals | {"A": exponentials(intervals["A"])}


def fit_power_law(
  params: Numbers,
  values: Numbers,
  replicas: Numbers | None = None,
  name: str = "the power law",
) -> Fit:
  """Fits y = A N^alpha, or jointly y = A N^alpha M^beta (Sections 6.1 and 6.2).

  The method is ordinary least squares on log y.

  Args:
    params: N of each point [n].
    values: y of each point [n].
    replicas: M of each point [n] for a joint law, None for a law in N alone.
    name: the name of the fitted quantity in errors.

  Raises:
    ValueError: a number is not positive, a cell is given twice, or the sizes (or
      replica counts) are too few or too near one another.
  """
  n, y = np.asarray(params, float), np.asarray(values, float)
  m = np.ones_like(n) if replicas is None else np.asarray(replicas, float)
  check_points(n, y, m, name)
  needed = {"sizes N": n} if replicas is None else {"sizes N": n, "replica counts M": m}
  for axis, numbers in needed.items():
    if len(set(numbers)) < 2:
      raise ValueError(
        f"{name} needs at least 2 different {axis}, and 3 for an interval, but has"
        f" {len(set(numbers))}: add runs."
      )
  names = ("A", "alpha", "beta")[: 1 + len(needed)]
  x = _columns(n, m, len(names))
  if np.linalg.matrix_rank(x[:, 1:] - x[:, 1:].mean(0), rtol=1e-9) < len(needed):
    raise ValueError(
      f"{name} cannot tell N and M apart: N and M vary together; add a second M at one"
      " N."
    )
  coefficients = np.linalg.lstsq(x, np.log(y))[0]
  if abs(coefficients[0]) > 700:
    raise ValueError(
      f"{name} would have A = e^{coefficients[0]:.0f}: its sizes N are too near one"
      " another; add sizes further apart."
    )
  return Fit(names, n, m, np.log(y) - x @ coefficients, coefficients, y)


def check_points(params: Array, values: Array, replicas: Array, name: str) -> None:
  """Refuses points that are not positive and finite, and cells that occur twice.

  Raises:
    ValueError: a point is refused; the message names the cell and the remedy.
  """
  points = pd.DataFrame({"n": params, "m": replicas, "y": values})
  bad = points[~((points > 0) & np.isfinite(points)).all(axis=1)]
  if len(bad):
    n, m, y = bad.iloc[0]
    raise ValueError(
      f"{name} is {y:g} at N = {n:g}, M = {m:g}; all three must be positive: drop the"
      " cell or repeat its run."
    )
  twice = points[points.duplicated(["n", "m"])]
  if len(twice):
    n, m, _ = twice.iloc[0]
    raise ValueError(
      f"{name} has two values at N = {n:g}, M = {m:g}; keep the best run of each cell."
    )


def leave_largest_out(fit: Fit) -> dict[int, float]:
  """Fits a law y~ without the points of the largest N (Section 6.3).

  Returns:
    The residuals at the largest N, {M: |log y - log y~|}. M is 1 for a law in N alone.
    Empty if too few points are left for the fit.
  """
  held = fit.params == np.max(fit.params)
  n, m, y = fit.params, fit.replicas, fit.values
  try:
    law = fit_power_law(n[~held], y[~held], m[~held] if "beta" in fit.names else None)
  except ValueError:
    return {}
  errors = np.log(y[held]) - law.log_y(n[held], m[held])[0]
  return dict(zip(m[held].astype(int).tolist(), np.abs(errors).tolist()))


def _columns(params: Numbers, replicas: Numbers, count: int) -> Array:
  """Returns the first `count` of the columns 1, log N and log M: float64 [n, count]."""
  columns = [np.ones(len(params)), np.log(params), np.log(replicas)]
  return np.stack(columns[:count], axis=1)
