"""The picture of a run: which runs and which steps can be drawn."""

import pathlib
import sys

import pytest

from diloco.simulate.schedule_figure import Send

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))
import draw_run


def test_a_folder_without_a_run_is_refused(tmp_path):
  with pytest.raises(draw_run.ConfigError, match="has no checkpoint; train first"):
    draw_run.read(tmp_path)


def test_steps_without_a_send_are_refused():
  sends = [Send(t, 0, 1) for t in (8, 16)]
  message = "but the log has sends from step 8 to 16; choose"
  with pytest.raises(draw_run.ConfigError, match=message):
    draw_run.check(sends, 20, 30)
  with pytest.raises(draw_run.ConfigError, match="but the log has no send; choose"):
    draw_run.check([], 20, 30)


def test_a_damaged_run_is_refused(tmp_path):
  (tmp_path / "checkpoints" / "4").mkdir(parents=True)
  with pytest.raises(draw_run.ConfigError, match=r"whose newest checkpoint or metrics"):
    draw_run.read(tmp_path)
