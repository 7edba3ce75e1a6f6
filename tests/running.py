"""Starts Python in a process of its own, which finds the package and the tests."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
  """Variables of a process."""
  paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
  return {**os.environ, "PYTHONPATH": paths, **more}


def start(*args: str | pathlib.Path, before=(), **more) -> subprocess.Popen:
  """Starts Python in the clone.

  Args:
    args: arguments of Python.
    before: words before those of Python.
    more: arguments of Popen.
  """
  options = {"cwd": ROOT, "env": environment(), "text": True} | more
  return subprocess.Popen([*before, sys.executable, *args], **options)


def python(*args: str | pathlib.Path, **more) -> subprocess.CompletedProcess[str]:
  """Runs Python in the clone to its end; returns what it printed.

  Args:
    args: arguments of Python.
    more: arguments of `subprocess.run`.
  """
  options = {"cwd": ROOT, "env": environment(), "text": True} | more
  return subprocess.run([sys.executable, *args], capture_output=True, **options)
