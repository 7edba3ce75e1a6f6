"""Parametric forms: gradients, optima, intervals and the search."""

import numpy as np
import pytest
from scipy import optimize

from diloco.scaling_laws import paper, parametric
from diloco.scaling_laws.fits import fit_power_law
from diloco.scaling_laws.parametric import FLOOR, FORMS

N = np.tile(np.geomspace(3e7, 3e9, 6), 4)
M = np.repeat([1.0, 2.0, 4.0, 8.0], 6)
TRUE = {
  FORMS[0]: (20, -0.1, 0.01),
  FORMS[1]: (40, -0.16, 0.02, 1.1),
  FORMS[2]: (40, -0.16, 3e-4, 1.1),
  FORMS[3]: (40, -0.16, 0.05, 0.5, 1.1),
  FLOOR: (40, -0.16, 1.1),
}


def losses(form):
  return form.at(np.array(TRUE[form]), N, M)[0]


@pytest.mark.parametrize("form", TRUE, ids=lambda f: f.name)
def test_gradients_equal_numerical_derivatives(form):
  n, m = np.array([5e7]), np.array([4.0])

  def value(q):
    return form.at(q, n, m)[0][0]

  q = np.array(TRUE[form])
  numeric = optimize.approx_fprime(q, value, 1e-7)
  _, gradient = form.at(q, n, m)
  assert gradient[:, 0] == pytest.approx(numeric, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("form", TRUE, ids=lambda f: f.name)
def test_the_optimum_recovers_a_form_without_noise(form):
  keep = M == 1 if form is FLOOR else M > 0
  found = parametric.fit_optimum(form, N[keep], M[keep], losses(form)[keep])
  assert tuple(found.q) == pytest.approx(TRUE[form], rel=1e-3)
  exact = form.at(np.array(TRUE[form]), [1e10], [2.0])[0][0]
  assert found(1e10, 2) == pytest.approx(exact, rel=1e-5)
  assert found.predict_interval(1e10, 2)[0] == pytest.approx(found(1e10, 2), rel=1e-4)
  # Six sizes. B and beta are known from several M at one size; A, alpha and C are not.
  assert found.spare == (4 if form is FORMS[0] else 3)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
@pytest.mark.parametrize("unit", [1, np.log(2)])  # Nats and bits.
def test_no_random_start_finds_a_better_optimum(form, unit):
  n, m, y = map(np.asarray, paper.loss_grid("nominal"))
  found = parametric.fit_optimum(form, n, m, y / unit)
  least = np.square(found.residuals).sum()

  def residuals(q):
    value, gradient = form.at(q, n, m)
    value = np.maximum(value, 1e-300)
    return np.log(value * unit / y), (gradient / value).T

  rng, (low, high) = np.random.default_rng(0), np.array([*form.parameters.values()]).T
  with np.errstate(all="ignore"):  # Some starts run away.
    others = [
      optimize.least_squares(
        lambda q: residuals(q)[0], start, lambda q: residuals(q)[1], x_scale="jac"
      )
      for start in rng.uniform(low, high, (8, len(low)))
    ]
  costs = [2 * other.cost for other in others]
  assert least <= min(costs) * (1 + 1e-6)
  assert min(costs) == pytest.approx(least, rel=1e-6)  # Some start ends there.


def test_intervals_of_a_law_with_a_floor_hold_90_per_cent():
  # As in the paper: seven sizes, three parameters, predictions at 10B. The standard
  # deviation of a share is 0.015.
  n, true = np.geomspace(35e6, 2.4e9, 7), np.array(TRUE[FLOOR])
  rng = np.random.default_rng(0)
  exact = FLOOR.at(true, n, np.ones(7))[0]
  big = FLOOR.at(true, [1e10], [1.0])[0][0]
  hits = []
  for _ in range(400):
    noisy = exact * np.exp(rng.normal(0, 0.002, 7))
    found = parametric.fit_optimum(FLOOR, n, np.ones(7), noisy)
    new = big * np.exp(rng.normal(0, 0.002))
    pairs = [*zip(true, found.interval().values())]
    pairs.append((new, found.predict_interval(1e10)))
    hits.append([low < value < high for value, (low, high) in pairs])
  assert np.mean(hits, 0) == pytest.approx([0.9] * 4, abs=0.05)


def test_the_form_without_a_floor_has_the_intervals_of_the_linear_fit():
  # Two derivations give one standard error. A differs: one of them fits log A.
  noisy = losses(FORMS[0]) * np.exp(np.random.default_rng(0).normal(0, 0.002, len(N)))
  bent = parametric.fit_optimum(FORMS[0], N, M, noisy)
  line = fit_power_law(N, noisy, M)
  for name in ("alpha", "beta"):
    assert bent.interval()[name] == pytest.approx(line.interval()[name], rel=1e-4)
  expected = line.predict_interval(1e10, 2)
  assert bent.predict_interval(1e10, 2) == pytest.approx(expected, rel=1e-6)


def test_held_out_data_choose_among_the_starts():
  form, y = FORMS[1], losses(FORMS[1])
  found = parametric.fit_parametric(form, N, M, y, starts=32)
  held = N.max() == N
  value, _ = form.at(found.q, N[held], M[held])
  error = np.abs(np.log(value / y[held])).mean()
  assert found.held_out == pytest.approx(error)
  # The data have no noise, and 32 starts come near the parameters.
  assert found.held_out < 0.005


def test_too_few_points_are_refused():
  y = losses(FORMS[3])
  some = (N < 1e8) | (N.max() == N)
  some &= M < 2
  with pytest.raises(ValueError, match="uncertainty needs 6: add runs"):
    parametric.fit_optimum(FORMS[3], N[some], M[some], y[some])
