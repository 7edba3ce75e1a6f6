"""The installed wheel works in an empty folder, without the clone."""

import importlib.metadata
import pathlib
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def installed() -> pathlib.Path:
  """The folder into which a wheel was installed, as .ci/run does."""
  files = importlib.metadata.files("diloco") or []
  # An editable installation has the configs, but not the modules.
  found = [f for f in files if f.as_posix() == "diloco/__init__.py"]
  if not found:
    pytest.skip("diloco is not installed from a wheel")
  return pathlib.Path(found[0].locate()).parents[1]


def python(*args: str, cwd: pathlib.Path) -> subprocess.CompletedProcess:
  """Runs Python without PYTHONPATH and without the current folder on its path."""
  command = [sys.executable, "-I", *args]
  return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_the_package_is_that_of_the_wheel(installed, tmp_path):
  found = python("-c", "import diloco; print(diloco.__file__)", cwd=tmp_path)
  assert found.stdout.strip() == str(installed / "diloco" / "__init__.py")
  assert (installed / "diloco/scripts/launchers/slurm.sh").is_file()


def test_diloco_is_a_command_and_has_types(installed, tmp_path):
  ended = subprocess.run(
    [pathlib.Path(sys.executable).with_name("diloco"), "--version"],
    cwd=tmp_path,
    capture_output=True,
    text=True,
  )
  assert ended.stdout == f"diloco {importlib.metadata.version('diloco')}\n"
  assert (installed / "diloco/py.typed").is_file()


@pytest.mark.parametrize("name", ["configs/sample.py", "chinchilla:35M,M=4"])
def test_configs_are_found_by_name(installed, tmp_path, name):
  ended = python(
    "-m", "diloco.main", f"--config={name}", "--print_config", cwd=tmp_path
  )
  assert ended.returncode == 0, ended.stderr
  assert "wire.format = auto, here e3m0" in ended.stdout
