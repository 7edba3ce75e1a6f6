"""The benchmarks run to their tables; what they measure is not judged here."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_the_pieces_of_training_are_timed():
  command = "scripts/bench_step.py --config=tests/tiny_config.py --repeats=1"
  ended = subprocess.run(
    [sys.executable, *command.split()],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])},
    capture_output=True,
    text=True,
    check=False,
  )
  assert ended.returncode == 0, ended.stderr[-2000:]
  assert "outer step of a fragment over its copy" in ended.stdout.splitlines()[-1]
