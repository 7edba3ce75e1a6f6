"""Configs and scripts are found from any folder, in a clone and in a wheel."""

import functools
import re
import shutil
import tomllib

import pytest
import running
from absl import flags
from running import refused, shown

from diloco import __main__ as listing
from diloco.config import command_line
from diloco.errors import ConfigError
from diloco.util import command, shipped

PROJECT = tomllib.loads((running.ROOT / "pyproject.toml").read_text())


@pytest.fixture(params=["clone", "wheel"])
def package(request, monkeypatch, tmp_path):
  """The folder of the package, as it lies in a clone and as a wheel installs it."""
  made = running.ROOT / "diloco"
  if request.param == "wheel":
    made = tmp_path / "site-packages/diloco"
    build = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source, target in {"diloco": "diloco", **build["force-include"]}.items():
      copy = shutil.copytree if (running.ROOT / source).is_dir() else shutil.copy
      (made.parent / target).parent.mkdir(parents=True, exist_ok=True)
      copy(running.ROOT / source, made.parent / target)
  monkeypatch.setattr(shipped, "PACKAGE", made)
  (tmp_path / "empty").mkdir()
  monkeypatch.chdir(tmp_path / "empty")
  return shipped.PACKAGE


@pytest.mark.parametrize(
  "name", ["sample", "sample.py", "configs/sample.py", "diloco/configs/sample.py"]
)
def test_a_config_is_found_by_each_of_its_names(package, name):
  inside = package / "configs" / "sample.py"
  expected = inside if inside.exists() else running.ROOT / "configs" / "sample.py"
  assert shipped.find(name) == str(expected)
  assert command_line.load_config(name).model.dim == 128
  values = flags.FlagValues()
  argv = ["program", "-config", name, "--config.seed=3"]
  command_line.define_config(values)
  command_line._parse(values, argv)
  assert (values["config"].value.seed, values["config"].value.model.dim) == (3, 128)


def test_other_files_of_the_package_and_arguments(package):
  saved = shipped.find("diloco/sweep/saved.py")
  assert saved == str(package / "sweep" / "saved.py")
  c = command_line.load_config("chinchilla:1.3B,M=4", ["--config.overlap.tau=5"])
  assert (c.replicas, c.overlap.taus) == (4, (5,) * 4)
  assert command.load_module("ladder", "get_sweep", "").get_sweep().grids


def test_a_file_in_the_current_folder_goes_first(package, tmp_path):
  (tmp_path / "empty" / "configs").mkdir()
  shutil.copy(running.ROOT / "configs" / "wan.py", "configs/sample.py")
  assert shipped.find("configs/sample.py") == "configs/sample.py"
  assert command_line.load_config("configs/sample.py").model.dim == 192


def test_a_wrong_name_gives_the_known_ones(package):
  with pytest.raises(ConfigError) as caught:
    command_line.load_config("smaple:1")
  assert str(caught.value) == (
    "there is no file smaple (did you mean sample?); give for example"
    " configs/sample.py, or one of these names: batch_32, chinchilla, faults, methods,"
    " qwen3, sample, streaming, wan."
  )
  said = r"one of these names: ablations, accuracies, frontier, ladder\.$"
  with pytest.raises(ConfigError, match=said):
    command.load_module("laddr", "get_sweep", "configs/ladder.py")
  for name in ("other/sample.py", "diloco/none.py", "diloco/../x"):
    assert shipped.find(name) == name


def test_a_command_is_run_by_its_name_and_all_are_listed_without_jax(tmp_path):
  python = functools.partial(running.python, cwd=tmp_path)
  command = ("-m", "diloco", "scaling_laws", "recommend", "--params=700M")
  assert "learning_rate" in python(*command, "--json").stdout
  said = "error: there is no command trian (did you mean train?); give one of train,"
  assert refused(listing.main, "diloco", "trian").startswith(said)
  assert shown(listing.main, "diloco", "--version") == "diloco 0.1.0\n"
  for flag in ("-h", "--help"):
    ended = python("-m", "diloco", "train", flag)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("Trains a model; the same command continues a run.")
  ended = python("-X", "importtime", "-m", "diloco")
  assert not re.search(r"\| +jax$", ended.stderr, re.M)
  lines = ended.stdout.splitlines()
  told = {line.split()[0]: line.split()[1:] for line in lines if line[:2] == "  "}
  assert next(iter(told)) == "train"
  wanted = {"compare", "aot", "generate", "prepare_data", "launch_local", "reproduce"}
  assert wanted < set(told)
  assert all(told.values())
  assert max(map(len, lines)) <= 110
