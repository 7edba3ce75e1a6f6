"""Power laws: known laws, intervals computed by hand, and refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.scaling_laws.cells import fit_best_batch
from diloco.scaling_laws.fits import PowerLaw, fit_power_law, leave_largest_out

N = [1e6, 3e6, 1e7, 3e7, 1e8]


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-3, 1e5), st.floats(-1.5, 1.5), st.floats(-0.5, 0.5))
def test_a_joint_law_without_noise_is_recovered(a, alpha, beta):
  law = PowerLaw(a, alpha, beta)
  n, m = np.repeat(N, 3), np.tile([1.0, 2.0, 8.0], len(N))
  values = [law(*cell) for cell in zip(n, m)]
  found = fit_power_law(n, values, m)
  assert pytest.approx(a, rel=1e-6) == found.law.A
  assert found.law.alpha == pytest.approx(alpha, abs=1e-8)
  assert found.law.beta == pytest.approx(beta, abs=1e-8)
  assert found.residuals == pytest.approx(0, abs=1e-8)


def test_two_points_give_the_line_through_them_and_no_interval():
  found = fit_power_law([1e6, 1e8], [4.0, 2.0])
  assert found.law.alpha == pytest.approx(np.log(0.5) / np.log(100))
  assert found.law(1e7) == pytest.approx(np.sqrt(8))
  assert found.interval() == {"A": None, "alpha": None}
  assert found.predict_interval(1e7) is None


def test_errors_of_a_joint_law_are_those_of_the_jackknife():
  # CR3 adds up how far the estimate moves when one size N is left out.
  n, m = np.tile(N, 3), np.repeat([1.0, 2.0, 8.0], len(N))
  y = np.exp(np.random.default_rng(0).normal(0, 0.1, len(n)))
  whole = fit_power_law(n, y, m)
  without = [fit_power_law(n[n != size], y[n != size], m[n != size]) for size in N]
  off = [one.law.alpha - whole.law.alpha for one in without]
  low, high = whole.interval()["alpha"]
  t = 2.353363  # Student's for 90% on 5 - 2 degrees of freedom.
  assert (high - low) / 2 == pytest.approx(t * np.sqrt(np.square(off).sum()), rel=1e-5)
  # The loss of a new run has the variance of the residuals, too.
  off = [np.log(one.law(1e10, 2) / whole.law(1e10, 2)) for one in without]
  variance = np.square(off).sum() + np.square(whole.residuals).sum() / (len(n) - 3)
  low, high = np.log(whole.predict_interval(1e10, 2))
  assert (high - low) / 2 == pytest.approx(t * np.sqrt(variance), rel=1e-5)


def test_an_interval_equals_the_one_computed_by_hand():
  # x = log N - mean is (-1, 0, 1) and log y is (0, 1, 0): the slope is 0, the residuals
  # (-1, 2, -1) / 3 have s^2 = 2/3 on 1 degree of freedom, and Student's t for 90% is
  # tan(0.45 pi) there.
  n = np.exp([9.0, 10.0, 11.0])
  found = fit_power_law(n, np.exp([0.0, 1.0, 0.0]))
  t, s = np.tan(0.45 * np.pi), np.sqrt(2 / 3)
  assert found.interval()["alpha"] == pytest.approx((-t * s / 2**0.5, t * s / 2**0.5))
  # At log N = 12 a prediction has the variance 1/3 + 4/2, a new run one more.
  low, high = found.predict_interval(np.exp(12))
  wide = t * s * np.sqrt(1 / 3 + 4 / 2 + 1)
  assert np.log([low, high]) == pytest.approx([1 / 3 - wide, 1 / 3 + wide])


def test_an_interval_beyond_all_floats_is_none():
  found = fit_power_law([1e6, 1.01e6, 1.02e6], [4, 3, 3.9])
  assert found.interval()["A"] is None
  assert found.interval()["alpha"][0] < found.law.alpha < found.interval()["alpha"][1]


def test_the_residual_of_the_largest_size_is_its_distance_from_the_other_sizes():
  # Through (1, 1) and (10, 0.1) the law says 0.01 at 100; it is e^0.3 times that.
  y = [1, 0.1, 0.01 * np.exp(0.3)]
  single = leave_largest_out(fit_power_law([1, 10, 100], y))
  assert single == {1: pytest.approx(0.3)}
  joint = fit_power_law([1, 10, 100] * 2, y + y, [1] * 3 + [2] * 3)
  assert leave_largest_out(joint) == {1: pytest.approx(0.3), 2: pytest.approx(0.3)}
  assert leave_largest_out(fit_power_law([1, 10], y[:2])) == {}


@settings(max_examples=50, deadline=None)
@given(st.floats(10.2, 15.8), st.floats(0.001, 1), st.floats(1, 5))
def test_the_best_batch_of_a_parabola_is_its_vertex(log2_best, curvature, least):
  batches = 2.0 ** np.arange(10, 17)
  losses = curvature * (np.log2(batches) - log2_best) ** 2 + least
  found = fit_best_batch(batches, losses)
  assert np.log2(found) == pytest.approx(log2_best, abs=1e-5)


@pytest.mark.parametrize(
  ("batches", "losses", "message"),
  [
    ([1, 2], [3, 2], "needs 3"),
    ([1, 2, 4], [3, 3.5, 3], "has no minimum between 1 and 4"),
    ([1, 2, 4], [4, 3, 2.5], "lies outside the batch sizes swept, 1 to 4; add larger"),
    ([1, 2, 4], [2.5, 3, 4], "add smaller"),
  ],
)
def test_batches_without_an_interior_minimum_are_refused(batches, losses, message):
  with pytest.raises(ValueError, match=message):
    fit_best_batch(batches, losses, "s1")


@pytest.mark.parametrize(
  ("n", "y", "m", "message"),
  [
    ([1e6], [3], None, "at least 2 different sizes N, .* but has 1: add"),
    ([1e6, 1e6, 1e7], [3, 2, 1], None, "two values at N = 1e.06, M = 1; keep the best"),
    ([1e6, 1e7], [3, 0], None, "is 0 at N = 1e.07.*drop the cell or repeat its run"),
    ([1e6, 1e7], [3, np.nan], None, "is nan at"),
    ([0, 1e7], [3, 2], None, "all three must be positive"),
    ([1e6, 1e7, 1e8], [3, 2, 1], [1, 1, 1], "2 different replica counts M, .* but has"),
    ([1e6, 1e7], [3, 2, 1], None, "must be of the same length"),
    ([1e6, 1e7], [3, 2], [1, 2], "N and M vary together"),
    (np.array(N) ** 0.3, N, np.array(N) ** -1.7, "N and M vary together"),
    ([1e6, 1.0001e6], [4, 3], None, "too near one another; add sizes"),
  ],
)
def test_points_without_a_law_are_refused(n, y, m, message):
  with pytest.raises(ValueError, match=message):
    fit_power_law(n, y, m, "the loss")
