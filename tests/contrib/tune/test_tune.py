"""The search for the fastest settings, with times that the test makes up."""

import pathlib
import re
import subprocess
import sys

import pytest

from diloco.config import Config, changed, resolve
from diloco.contrib.tune import tune

ROOT = pathlib.Path(__file__).parents[3]


def made_up(c: Config) -> float:
  """The seconds of a step: dots without a loop is fastest, and microbatches of 2."""
  slow = {"none": 1.2, "dots": 1.0, "full": 1.5}[c.model.remat]
  return slow + 0.3 * c.model.unroll + abs(c.train.accumulate - 2)


def timer(now: Config, trial: Config) -> tuple[float, float]:
  if trial.model.remat == "none":
    raise MemoryError
  return made_up(now), made_up(trial)


@pytest.fixture
def c(tiny) -> Config:
  tiny.train.batch_size = 16
  return resolve(tiny)


def test_the_search_finds_the_fastest_settings_that_fit(c, capsys):
  best = tune.search(c, timer)
  assert best == {"model.remat": "dots", "model.unroll": 0, "train.accumulate": 2}
  lines = capsys.readouterr().out.splitlines()
  assert any("remat=none" in line and "out of memory" in line for line in lines)


def test_noise_changes_nothing(c):
  assert tune.search(c, lambda now, trial: (1.0, 0.99)) == {}


def test_only_settings_that_change_no_result_are_tried(c):
  tried = {
    field for group in tune.candidates(c) for fields in group for field in fields
  }
  same = {"model.remat", "model.unroll", "model.loss_chunk", "train.accumulate"}
  assert tried == same


def test_settings_that_cannot_work_are_not_tried(c):
  trials = []
  tune.search(c, lambda now, trial: trials.append(trial) or (1.0, 1.0))
  assert {t.train.accumulate for t in trials} <= {1, 2, 4, 8}  # M = 2, 16 sequences.
  assert all(changed(t, {}) == t for t in trials)


@pytest.mark.integration("compiles steps of a dozen settings")
def test_the_command_prints_flags_that_a_run_takes(monkeypatch):
  monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests'}:{ROOT}")
  config = f"--config={ROOT / 'tests' / 'tiny_config.py'}"
  command = [sys.executable, "-m", "diloco", "tune", config, "--seconds=0"]
  ended = subprocess.run(command, capture_output=True, text=True, check=True)
  last = ended.stdout.splitlines()[-1]
  assert re.match(r"[\d.]+ times as fast as the config: ", last)
  flags = re.findall(r"--config\.\S+", last)
  command = [sys.executable, "-m", "diloco", "main", config, *flags, "--print_config"]
  subprocess.run(command, check=True, capture_output=True)
