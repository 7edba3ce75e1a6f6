"""Parametric forms at their optimum, with their uncertainty."""

import dataclasses

import numpy as np
from scipy import optimize, stats

from diloco.scaling_laws.fits import check_points
from diloco.scaling_laws.parametric import Form
from diloco.scaling_laws.uncertainty import (
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

# Taken for L where a form would not be positive.
_LEAST = 1e-300


@dataclasses.dataclass(frozen=True)
class Optimum:
  """The least-error parameters over all points and how sure they are.

  Attributes:
    form: the family.
    q: its parameters, float64 [k].
    params, replicas: N and M of the points, float64 [n].
    residuals: float64 [n], log L - log fit.
  """

  form: Form
  q: Array
  params: Array
  replicas: Array
  residuals: Array

  def __call__(self, params: float, replicas: float = 1) -> float:
    """L at N parameters and M replicas."""
    return float(self.form.at(self.q, [params], [replicas])[0][0])

  @property
  def groups(self) -> Groups | None:
    """Points of one N each, as `fits.Fit.groups`."""
    return None if self.form.in_n == len(self.q) else by_size(self.params)

  @property
  def spare(self) -> int:
    """Degrees of freedom, as `fits.Fit.spare`."""
    points = len(self.residuals)
    sizes = points if self.groups is None else len(self.groups)
    return min(points - len(self.q), sizes - self.form.in_n)

  @property
  def values(self) -> dict[str, float]:
    """Parameters by name."""
    return dict(zip(self.form.parameters, map(float, self.q)))

  def interval(self, level: float = 0.9, samples: int = 0) -> dict[str, Interval]:
    """Interval of each parameter: Student's t of the form made linear at the optimum.

    Args:
      level: share of cases in which the interval holds the truth.
      samples: if positive, t comes from so many refits to resampled residuals, each
        studentised (bootstrap-t).
    """
    bounds = self._bounds(level, samples)
    names = self.form.parameters
    return {k: (float(low), float(high)) for k, (low, high) in zip(names, bounds)}

  def predict_interval(
    self, params: float, replicas: float = 1, level: float = 0.9, samples: int = 0
  ) -> Interval:
    """Interval for a new run at (N, M), as `fits.Fit.predict_interval`."""
    return exponentials(self._bounds(level, samples, (params, replicas))[0])

  def _bounds(
    self, level: float, samples: int, new: tuple[float, float] | None = None
  ) -> Array:
    """Intervals [j, 2] of the parameters, or of log L of a run at `new`."""
    center, error = self._estimate(self.q, self.residuals, new)
    if samples > 0:
      t = np.quantile(self._resampled_t(center, samples, new), tails(level), 0).T
    else:
      t = stats.t.ppf(tails(level), self.spare)
    return center[:, None] + error[:, None] * t

  def _estimate(
    self, q: Array, residuals: Array, new: tuple[float, float] | None
  ) -> tuple[Array, Array]:
    """Values and standard errors [j] of the parameters, or of log L of a run."""
    design = _log_form(self.form, q, self.params, self.replicas)[1]
    value, slope, scatter = q, np.eye(len(q)), 0.0
    if new is not None:
      value, slope = _log_form(self.form, q, [new[0]], [new[1]])
      scatter = 1.0
    return value, standard_errors(slope, design, residuals, scatter, self.groups)

  def _resampled_t(
    self, center: Array, samples: int, new: tuple[float, float] | None
  ) -> Array:
    """(truth - estimate) / standard error of refits [S, j]."""
    rng, found = np.random.default_rng(0), []
    fitted, design = _log_form(self.form, self.q, self.params, self.replicas)
    for noise in resampled(rng, design, self.residuals, self.groups, samples):
      log_y = fitted + noise
      q = _solve(self.form, self.params, self.replicas, self.q, log_y)
      left = log_y - _log_form(self.form, q, self.params, self.replicas)[0]
      value, error = self._estimate(q, left, new)
      truth = center + (0 if new is None else rng.choice(self.residuals))
      found.append((truth - value) / np.maximum(error, 1e-30))
    return np.array(found)


def fit_optimum(
  form: Form,
  params: Numbers,
  replicas: Numbers,
  losses: Numbers,
  start: Numbers | None = None,
) -> Optimum:
  """The optimum that `fit_parametric` looks for and need not reach.

  Trust-region least squares on log L, which is Huber's loss where residuals are small.

  Args:
    form: one of FORMS, or FLOOR for one M.
    params, replicas, losses: N, M and L of the points [n].
    start: parameters to start from, such as those of `fit_parametric`; None takes
      the form's `start`.

  Raises:
    ValueError: bad points, or not more of them than the form has parameters.
  """
  n, m, y = (np.asarray(v, float) for v in (params, replicas, losses))
  check_points(n, y, m, form.name)
  spare = len(n) - len(form.parameters)
  if spare < 1:
    raise ValueError(
      f"{form.name} has {len(form.parameters)} parameters and {len(n)} points; its"
      f" uncertainty needs {len(form.parameters) + 1}: add runs."
    )
  q = _solve(form, n, m, form.start if start is None else start, np.log(y))
  return Optimum(form, q, n, m, np.log(y) - _log_form(form, q, n, m)[0])


def _solve(form: Form, n: Array, m: Array, start: Numbers, log_y: Array) -> Array:
  """Parameters [k] of the least squares on log L."""

  def error(q: Array) -> Array:
    return _log_form(form, q, n, m)[0] - log_y

  def slope(q: Array) -> Array:
    return _log_form(form, q, n, m)[1]

  first = np.asarray(start, float)
  found = optimize.least_squares(error, first, slope, x_scale="jac", max_nfev=300)
  return found.x


def _log_form(form: Form, q: Array, n: Numbers, m: Numbers) -> tuple[Array, Array]:
  """log L [n] and its derivatives [n, k]."""
  value, gradient = form.at(q, n, m)
  positive = np.maximum(value, _LEAST)
  return np.log(positive), (gradient / positive).T
