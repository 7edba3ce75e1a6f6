"""The picture of a run shows its sends where the schedule has them."""

import pathlib
import sys

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from diloco.config import resolve

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))
import draw_run


def test_bars_start_at_sends_and_end_at_arrivals(tiny):
  tiny.sync_every, tiny.overlap.tau, tiny.train.steps = 8, 3, 40
  c = resolve(tiny)
  schedule, count = c.make_schedule(), len(c.make_fragments())
  sends = [
    {"step": t, "fragment": p, "bytes": 1000}
    for t in range(1, 41)
    for p in schedule.sends(t)
  ]
  axes = Figure().subplots()
  draw_run.draw(c, sends, 10, 30, axes)
  boxes = [x for x in axes.patches if isinstance(x, Rectangle)]
  # Fragments have the rows below `count`, replicas those above.
  bars = {(b.get_x(), count - 1 - b.get_y(), b.get_width()) for b in boxes}
  drawn = {bar for bar in bars if bar[1] >= 0}
  shown = [s for s in sends if 10 <= s["step"] <= 30]
  assert drawn == {(s["step"], s["fragment"], 3) for s in shown}
  assert len(boxes) - len(drawn) == c.replicas * 21


def test_a_folder_without_a_run_is_refused(tmp_path):
  with pytest.raises(draw_run.ConfigError, match="has no checkpoint; train first"):
    draw_run.read(tmp_path)


@pytest.mark.parametrize(
  ("first", "last", "out", "message"),
  [
    (5, 4, "a.png", "draw from 1 to 1000 steps"),
    (1, 10**9, "a.png", "draw from 1 to 1000 steps"),
    (20, 30, "a.png", "but the log has sends from step 8 to 16; choose"),
    (1, 30, "folder", "--out is 'folder'; give a file such as run.png"),
    (1, 30, "a.txt", "--out is 'a.txt'; give a file such as run.png"),
  ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(first, last, out, message):
  sends = [{"step": t, "fragment": 0, "bytes": 1} for t in (8, 16)]
  with pytest.raises(draw_run.ConfigError, match=message):
    draw_run.check(sends, first, last, pathlib.Path(out))


def test_a_damaged_run_is_refused(tmp_path):
  (tmp_path / "checkpoints" / "4").mkdir(parents=True)
  with pytest.raises(draw_run.ConfigError, match=r"whose newest checkpoint or metrics"):
    draw_run.read(tmp_path)
