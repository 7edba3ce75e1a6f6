"""Fits power laws by least squares on logarithms, with their uncertainty.

Scaling Laws for DiLoCo (arXiv 2503.09799), Sections 6.1 to 6.3. N is the number of
parameters, M is the number of replicas; y is a loss, a learning rate or a batch size.
Intervals use Student's t distribution. For a law in N and M, the points at one N form a
group, because their errors are correlated.
"""

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

Array = npt.NDArray[np.float64]
Numbers = Sequence[float] | Array
Groups = list[npt.NDArray[np.intp]]
# (low, high). None if no degree of freedom is left, or if a bound overflows.
Interval = tuple[float, float] | None
# The quantiles at the ends of a 90% interval.
SIDES = ((1 - 0.9) / 2, (1 + 0.9) / 2)


@dataclasses.dataclass(frozen=True)
class LeastSquares(abc.ABC):
  """A least-squares fit to log y, with intervals that assume Gaussian errors of log y.

  In a law in N and M, runs with one N and several M deviate from the law in the same
  direction, because the true curve bends. So only different N count as independent
  points: see `standard_errors`.

  If a fit is not linear in its parameters, its intervals use a linear approximation.

  Attributes:
    names: names of the k parameters: A and alpha, perhaps also B, beta and C.
    params: N of each point, float64 [n].
    replicas: M of each point, float64 [n].
    residuals: log y - fitted log y of each point, float64 [n].
    q: the fitted parameters, float64 [k]; the first may be log A.
  """

  names: tuple[str, ...]
  params: Array
  replicas: Array
  residuals: Array
  q: Array

  @abc.abstractmethod
  def log_y(self, params: Numbers, replicas: Numbers) -> tuple[Array, Array]:
    """Returns the fitted log y [n] and its derivatives [n, k] with respect to q."""

  def __call__(self, params: float, replicas: float = 1) -> float:
    """Returns the fitted y at N parameters and M replicas."""
    return float(np.exp(self.log_y([params], [replicas])[0][0]))

  @property
  def groups(self) -> Groups | None:
    """Indices of the points at each N; None for a law in N alone."""
    if "beta" not in self.names:
      return None
    return [np.flatnonzero(self.params == n) for n in np.unique(self.params)]

  @property
  def spare(self) -> int:
    """Degrees of freedom: n - k; for a law in N and M, at most (number of N) - j.

    j counts the parameters that only several N can determine: all except B and beta.
    """
    points, groups = len(self.residuals), self.groups
    sizes = points if groups is None else len(groups)
    need_sizes = len(set(self.names) - {"B", "beta"})
    return min(points - len(self.names), sizes - need_sizes)

  def interval(self) -> dict[str, Interval]:
    """Returns the 90% interval of each parameter: {'A': (low, high), ...}.

    An interval by Student's t contains the true value in 90% of the cases, for all n
    from k + 1 on. At n = 3, percentiles of bootstrapped parameters would contain the
    true value in only about 60% of the cases.
    """
    return dict(zip(self.names, self._bounds(self.q, np.eye(len(self.q)), scatter=0.0)))

  def predict_interval(self, params: float, replicas: float = 1) -> Interval:
    """Returns the 90% interval of a new run's y; both the law and the run have errors.

    The interval ignores that the law may bend beyond the largest N.
    """
    value, slopes = self.log_y([params], [replicas])
    return exponentials(self._bounds(value, slopes, scatter=1.0)[0])

  def _bounds(self, values: Array, x: Array, scatter: float) -> list[Interval]:
    """Returns the 90% intervals of j values; x and scatter: see `standard_errors`."""
    if self.spare < 1:
      return [None] * len(values)
    errors = self.standard_errors(x, scatter)
    bounds = values[:, None] + errors[:, None] * stats.t.ppf(SIDES, self.spare)
    return [(float(low), float(high)) for low, high in bounds]

  def standard_errors(self, x: Array, scatter: float) -> Array:
    """Returns the standard errors of x @ q, where q are the fitted parameters.

    The residuals of a group are correlated. With the usual formula, a 90% interval
    would contain the true alpha in only 68% of the cases (seven N, four M, 0.54 of the
    variance shared in a group, as in Table 4). So groups use the jackknife formula, CR3
    of Bell & McCaffrey (2002). With this formula, the interval contains the true alpha
    in 91% of these cases, and in more than 91% if there are fewer N.

    Args:
      x: derivatives of j estimates with respect to q, float64 [j, k].
      scatter: how many residual variances to add: 1 for a new run, otherwise 0.

    Returns:
      float64 [j].
    """
    _, design = self.log_y(self.params, self.replicas)
    points, parameters = design.shape
    inverse = np.linalg.pinv(design)
    one = np.square(self.residuals).sum(keepdims=True) / (points - parameters)
    if self.groups is None:
      return np.sqrt(one * (scatter + np.square(x @ inverse).sum(1)))
    variance = one * scatter
    for g, root in zip(self.groups, _inflate(design, self.groups)):
      weights = x @ inverse[:, g] @ root @ root
      variance = variance + np.square(self.residuals[g] @ weights.T)
    return np.sqrt(variance)


def _inflate(design: Array, groups: Groups) -> list[Array]:
  """Computes (I - H)^(-1/2) of each group; H is the hat matrix.

  The fit shrinks the residuals; multiplying by this matrix corrects them.
  """
  hat = design @ np.linalg.pinv(design)
  roots = []
  for g in groups:
    values, vectors = np.linalg.eigh(np.eye(len(g)) - hat[np.ix_(g, g)])
    # In a direction that only this group determines, the fit is exact: the residual is
    # 0 and is not scaled.
    scale = np.where(values > 1e-9, 1 / np.sqrt(np.maximum(values, 1e-9)), 0.0)
    roots.append(vectors * scale @ vectors.T)
  return roots


def exponentials(bounds: Interval) -> Interval:
  """Returns exp of both bounds; None for None, or if a bound overflows."""
  if bounds is None:
    return None
  with np.errstate(over="ignore"):
    low, high = map(float, np.exp(bounds))
  return (low, high) if np.isfinite(high) else None


def show(value: float, interval: Interval, digits: str = ".5g") -> str:
  """Formats a number with its interval, such as `2.197 [2.152, 2.243]`."""
  span = ", ".join(f"{bound:{digits}}" for bound in interval) if interval else "-"
  return f"{value:{digits}} [{span}]"


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
    The dict is empty if too few points are left for the fit.
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
