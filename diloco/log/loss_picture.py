"""Draws the loss curve of a run while the run goes on. No JAX."""

import pathlib
from typing import Any

import numpy as np

from diloco.config import Config
from diloco.log.metrics import Follower, drop_after
from diloco.log.workdir import title
from diloco.util import palette

FILE = "loss.png"
# More points than pixels show nothing more, and take longer to draw.
MOST_POINTS = 2000
# With more marks of sends, they would merge into one bar.
_MOST_MARKS = 300
# Share of the run over which the smoothed line averages.
_WINDOW = 0.02
_NOTE = "Every batch is other text, harder or easier; the held-out text stays the same."


class LossPicture:
  """The picture loss.png of a run, which may be drawn again and again.

  Each drawing reads the lines of metrics.jsonl that are new.
  """

  def __init__(self, workdir: pathlib.Path, c: Config):
    self._follower, self._path, self._c = Follower(workdir), workdir / FILE, c
    self._loss, self._held_out = dict[int, float](), dict[int, float]()
    self._sends, self._newest = dict[int, None](), 0

  def draw(self) -> pathlib.Path:
    """Replaces the picture; a reader never sees a part of it."""
    self._read()
    palette.save(self._figure, self._path)
    return self._path

  def _figure(self) -> Any:
    figure, (axes,) = palette.panels(self._title(), height=4.4)
    figure.set_figwidth(palette.PAGE)
    color = palette.COLORS[self._c.algorithm]
    steps, loss = points(self._loss)
    if len(steps):
      line(axes, steps, loss, color=color, alpha=0.4, lw=0.7, label="training, a batch")
      label = f"training, mean over {_WINDOW:.0%} of the steps"
      line(axes, steps, smoothed(loss), color=color, lw=1.8, label=label)
    if self._held_out:
      label = "held-out" if self._c.one_model else "held-out, outer parameters"
      axes.plot(*points(self._held_out), "ko", ms=4, label=label)
    self._mark_sends(axes)
    axes.set(xlabel="inner step", ylabel="loss (nats per token)")
    return palette.legend(figure, _NOTE)

  def _read(self) -> None:
    for r in self._follower.records():
      if r["kind"] == "step":
        if r["step"] <= self._newest:  # The run went on from an earlier step.
          for some in (self._loss, self._held_out, self._sends):
            drop_after(r["step"], some)
        self._newest = r["step"]
        self._loss[r["step"]] = r["loss"]
      elif r["kind"] == "eval":
        self._held_out[r["step"]] = r["loss_outer"]
      elif r["kind"] == "send":
        self._sends[r["step"]] = None

  def _mark_sends(self, axes: Any) -> None:
    """Marks the steps after which fragments are sent, at the bottom."""
    count = len(self._sends)
    if not count:
      return
    label = f"a fragment is sent (after {count:,} of the steps)"
    if count > _MOST_MARKS:  # Only the legend counts the sends.
      axes.plot([], [], " ", label=f"{label[:-1]}, too many to mark)")
      return
    where = {"transform": axes.get_xaxis_transform(), "color": "0.6", "lw": 0.7}
    axes.vlines(sorted(self._sends), 0, 0.03, label=label, **where)

  def _title(self) -> str:
    c = self._c
    text = title(c)
    if not c.one_model:
      text += f", tau={c.overlap.different_taus}, {c.wire.format}"
    last = max(self._loss, default=0)
    return f"{text}: step {last:,} of {c.train.steps:,}"


def points(by_step: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
  """Returns the steps, ascending, and their values; a missing value is NaN."""
  steps = np.array(sorted(by_step))
  return steps, np.array([by_step[t] for t in steps], dtype=float)


def line(panel: Any, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
  """Draws a line with no more points than MOST_POINTS."""
  some = slice(None, None, len(x) // MOST_POINTS + 1)
  panel.plot(x[some], y[some], **style)


def smoothed(values: np.ndarray) -> np.ndarray:
  """Returns the mean of the values around each value, over `_WINDOW` of all."""
  return running_mean(values, int(len(values) * _WINDOW / 2))


def running_mean(values: np.ndarray, reach: int) -> np.ndarray:
  """Returns the mean of each value, those `reach` before and those `reach` after."""
  import pandas as pd  # Slow to import.

  window = pd.Series(values).rolling(2 * reach + 1, min_periods=1, center=True)
  return window.mean().to_numpy()
