"""Power laws by least squares on logarithms, with their uncertainty.

Scaling Laws for DiLoCo (arXiv 2503.09799), Sections 6.1 to 6.3. Symbols: N
parameters, M replicas, y a loss, a learning rate or a batch size.
"""

import dataclasses

import numpy as np
from scipy import stats

from diloco.scaling_laws.uncertainty import (
  LEAST_SPARE,
  Array,
  Groups,
  Interval,
  Numbers,
  by_size,
  exponentials,
  resampled,
  standard_errors,
  tails,
)

PARAMETERS = ("A", "alpha", "beta")


@dataclasses.dataclass(frozen=True)
class PowerLaw:
  """y = A N^alpha M^beta; beta is 0 for a law of one algorithm."""

  A: float
  alpha: float
  beta: float = 0.0

  def __call__(self, params: float, replicas: float = 1) -> float:
    """Value at N parameters and M replicas."""
    return float(self.A * params**self.alpha * replicas**self.beta)

  def times(self, factor: float) -> "PowerLaw":
    """The same law in another unit."""
    return dataclasses.replace(self, A=self.A * factor)


@dataclasses.dataclass(frozen=True)
class Fit:
  """A fitted law and how sure it is, if log residuals are Gaussian.

  Those of a law in N alone are taken as independent. Runs of several M at one N miss a
  joint law together, since it bends, so only sizes N are: see `standard_errors`.

  Attributes:
    law: the least-squares fit.
    design: float64 [n, k], columns 1, log N and, if joint, log M.
    residuals: float64 [n], log y - log fit of each point.
  """

  law: PowerLaw
  design: Array
  residuals: Array

  def __call__(self, params: float, replicas: float = 1) -> float:
    """The law at N parameters and M replicas."""
    return self.law(params, replicas)

  @property
  def log_values(self) -> Array:
    """log y of the points, float64 [n]."""
    k = self.design.shape[1]
    law = [np.log(self.law.A), self.law.alpha, self.law.beta][:k]
    return self.design @ law + self.residuals

  @property
  def groups(self) -> Groups | None:
    """Points of one N each, which a joint law misses together; else None."""
    return by_size(self.design[:, 1]) if self.design.shape[1] == 3 else None

  @property
  def spare(self) -> int:
    """Degrees of freedom: n - k; of a joint law sizes N beyond A and alpha, if less."""
    points, parameters = self.design.shape
    return min(points - parameters, len(self.groups or [()] * points) - 2)

  def interval(self, level: float = 0.9, samples: int = 0) -> dict[str, Interval]:
    """Interval of each parameter: {'A': (low, high), ...}.

    Student's t, which holds the truth in a share `level` of all cases from n = k + 1
    points on. Percentiles of bootstrapped parameters do in some 60% for 90% at n = 3.

    Args:
      level: share of cases.
      samples: if positive, quantiles of t come from so many resamples of the residuals,
        each studentised (bootstrap-t), in place of Student's: no Gaussian is assumed.
        See `resampled`.

    Raises:
      ValueError: level is no probability, or there are too few points to resample.
    """
    names = PARAMETERS[: self.design.shape[1]]
    bounds = self._bounds(np.eye(len(names)), 0.0, level, samples)
    if bounds is None:
      return dict.fromkeys(names)
    first = exponentials(bounds[0])
    return {"A": first} | {
      k: (float(a), float(b)) for k, (a, b) in zip(names[1:], bounds[1:])
    }

  def predict_interval(
    self, params: float, replicas: float = 1, level: float = 0.9, samples: int = 0
  ) -> Interval:
    """Interval for a new observation at (N, M): the law's error and one run's scatter.

    What no residual can tell, that the law bends beyond the largest N, is not in it.
    Arguments and errors are those of `interval`.
    """
    x = _design([params], [replicas], self.design.shape[1] == 3)
    bounds = self._bounds(x, 1.0, level, samples)
    return None if bounds is None else exponentials(bounds[0])

  def _bounds(
    self, x: Array, scatter: float, level: float, samples: int
  ) -> Array | None:
    """Intervals [j, 2] of x [j, k] times the coefficients plus `scatter` residuals."""
    sides = tails(level)
    if self.spare < 1:
      return None
    coefficients = np.array([np.log(self.law.A), self.law.alpha, self.law.beta])
    center = x @ coefficients[: self.design.shape[1]]
    error = standard_errors(x, self.design, self.residuals, scatter, self.groups)
    if samples > 0:
      t = np.quantile(self._resampled_t(x, scatter, samples), sides, 0).T
    else:
      t = stats.t.ppf(sides, self.spare)
    return center[:, None] + error[:, None] * t

  def _resampled_t(self, x: Array, scatter: float, samples: int) -> Array:
    """(truth - estimate) / standard error of refits to resampled residuals [S, j]."""
    if self.spare < LEAST_SPARE:
      points, what = len(self.residuals), "points"
      if self.groups is not None:
        points, what = len(self.groups), "sizes N"
      raise ValueError(
        f"samples is {samples}, but {points} {what} are too few to resample; take"
        f" samples=0, Student's t, or {points + LEAST_SPARE - self.spare} {what}."
      )
    rng = np.random.default_rng(0)
    noise = resampled(rng, self.design, self.residuals, self.groups, samples)
    new = scatter * rng.choice(self.residuals, (samples, 1))
    shift = noise @ np.linalg.pinv(self.design).T
    left = noise - shift @ self.design.T
    error = standard_errors(x, self.design, left, scatter, self.groups)
    # A resample of n equal residuals is fitted without error.
    return (new - shift @ x.T) / np.maximum(error, 1e-30)


def fit_power_law(
  params: Numbers,
  values: Numbers,
  replicas: Numbers | None = None,
  name: str = "the power law",
) -> Fit:
  """Fits y = A N^alpha, or jointly y = A N^alpha M^beta (Sections 6.1 and 6.2).

  Ordinary least squares on log y.

  Args:
    params: N of each point [n].
    values: y of each point [n], positive.
    replicas: M of each point [n] for a joint law, None for a law in N alone.
    name: what is fitted, for errors.

  Raises:
    ValueError: values that are no positive numbers, cells given twice, too few or too
      near sizes (or replica counts).
  """
  joint = replicas is not None
  n_, y_ = np.asarray(params, float), np.asarray(values, float)
  m_ = np.asarray(replicas, float) if replicas is not None else np.ones_like(n_)
  check_points(n_, y_, m_, name)
  needed = {"sizes N": n_} | ({"replica counts M": m_} if joint else {})
  for what, axis in needed.items():
    if len(set(axis)) < 2:
      raise ValueError(
        f"{name} has {len(axis)} point(s) at {len(set(axis))} of the {what}; a law"
        f" needs at least 2 different {what}, and 3 to say anything about its error:"
        " add runs."
      )
  x = _design(n_, m_, joint)
  if len(n_) < x.shape[1]:
    raise ValueError(
      f"{name} has {len(n_)} points for {x.shape[1]} parameters; add"
      f" {x.shape[1] - len(n_)} or more."
    )
  if np.linalg.matrix_rank(x[:, 1:] - x[:, 1:].mean(0), rtol=1e-9) < x.shape[1] - 1:
    raise ValueError(
      f"{name} cannot tell N and M apart: N and M vary together; add a second M at one"
      " N."
    )
  coefficients = np.linalg.lstsq(x, np.log(y_))[0]
  if abs(coefficients[0]) > 700:
    raise ValueError(
      f"{name} would have A = e^{coefficients[0]:.0f}: its sizes N are too near one"
      " another for a law; add sizes further apart."
    )
  law = PowerLaw(float(np.exp(coefficients[0])), *map(float, coefficients[1:]))
  return Fit(law, x, np.log(y_) - x @ coefficients)


def check_points(params: Array, values: Array, replicas: Array, name: str) -> None:
  """Refuses values that have no logarithm and cells that occur twice.

  Raises:
    ValueError: says which cell, and what to do.
  """
  if not len(params) == len(values) == len(replicas):
    raise ValueError(
      f"{name} has {len(params)} sizes, {len(replicas)} replica counts and"
      f" {len(values)} values; give one of each per point."
    )
  seen = set()
  for n, m, y in zip(params, replicas, values):
    cell = f"N = {n:g}, M = {m:g}"
    if not (np.isfinite(n) and n > 0 and np.isfinite(m) and m > 0):
      raise ValueError(f"{name} has a cell at {cell}; both must be positive.")
    if not (np.isfinite(y) and y > 0):
      raise ValueError(
        f"{name} is {y:g} at {cell}; only positive numbers have a logarithm: drop"
        " the cell or repeat its run."
      )
    if (n, m) in seen:
      raise ValueError(
        f"{name} has two values at {cell}; keep the best run of each cell."
      )
    seen.add((n, m))


def residual(value: float, predicted: float) -> float:
  """|log y - log y~| (Section 6.3)."""
  return float(abs(np.log(value) - np.log(predicted)))


def leave_largest_out(
  params: Numbers,
  values: Numbers,
  replicas: Numbers | None = None,
  name: str = "the power law",
) -> dict[int, float]:
  """Residuals at the largest N of a law fitted to all smaller N (Section 6.3).

  Args:
    params: N of each point [n].
    values: y of each point [n].
    replicas: M of each point [n] for a joint law, None otherwise.
    name: what is fitted, for errors.

  Returns:
    {M: residual}; M is 1 for a law in N alone.
  """
  n_, y_ = np.asarray(params, float), np.asarray(values, float)
  m_ = np.ones_like(n_) if replicas is None else np.asarray(replicas, float)
  held = n_ == n_.max()
  kept_m = None if replicas is None else m_[~held]
  what = f"{name} without N = {n_.max():g}"
  law = fit_power_law(n_[~held], y_[~held], kept_m, what).law
  return {
    int(m): residual(y, law(n, m)) for n, m, y in zip(n_[held], m_[held], y_[held])
  }


def _design(params: Numbers, replicas: Numbers, joint: bool) -> Array:
  """Columns 1, log N and, if joint, log M: float64 [n, 2 or 3]."""
  columns = [np.ones(len(params)), np.log(params)]
  return np.stack(columns + ([np.log(replicas)] if joint else []), axis=1)
