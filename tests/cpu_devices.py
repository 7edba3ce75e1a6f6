"""Runs Python in a process of its own that has several CPU devices."""

import json
import os
import pathlib
from typing import Any

import conftest
import running

TESTS = pathlib.Path(__file__).parent


def run_on_8_devices(*parts: str, optimized: bool = False) -> dict:
  """The results of these parts of multidevice.py."""
  return run(8, TESTS / "multidevice.py", *parts, optimized=optimized)


def run(count: int, *command: str | pathlib.Path, optimized: bool = False) -> Any:
  """Returns the JSON in the last line that Python prints.

  Args:
    count: CPU devices of the process.
    command: arguments of Python, which finds the tests' modules.
    optimized: compile as in training, not quickly.
  """
  flags = f"--xla_force_host_platform_device_count={count}"
  flags += f" {os.environ.get('XLA_FLAGS', '')}"
  if optimized:
    flags = flags.replace(conftest.QUICK_TO_COMPILE, "")
  env = running.environment(XLA_FLAGS=flags)
  found = running.python(*command, env=env, timeout=1800)
  assert found.returncode == 0, found.stderr[-3000:]
  return json.loads(found.stdout.splitlines()[-1])
