"""Power laws by least squares on logarithms, with bootstrap uncertainty.

Scaling Laws for DiLoCo (arXiv 2503.09799), Sections 6.1 to 6.3. Symbols: N
parameters, M replicas, y a loss, a learning rate or a batch size.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Numbers = Sequence[float] | Array


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
  """A fitted law with what the bootstrap says about it.

  Attributes:
    law: the least-squares fit.
    draws: float64 [S, 2 or 3], log A, alpha and, if joint, beta of S resamples.
    residuals: float64 [n], log y - log fit of each point, scaled by
      sqrt(n / (n - k)) so that their spread estimates that of new points.
    num_points: n.
  """

  law: PowerLaw
  draws: Array
  residuals: Array
  num_points: int

  def __call__(self, params: float, replicas: float = 1) -> float:
    """The law at N parameters and M replicas."""
    return self.law(params, replicas)

  def interval(self, level: float = 0.9) -> dict[str, tuple[float, float]]:
    """Percentile interval of each parameter: {'A': (low, high), ...}."""
    low, high = np.quantile(self.draws, tails(level), axis=0)
    low[0], high[0] = np.exp(low[0]), np.exp(high[0])
    names = ("A", "alpha", "beta")
    return {k: (float(a), float(b)) for k, a, b in zip(names, low, high)}

  def predict_interval(
    self, params: float, replicas: float = 1, level: float = 0.9
  ) -> tuple[float, float]:
    """Interval for a new observation at (N, M).

    Each resample's prediction is combined with a resampled residual. What no
    resampling of points can know, that the law itself bends beyond the largest
    N, is not in it.
    """
    x = _design([params], [replicas], self.draws.shape[1] == 3)[0]
    logs = (self.draws @ x)[:, None] + self.residuals[None, :]
    low, high = np.exp(np.quantile(logs, tails(level)))
    return float(low), float(high)


def fit_power_law(
  params: Numbers,
  values: Numbers,
  replicas: Numbers | None = None,
  name: str = "the power law",
  samples: int = 2000,
  seed: int = 0,
) -> Fit:
  """Fits y = A N^alpha, or jointly y = A N^alpha M^beta (Sections 6.1 and 6.2).

  Ordinary least squares on log y. The bootstrap resamples residuals, because
  resampled points would often leave one or two distinct N of five to seven.

  Args:
    params: N of each point [n].
    values: y of each point [n], positive.
    replicas: M of each point [n] for a joint law, None for a law in N alone.
    name: what is fitted, for errors.
    samples: S, bootstrap resamples.
    seed: of the bootstrap.

  Raises:
    ValueError: values that are no positive numbers, cells given twice, or fewer
      distinct sizes (or replica counts) than the law needs.
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
  inverse = np.linalg.pinv(x)
  coefficients = inverse @ np.log(y_)
  fitted = x @ coefficients
  residuals = np.log(y_) - fitted
  spare = len(n_) - x.shape[1]
  residuals = residuals * np.sqrt(len(n_) / spare) if spare else residuals * np.nan
  rng = np.random.default_rng(seed)
  noise = rng.choice(residuals, (samples, len(n_)))
  draws = (fitted + noise) @ inverse.T
  law = PowerLaw(float(np.exp(coefficients[0])), *map(float, coefficients[1:]))
  return Fit(law, draws, residuals, len(n_))


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


@dataclasses.dataclass(frozen=True)
class Quadratic:
  """loss = a (log2 B - log2 B*)^2 + c, from runs at powers of two."""

  best_batch: float
  curvature: float
  loss: float


def fit_best_batch(
  batches: Numbers, losses: Numbers, name: str = "the best batch"
) -> Quadratic:
  """The batch size with the least loss, between powers of two (Section 6.1).

  Args:
    batches: B of each run [n], in tokens or any other unit, each once.
    losses: loss of the best learning rate at that B [n].
    name: the cell, for errors.

  Returns:
    The minimum of the quadratic in log2 B; best_batch has the unit of batches.

  Raises:
    ValueError: fewer than three batch sizes, a curve without a minimum, or a
      minimum outside the range swept.
  """
  b, y = np.asarray(batches, float), np.asarray(losses, float)
  check_points(b, y, np.ones_like(b), name)
  if len(b) < 3:
    raise ValueError(
      f"{name} has runs at {len(b)} batch size(s); a quadratic needs 3: sweep more"
      " powers of two."
    )
  x = np.log2(b)
  center = x.mean()
  a, slope, const = np.polyfit(x - center, y, 2)
  low, high = b.min(), b.max()
  if a <= 0:
    raise ValueError(
      f"{name}: the loss over log2 B has no minimum between {low:g} and {high:g};"
      " extend the sweep on the side where the loss falls."
    )
  best = 2 ** (center - slope / (2 * a))
  if not low <= best <= high:
    side = "smaller" if best < low else "larger"
    raise ValueError(
      f"{name}: the quadratic's minimum {best:g} lies outside the batch sizes swept,"
      f" {low:g} to {high:g}; add {side} ones."
    )
  return Quadratic(float(best), float(a), float(const - slope**2 / (4 * a)))


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
  law = fit_power_law(n_[~held], y_[~held], kept_m, what, samples=1).law
  return {
    int(m): residual(y, law(n, m)) for n, m, y in zip(n_[held], m_[held], y_[held])
  }


def _design(params: Numbers, replicas: Numbers, joint: bool) -> Array:
  """Columns 1, log N and, if joint, log M: float64 [n, 2 or 3]."""
  columns = [np.ones(len(params)), np.log(params)]
  return np.stack(columns + ([np.log(replicas)] if joint else []), axis=1)


def tails(level: float) -> tuple[float, float]:
  """The two quantiles between which a share `level` lies."""
  if not 0 < level < 1:
    raise ValueError(f"level is {level}; choose a probability, such as 0.9.")
  return (1 - level) / 2, (1 + level) / 2
