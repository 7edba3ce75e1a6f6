"""loss.png: always whole, drawn without pyplot, and cheap for long runs."""

import json
import os

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from diloco.config import resolve
from diloco.log import loss_picture
from diloco.log.loss_picture import LossPicture


def add(folder, *records):
  with (folder / "metrics.jsonl").open("a") as file:
    file.writelines(json.dumps(r) + "\n" for r in records)


def step(t, loss):
  return {"kind": "step", "step": t, "loss": loss}


def test_drawing_the_loss_keeps_the_backend(tiny, tmp_path):
  add(tmp_path, *[step(t, 5 - t / 10) for t in (1, 2, 3)])
  add(tmp_path, {"kind": "eval", "step": 3, "loss_outer": 4.8})
  before = matplotlib.get_backend()
  try:
    matplotlib.use("svg")
    picture = LossPicture(tmp_path, resolve(tiny)).draw()
    assert matplotlib.get_backend().lower() == "svg"
  finally:
    matplotlib.use(before)
  assert picture.read_bytes().startswith(b"\x89PNG")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_a_picture_that_is_not_written_leaves_the_old_one(tiny, tmp_path, monkeypatch):
  add(tmp_path, step(1, 5.0))
  picture = LossPicture(tmp_path, resolve(tiny))
  before = picture.draw().read_bytes()

  def fail(_):
    raise OSError("no room")

  monkeypatch.setattr(os, "fsync", fail)
  add(tmp_path, step(2, 4.0))
  with pytest.raises(OSError, match="no room"):
    picture.draw()
  assert (tmp_path / "loss.png").read_bytes() == before


def test_a_picture_has_the_records_added_since_the_last_one(tiny, tmp_path):
  picture = LossPicture(tmp_path, resolve(tiny))
  add(tmp_path, step(1, 5.0), step(2, 4.0))
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"kind": "step", "step": 3, ')
  picture.draw()
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('"loss": 3.5}\n')
  # A resumed run writes the steps since its checkpoint again.
  add(tmp_path, {"kind": "send", "step": 4, "fragment": 0})
  add(tmp_path, step(2, 4.5), {"kind": "send", "step": 3, "fragment": 0})
  picture.draw()
  assert picture._loss == {1: 5.0, 2: 4.5}  # The old step 3 is abandoned.
  assert [*picture._sends] == [3]


@pytest.mark.parametrize("count", [1, 49, 100, 5000])
def test_the_smoothed_line_is_the_mean_around_each_point(count):
  values = np.random.default_rng(0).standard_normal(count)
  reach = count // 100
  expected = [values[max(i - reach, 0) : i + reach + 1].mean() for i in range(count)]
  np.testing.assert_allclose(loss_picture.smoothed(values), expected, atol=1e-9)
  panel = Figure().subplots()
  loss_picture.line(panel, np.arange(count), values)
  assert 0 < len(panel.lines[0].get_xdata()) <= loss_picture.MOST_POINTS
