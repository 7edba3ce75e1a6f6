"""The search for the fastest settings, with times that the test makes up."""

import math
import re
import types

import pytest
import running

from diloco.config import Config, ConfigError, changed, resolve
from diloco.contrib.tune import tune


def made_up(c: Config) -> float:
  """The seconds of a step: dots without a loop is fastest, and microbatches of 2."""
  slow = {"none": 1.2, "dots": 1.0, "full": 1.5}[c.model.remat]
  return slow + 0.3 * c.model.unroll + abs(c.train.accumulate - 2)


def timer(now: Config, trial: Config) -> tuple[float, float]:
  return made_up(now), math.inf if trial.model.remat == "none" else made_up(trial)


def some_devices(n: int = 1, kind: str = "cpu") -> list[types.SimpleNamespace]:
  return [types.SimpleNamespace(device_kind=kind)] * n


def fields_of(c: Config, field: str, **devices) -> list[dict]:
  """What is tried of a field."""
  groups = tune.candidates(c, some_devices(**devices))
  return [fields for group in groups for fields in group if field in fields]


def search(c: Config, timer: tune.Timer) -> tune.Fields:
  return tune.search(c, timer, list(tune.candidates(c, some_devices())))


@pytest.fixture
def c(tiny) -> Config:
  tiny.train.batch_size = 16
  return resolve(tiny)


def test_the_search_finds_the_fastest_settings_that_fit(c, capsys):
  best = search(c, timer)
  assert best == {"model.remat": "dots", "model.unroll": 0, "train.accumulate": 2}
  lines = capsys.readouterr().out.splitlines()
  assert any("remat=none" in line and "out of memory" in line for line in lines)
  # Fields that keep the value of the config are no flags.
  del best["model.unroll"]
  assert search(changed(c, {"model.unroll": 0}), timer) == best


def test_noise_changes_nothing(c):
  assert search(c, lambda now, trial: (1.0, 0.99)) == {}


def test_a_config_that_does_not_fit_gets_the_fastest_settings_that_do(c):
  def timer(*pair: Config) -> tuple[float, ...]:
    return tuple(math.inf if x.model.remat == "none" else made_up(x) for x in pair)

  groups = list(tune.candidates(c, some_devices()))
  fields, ratio = tune.measure(c, timer, groups, None)
  assert (fields["model.remat"], ratio) == ("dots", math.inf)
  with pytest.raises(ConfigError, match="nothing fits"):
    tune.measure(c, lambda *pair: (math.inf, math.inf), groups, None)


def test_what_is_not_faster_in_the_end_is_not_advised(c):
  groups, times = list(tune.candidates(c, some_devices())), iter([(1.0, 0.5)])
  found = tune.measure(c, lambda *pair: next(times, (1.0, 1.0)), groups, None)
  assert found == ({}, 1.0)


def test_only_settings_that_work_and_change_no_result_are_tried(c):
  tried = {x for group in tune.candidates(c, some_devices()) for y in group for x in y}
  same = {"model.remat", "model.unroll", "model.loss_chunk", "train.accumulate"}
  assert tried == same | {"model.attention"}
  trials = []
  search(c, lambda now, trial: trials.append(trial) or (1.0, 1.0))
  assert {t.train.accumulate for t in trials} <= {1, 2, 4, 8}  # M = 2, 16 sequences.
  assert all(changed(t, {}) == t for t in trials)
  assert len(trials) == len({*trials})


def test_the_kernels_that_auto_does_not_choose_are_tried(c):
  long = changed(c, {"model.seq_len": 128})
  others = fields_of(long, "model.attention", kind="TPU v4")
  assert [x["model.attention"] for x in others] == ["cudnn", "xla"]
  # Those that the devices do not have are not timed.
  cudnn = changed(c, {"model.attention": "cudnn"})
  with pytest.raises(ConfigError, match=r"model\.attention is cudnn"):
    tune.Steps(c)(cudnn, c)


def test_other_meshes_are_tried_where_no_code_depends_on_the_mesh(c):
  both = [{"mesh.replica": k, "mesh.fsdp": 8 // k} for k in (1, 2)]
  plain = changed(c, {"wire.format": "fp32"})
  data_parallel = changed(c, {"algorithm": "data_parallel"})
  for same in (plain, data_parallel):
    assert fields_of(same, "mesh.fsdp", n=8) == both[:1]
    assert fields_of(changed(same, both[0]), "mesh.fsdp", n=8) == both[1:]
    assert fields_of(same, "mesh.fsdp", n=1) == []
  assert c.wire.format == "e3m0"
  assert fields_of(c, "mesh.fsdp", n=8) == []


@pytest.mark.slow("compiles steps of a dozen settings")
def test_the_command_prints_flags_that_a_run_takes():
  config = ["--config=tests/tiny_config.py", "--config.wire.format=fp32"]
  config.append("--config.mesh.cpu_devices=2")
  ended = running.python("-m", "diloco", "tune", *config, "--seconds=0", "--flags")
  last = ended.stderr.splitlines()[-1]
  assert re.match(r"[\d.]+ times as fast as the config: ", last)
  assert re.search(r"mesh.replica=1 mesh.fsdp=2 +\d", ended.stderr)
  flags = re.findall(r"--config\.\S+", last)
  assert ended.stdout == " ".join(flags) + "\n"  # And nothing else.
  train = running.python("-m", "diloco", "train", *config, *flags, "--print_config")
  assert train.returncode == 0
