"""The benchmarks run to their tables; what they measure is not judged here."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("command", "last"),
  [
    ("bench_step.py --repeats=1", "outer step of a fragment over its copy"),
    ("bench_checkpoint.py --workdir={}", "checksums after reading"),
    ("bench_together.py --repeats=1 --runs=1,2", "   2 "),
  ],
)
def test_a_benchmark_runs_to_its_last_line(command, last, tmp_path):
  words = command.format(tmp_path / "new").split()
  ended = subprocess.run(
    [
      sys.executable,
      f"scripts/{words[0]}",
      "--config=tests/tiny_config.py",
      *words[1:],
    ],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])},
    capture_output=True,
    text=True,
    check=False,
  )
  assert ended.returncode == 0, ended.stderr[-2000:]
  assert last in ended.stdout.splitlines()[-1]
