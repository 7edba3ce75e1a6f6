"""Random values of config fields end in a sentence or in a result."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "fuzz_config.py"


def run(cases: int, seed: int) -> subprocess.CompletedProcess:
  args = [sys.executable, SCRIPT, f"--cases={cases}", f"--seed={seed}"]
  return subprocess.run(args, capture_output=True, text=True, check=False)


def test_a_few_random_configs_end_well():
  process = run(10, 0)
  assert process.returncode == 0, process.stdout + process.stderr[-2000:]
  assert "refused" in process.stdout


@pytest.mark.slow
def test_many_random_configs_end_well():
  process = run(200, 2)
  assert process.returncode == 0, process.stdout + process.stderr[-2000:]
  assert "trained" in process.stdout


def test_a_bad_end_is_shown():
  # An error of the package itself, in every case.
  code = (
    "import runpy, sys; sys.argv = ['fuzz', '--cases=3'];"
    " import diloco.config; resolve = sys.modules['diloco.config.resolve'];"
    " resolve._check_each = lambda v: 1 / 0;"
    f" runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
  )
  process = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=False
  )
  assert process.returncode == 1
  assert "ZeroDivisionError" in process.stdout
