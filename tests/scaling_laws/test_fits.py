"""Fits against closed forms: laws are recovered, optima are optima, errors say what."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.scaling_laws.fits import (
  PowerLaw,
  fit_best_batch,
  fit_power_law,
  leave_largest_out,
)

N = [1e6, 3e6, 1e7, 3e7, 1e8]


@settings(max_examples=50, deadline=None)
@given(
  st.floats(1e-3, 1e5),
  st.floats(-1.5, 1.5),
  st.floats(-0.5, 0.5),
)
def test_a_joint_law_without_noise_is_recovered(a, alpha, beta):
  law = PowerLaw(a, alpha, beta)
  n, m = np.repeat(N, 3), np.tile([1.0, 2.0, 8.0], len(N))
  values = [law(*cell) for cell in zip(n, m)]
  found = fit_power_law(n, values, m, samples=10)
  assert pytest.approx(a, rel=1e-6) == found.law.A
  assert found.law.alpha == pytest.approx(alpha, abs=1e-8)
  assert found.law.beta == pytest.approx(beta, abs=1e-8)
  assert found.residuals == pytest.approx(0, abs=1e-8)


def test_two_points_give_the_line_through_them_and_no_interval():
  found = fit_power_law([1e6, 1e8], [4.0, 2.0])
  assert found.law.alpha == pytest.approx(np.log(0.5) / np.log(100))
  assert found.law(1e7) == pytest.approx(np.sqrt(8))
  assert np.isnan(found.interval()["A"]).all()


def test_noise_of_known_size_is_covered_by_the_intervals():
  # 90% intervals of 200 data sets hold the truth in about 180 of them.
  law, rng, n = PowerLaw(20, -0.1), np.random.default_rng(0), np.geomspace(1e6, 1e9, 20)
  inside = covered = 0
  for seed in range(200):
    noise = np.exp(rng.normal(0, 0.01, len(n)))
    found = fit_power_law(n, 20 * n**-0.1 * noise, samples=300, seed=seed)
    low, high = found.interval()["alpha"]
    inside += low < law.alpha < high
    low, high = found.predict_interval(1e10)
    covered += low < law(1e10) * np.exp(rng.normal(0, 0.01)) < high
  assert 160 <= inside <= 195
  assert 160 <= covered <= 197


def test_leave_largest_out_is_the_distance_from_the_line_through_the_others():
  # Through (1, 1) and (10, 0.1) the law says 0.01 at 100; it is e^0.3 times that.
  y = [1, 0.1, 0.01 * np.exp(0.3)]
  assert leave_largest_out([1, 10, 100], y)[1] == pytest.approx(0.3)
  joint = leave_largest_out([1, 10, 100] * 2, y + y, [1] * 3 + [2] * 3)
  assert joint == {1: pytest.approx(0.3), 2: pytest.approx(0.3)}


@settings(max_examples=50, deadline=None)
@given(st.floats(10.2, 15.8), st.floats(0.001, 1), st.floats(1, 5))
def test_the_best_batch_of_a_parabola_is_its_vertex(log2_best, curvature, least):
  batches = 2.0 ** np.arange(10, 17)
  losses = curvature * (np.log2(batches) - log2_best) ** 2 + least
  found = fit_best_batch(batches, losses)
  assert np.log2(found.best_batch) == pytest.approx(log2_best, abs=1e-5)
  assert found.loss == pytest.approx(least, rel=1e-6)
  assert found.curvature == pytest.approx(curvature, rel=1e-6)


@pytest.mark.parametrize(
  ("batches", "losses", "message"),
  [
    ([1, 2], [3, 2], "needs 3"),
    ([1, 2, 4], [3, 3.5, 3], "has no minimum between 1 and 4"),
    ([1, 2, 4], [4, 3, 2.5], "lies outside the batch sizes swept, 1 to 4; add larger"),
    ([1, 2, 4], [2.5, 3, 4], "add smaller"),
    ([1, 2, 2], [3, 2, 2], "two values at N = 2"),
  ],
)
def test_batches_that_show_no_minimum(batches, losses, message):
  with pytest.raises(ValueError, match=message):
    fit_best_batch(batches, losses, "s1")


@pytest.mark.parametrize(
  ("n", "y", "m", "message"),
  [
    ([1e6], [3], None, "at 1 of the sizes N; a law needs at least 2"),
    ([1e6, 1e6, 1e7], [3, 2, 1], None, "two values at N = 1e.06, M = 1; keep the best"),
    ([1e6, 1e7], [3, 0], None, "is 0 at N = 1e.07.*drop the cell or repeat its run"),
    ([1e6, 1e7], [3, -1], None, "is -1 at"),
    ([1e6, 1e7], [3, np.nan], None, "is nan at"),
    ([0, 1e7], [3, 2], None, "both must be positive"),
    ([1e6, 1e7, 1e8], [3, 2, 1], [1, 1, 1], "at 1 of the replica counts M"),
    ([1e6, 1e7], [3, 2, 1], None, "give one of each per point"),
    ([1e6, 1e7], [3, 2], [1, 2], "3 parameters"),
  ],
)
def test_points_that_cannot_be_fitted(n, y, m, message):
  with pytest.raises(ValueError, match=message):
    fit_power_law(n, y, m, "the loss")


def test_a_level_is_a_probability():
  with pytest.raises(ValueError, match="level is 90; choose a probability"):
    fit_power_law(N, N).interval(90)
