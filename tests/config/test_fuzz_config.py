"""Random values of config fields end in a sentence or in a result."""

import pathlib
import runpy
import subprocess
import sys
import time

import pytest

from diloco import train
from diloco.processes import stop
from diloco.processes.peers import Peers

SCRIPT = pathlib.Path(__file__).with_name("fuzz_config.py")


def run(cases: int, seed: int) -> subprocess.CompletedProcess:
  args = [sys.executable, SCRIPT, f"--cases={cases}", f"--seed={seed}"]
  args.append("--limit_s=600")  # Two cores share the tests.
  return subprocess.run(args, capture_output=True, text=True, check=False)


@pytest.mark.integration("trains random configs")
def test_a_few_random_configs_end_well():
  process = run(10, 0)
  assert process.returncode == 0, process.stdout + process.stderr[-2000:]
  assert "refused" in process.stdout


@pytest.mark.slow("trains many random configs")
def test_many_random_configs_end_well():
  process = run(200, 2)
  assert process.returncode == 0, process.stdout + process.stderr[-2000:]
  assert "trained" in process.stdout


def end_of_a_case(tmp_path) -> str:
  script = runpy.run_path(str(SCRIPT))
  (tmp_path / "base.py").write_text(script["BASE"])
  return script["run"](tmp_path / "base.py", [], tmp_path / "run", 1)


def test_another_end_is_told(tmp_path, monkeypatch):
  monkeypatch.setattr(train, "train", lambda *_: 1 / 0)
  end = end_of_a_case(tmp_path)
  assert end.startswith("other")
  assert "ZeroDivisionError" in end


def test_a_case_without_an_end_is_told(tmp_path, monkeypatch):
  def train_for_ever(*_):
    with stop.end_on_signal(Peers()):
      time.sleep(60)

  monkeypatch.setattr(train, "train", train_for_ever)
  assert end_of_a_case(tmp_path) == "slow: more than 1 s"
