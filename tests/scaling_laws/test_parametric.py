"""The parametric forms: gradients, recovery of known parameters, the search."""

import numpy as np
import pytest
from scipy import optimize

from diloco.scaling_laws import optimum, parametric
from diloco.scaling_laws.parametric import FLOOR, FORMS, Settings

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
  return form.value(np.array(TRUE[form]), np.log(N), np.log(M), M)[0]


@pytest.mark.parametrize("form", TRUE, ids=lambda f: f.name)
def test_gradients_are_derivatives(form):
  n, m = np.array([5e7]), np.array([4.0])

  def value(q):
    return form.value(q, np.log(n), np.log(m), m)[0][0]

  q = np.array(TRUE[form])
  numeric = optimize.approx_fprime(q, value, 1e-7)
  _, gradient = form.value(q, np.log(n), np.log(m), m)
  assert gradient[:, 0] == pytest.approx(numeric, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("form", TRUE, ids=lambda f: f.name)
def test_the_optimum_recovers_a_form_without_noise(form):
  keep = M == 1 if form is FLOOR else M > 0
  found = optimum.fit_optimum(form, N[keep], M[keep], losses(form)[keep], samples=2)
  assert tuple(found.values.values()) == pytest.approx(TRUE[form], rel=1e-3)
  assert found(1e10, 2) == pytest.approx(
    form.value(np.array(TRUE[form]), np.log([1e10]), np.log([2.0]), np.array([2.0]))[0][
      0
    ],
    rel=1e-5,
  )
  assert found.predict_interval(1e10, 2)[0] == pytest.approx(found(1e10, 2), rel=1e-4)


def test_the_bootstrap_covers_the_truth():
  rng = np.random.default_rng(0)
  noisy = losses(FORMS[1]) * np.exp(rng.normal(0, 0.002, len(N)))
  found = optimum.fit_optimum(FORMS[1], N, M, noisy, samples=100)
  for (low, high), true in zip(found.interval(0.99).values(), TRUE[FORMS[1]]):
    assert low < true < high
  assert np.ptp(found.interval()["C"]) < 0.5


def test_held_out_data_choose_among_the_starts():
  form, y = FORMS[1], losses(FORMS[1])
  found = parametric.fit_parametric(form, N, M, y, settings=Settings(starts=32))
  held = N.max() == N
  error = np.abs(np.log(found(N[held], M[held])) - np.log(y[held])).mean()
  assert found.held_out == pytest.approx(error)
  assert found.held_out <= found.train_only_held_out
  # The data have no noise, and 32 starts come near the parameters.
  assert found.held_out < 0.005


def test_too_few_points():
  y = losses(FORMS[3])
  some = (N < 1e8) | (N.max() == N)
  some &= M < 2
  with pytest.raises(ValueError, match="5 parameters and 2 points"):
    parametric.fit_parametric(FORMS[3], N[some], M[some], y[some])
  with pytest.raises(ValueError, match="uncertainty needs 6: add runs"):
    optimum.fit_optimum(FORMS[3], N[some], M[some], y[some])
