"""The benchmarks run to their tables; what they measure is not judged here."""

import re

import pytest
import running

ACCELERATOR = "bench_accelerator.py --sizes=105k --attention=xla --remat=none"
CONFIG = "--config=tests/tiny_config.py"
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


def run(command: str, **environment: str) -> str:
  """Runs a script and its arguments; returns its output."""
  script, *arguments = command.split()
  env = running.environment(**environment)
  ended = running.python(f"scripts/benchmarks/{script}", *arguments, env=env)
  assert ended.returncode == 0, ended.stderr[-2000:]
  return ended.stdout


@pytest.mark.slow("a benchmark")
@pytest.mark.parametrize(
  ("command", "last"),
  [
    (f"bench_step.py {CONFIG} --repeats=1", "outer step of a fragment over its copy"),
    (f"bench_checkpoint.py {CONFIG} --workdir={{}}", "checksums after reading"),
    (f"bench_together.py {CONFIG} --repeats=1 --runs=1,2", "   2 "),
    (f"{ACCELERATOR} --repeats=1", "one device"),
  ],
)
def test_a_benchmark_runs_to_its_last_line(command, last, tmp_path):
  assert last in run(command.format(tmp_path / "new")).splitlines()[-1]


@pytest.mark.slow("a benchmark")
def test_two_devices_exchange_beside_an_inner_step():
  ended = run(f"{ACCELERATOR} --repeats=1", XLA_FLAGS=TWO_DEVICES)
  assert re.search(r"M=2 .* [+-][\d.]+%$", ended.splitlines()[-1])
