"""Fits parametric forms by least squares, with their uncertainty."""

import dataclasses
import itertools

import numpy as np
from scipy import optimize

from diloco.scaling_laws.fits import check_points
from diloco.scaling_laws.parametric import Form
from diloco.scaling_laws.uncertainty import Array, LeastSquares, Numbers

# Replaces L where a form is not positive, because log L needs a positive number.
_LEAST = 1e-300
# Values of each exponent where the search for an optimum starts.
_GRID = 21


@dataclasses.dataclass(frozen=True)
class Optimum(LeastSquares):
  """The parameters q of a form that have the least squared error over all points.

  Attributes:
    form: one of FORMS, or FLOOR.
  """

  form: Form

  def log_y(self, params: Numbers, replicas: Numbers) -> tuple[Array, Array]:
    return _log_form(self.form, self.q, params, replicas)


def fit_optimum(
  form: Form, params: Numbers, replicas: Numbers, losses: Numbers
) -> Optimum:
  """Finds the optimum of a form, which `fit_parametric` may miss.

  The method is trust-region least squares on log L, from the best point of a grid. For
  small residuals, the objective equals that of `fit_parametric`, the Huber loss.

  Args:
    form: one of FORMS, or FLOOR for one M.
    params, replicas, losses: N, M and L of the points [n].

  Raises:
    ValueError: bad points, or no more points than the form has parameters.
  """
  n, m, y = (np.asarray(v, float) for v in (params, replicas, losses))
  check_points(n, y, m, form.name)
  if len(n) <= len(form.names):
    raise ValueError(
      f"{form.name} has {len(n)} points for {len(form.names)} parameters; its"
      f" uncertainty needs {len(form.names) + 1}: add runs."
    )
  solution = optimize.least_squares(
    lambda q: _log_form(form, q, n, m)[0] - np.log(y),
    _start(form, n, m, y),
    lambda q: _log_form(form, q, n, m)[1],
    x_scale="jac",
    max_nfev=300,
  )
  return Optimum(form.names, n, m, -solution.fun, solution.x, form)


def _start(form: Form, n: Array, m: Array, y: Array) -> Array:
  """Returns the best parameters [k] whose exponents lie on a grid over their box.

  For given exponents, L is linear in A, B and C; these have the least squares of L / y.
  """
  linear = np.array([name.isupper() for name in form.names])
  axes = [
    np.linspace(*box, _GRID)
    for box, known in zip(form.parameters.values(), ~linear)
    if known
  ]
  tried = []
  for exponents in itertools.product(*axes):
    q = np.ones(len(linear))
    q[~linear] = exponents
    design = (form.at(q, n, m)[1][linear] / y).T
    q[linear] = np.linalg.lstsq(design, np.ones_like(y))[0]
    tried.append((np.square(design @ q[linear] - 1).sum(), *q))
  return np.array(min(tried)[1:])


def _log_form(form: Form, q: Array, n: Numbers, m: Numbers) -> tuple[Array, Array]:
  """Returns log L [n] and its derivatives [n, k] with respect to the parameters."""
  value, gradient = form.at(q, n, m)
  positive = np.maximum(value, _LEAST)
  return np.log(positive), (gradient / positive).T
