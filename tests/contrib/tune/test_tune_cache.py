"""What tune remembers, and when."""

import json
import os
import types

import pytest

from diloco.config import changed, resolve
from diloco.contrib.tune import cache
from diloco.contrib.tune.cache import Found

FOUND = Found({"model.remat": "dots", "model.unroll": 0}, 1.25, "yesterday")
CPU = types.SimpleNamespace(device_kind="cpu")
GPU = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")


@pytest.fixture
def c(tiny):
  return resolve(tiny)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  return tmp_path


def test_the_same_step_on_the_same_devices_is_remembered(c, folder):
  of = cache.conditions("a step", [CPU])
  assert cache.read(c, of) is None
  cache.write(of, FOUND)
  assert cache.read(c, cache.conditions("a step", [CPU])) == FOUND
  [path] = folder.rglob("*.json")
  assert path.parent == folder / "diloco" / "tune"
  assert json.loads(path.read_text())["of"]["devices"] == "1 x cpu"


@pytest.mark.parametrize(
  ("step", "devices"), [("other", [CPU]), ("a step", [GPU]), ("a step", [CPU, CPU])]
)
def test_another_step_or_other_devices_are_not(c, step, devices):
  cache.write(cache.conditions("a step", [CPU]), FOUND)
  assert cache.read(c, cache.conditions(step, devices)) is None


def test_another_number_of_cores_or_other_flags_of_xla_are_not(c, monkeypatch):
  cache.write(cache.conditions("a step", [CPU]), FOUND)
  with monkeypatch.context() as m:
    m.setenv("XLA_FLAGS", "--xla_backend_optimization_level=1")
    assert cache.read(c, cache.conditions("a step", [CPU])) is None
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(99)})
  assert cache.read(c, cache.conditions("a step", [CPU])) is None


def test_every_field_that_shapes_the_step_counts_and_no_other(c):
  step = lambda **fields: cache.step(changed(c, {"model.num_layers": 1} | fields), [])
  first = step()
  for fields in (
    {"train.batch_size": 8},
    {"inner.clip_norm": 0.0},
    {"outer.optimizer": "adam(b1=0.9)"},  # Its state takes more memory.
  ):
    assert step(**fields) != first, fields
  rest = {"inner.learning_rate": 0.5, "data.shuffle_window": 7, "log.every": 3}
  assert step(**rest, **{"train.steps": 99, "sync_every": 6, "seed": 5}) == first


@pytest.mark.parametrize(
  "text",
  [
    "",
    "[1]",
    '{"fields": {"model.remat": "dots"',
    '{"fields": {"model.remat": "dots"}}',
    '{"fields": {"model.remat": "some"}, "ratio": 2, "when": "now"}',
    '{"fields": {"model.no_such": 1}, "ratio": 2, "when": "now"}',
    '{"fields": ["remat"], "ratio": 2, "when": "now"}',
  ],
)
def test_a_damaged_file_is_a_warning_and_is_written_anew(c, text, capsys):
  of = cache.conditions("a step", [CPU])
  cache.write(of, FOUND)
  cache.path(of).write_text(text)
  assert cache.read(c, of) is None
  [line] = capsys.readouterr().err.splitlines()
  assert line.startswith(f"warning: {cache.path(of)} cannot be read, or is damaged;")
  cache.write(of, FOUND)
  assert cache.read(c, of) == FOUND


def test_a_folder_that_cannot_be_written_is_one_warning(c, folder, monkeypatch, capsys):
  (folder / "file").touch()
  monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
  of = cache.conditions("a step", [CPU])
  assert cache.read(c, of) is None
  cache.write(of, FOUND)
  [line] = capsys.readouterr().err.splitlines()
  assert line.startswith("warning: this is not remembered, because")
  assert line.endswith("set XDG_CACHE_HOME to another folder.")


def test_without_the_variable_the_folder_is_that_of_the_user(folder, monkeypatch):
  monkeypatch.setenv("HOME", str(folder))
  for variable in ("", "not/absolute"):
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert cache.path({}).parent == folder / ".cache" / "diloco" / "tune"
