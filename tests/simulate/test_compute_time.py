"""The seconds of a step, by hand."""

import pathlib

import pytest

from diloco.config.command_line import load_config
from diloco.simulate.compute_time import step_time
from diloco.spec.shapes import flops_per_token

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"{ROOT}/configs/chinchilla.py:1.3B,M=2,H=100"


def test_step_time_by_hand():
  c = load_config(CONFIG)
  flops = flops_per_token(c.model) * c.train.batch_size * 2048
  seconds = flops / (64 * 200e12 * 0.3)
  assert step_time(c, 64, 200, 0.3) == pytest.approx(seconds)
  assert step_time(c) == pytest.approx(flops / (197e12 * 0.4))
  with pytest.raises(ValueError, match="chips is 0, but must be above 0"):
    step_time(c, chips=0)
