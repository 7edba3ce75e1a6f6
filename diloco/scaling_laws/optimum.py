"""Parametric forms at their optimum, with bootstrap uncertainty."""

import dataclasses

import numpy as np
from scipy import optimize

from diloco.scaling_laws.fits import Array, Numbers, check_points, tails
from diloco.scaling_laws.parametric import Form

# Taken for L where a form would not be positive.
_LEAST = 1e-300


@dataclasses.dataclass(frozen=True)
class Optimum:
  """The least-error parameters over all points, with their bootstrap.

  Attributes:
    form: the family.
    q: its parameters, float64 [k].
    draws: parameters of the resamples, float64 [S, k].
    residuals: float64 [n], log L - log fit, scaled by sqrt(n / (n - k)).
  """

  form: Form
  q: Array
  draws: Array
  residuals: Array

  def __call__(self, params: float, replicas: float = 1) -> float:
    """L at N parameters and M replicas."""
    return float(self.form.at(self.q, [params], [replicas])[0][0])

  @property
  def values(self) -> dict[str, float]:
    """Parameters by name."""
    return dict(zip(self.form.parameters, map(float, self.q)))

  def interval(self, level: float = 0.9) -> dict[str, tuple[float, float]]:
    """Percentile interval of each parameter."""
    low, high = np.quantile(self.draws, tails(level), axis=0)
    return {k: (float(a), float(b)) for k, a, b in zip(self.form.parameters, low, high)}

  def predict_interval(
    self, params: float, replicas: float = 1, level: float = 0.9
  ) -> tuple[float, float]:
    """Interval for a new run at (N, M), as `fits.Fit.predict_interval`."""
    values = [self.form.at(q, [params], [replicas])[0][0] for q in self.draws]
    losses = np.outer(values, np.exp(self.residuals))
    low, high = np.quantile(losses, tails(level))
    return float(low), float(high)


def fit_optimum(
  form: Form,
  params: Numbers,
  replicas: Numbers,
  losses: Numbers,
  start: Numbers | None = None,
  samples: int = 100,
  seed: int = 0,
) -> Optimum:
  """The optimum that `fit_parametric` looks for and need not reach.

  Trust-region least squares on log L, which is Huber's loss where residuals are small;
  the bootstrap resamples residuals and starts from the optimum.

  Args:
    form: one of FORMS, or FLOOR for one M.
    params, replicas, losses: N, M and L of the points [n].
    start: parameters to start from, such as those of `fit_parametric`; None takes
      the form's `start`.
    samples: S, resamples.
    seed: of the resampling.

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

  def solve(start: Array, log_y: Array) -> Array:
    def error(q: Array) -> Array:
      return np.log(np.maximum(form.at(q, n, m)[0], _LEAST)) - log_y

    def slope(q: Array) -> Array:
      value, gradient = form.at(q, n, m)
      return (gradient / np.maximum(value, _LEAST)).T

    found = optimize.least_squares(error, start, slope, x_scale="jac", max_nfev=300)
    return found.x

  q = solve(np.asarray(form.start if start is None else start, float), np.log(y))
  fitted = np.log(form.at(q, n, m)[0])
  residuals = (np.log(y) - fitted) * np.sqrt(len(n) / spare)
  noise = np.random.default_rng(seed).choice(residuals, (samples, len(n)))
  return Optimum(form, q, np.array([solve(q, fitted + e) for e in noise]), residuals)
