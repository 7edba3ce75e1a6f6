"""Thins and smooths the curves of a run for pictures. No JAX."""

from typing import Any

import numpy as np

# A curve with more points than pixels shows no more, and takes longer to draw.
MOST_POINTS = 2000
# Share of the run over which `smoothed` averages.
_WINDOW = 0.02


def points(by_step: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
  """Returns the steps, ascending, and their values; a missing value is NaN."""
  steps = np.array(sorted(by_step))
  return steps, np.array([by_step[t] for t in steps], dtype=float)


def line(panel: Any, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
  """Draws a line with no more points than MOST_POINTS."""
  some = slice(None, None, len(x) // MOST_POINTS + 1)
  panel.plot(x[some], y[some], **style)


def smoothed(values: np.ndarray) -> np.ndarray:
  """Averages each value with its neighbours; a window has `_WINDOW` of all values."""
  return running_mean(values, int(len(values) * _WINDOW / 2))


def running_mean(values: np.ndarray, reach: int) -> np.ndarray:
  """Averages each value with the `reach` values before and after it."""
  import pandas as pd  # Slow to import.

  window = pd.Series(values).rolling(2 * reach + 1, min_periods=1, center=True)
  return window.mean().to_numpy()
