"""Every way in which a config can be wrong, in the user's words."""

import pathlib
import subprocess
import sys

import pytest

from diloco import config as config_lib
from diloco.config import ConfigError, default_config, resolve

ROOT = pathlib.Path(__file__).parents[2]


def make(**fields):
  c = default_config()
  c.train.steps = 100
  c.update_from_flattened_dict(fields)
  return c


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"algorithm": "sgd"}, "algorithm is 'sgd'; choose one of data_parallel, diloco"),
    ({"sync_every": 4, "overlap.tau": 4}, "overlap.tau is 4, but sync_every is 4; tau"),
    ({"train.batch_size": 33}, "train.batch_size is 33, which replicas"),
    ({"train.accumulate": 3}, "choose a multiple of 6"),
    ({"fragments.size": 7}, "fragments.size is 7, but the model has 6 layers"),
    ({"fragments.pattern": "odd"}, "fragments.pattern is 'odd'; choose one of strided"),
    ({"overlap.alpha": 1.5}, "overlap.alpha is 1.5; choose a value from 0 to 1"),
    ({"overlap.taus": (1, 2, 3)}, "overlap.taus is .1, 2, 3., one tau for each of 3"),
    ({"overlap.taus": ("1,a",)}, "overlap.taus is .*; give whole numbers"),
    ({"wire.density": 0.0}, "wire.density is 0.0; choose a share above 0"),
    ({"wire.rounding": "up"}, "wire.rounding is 'up'; choose one of nearest"),
    ({"model.num_heads": 7}, "model.num_heads is 7, which does not divide model.dim"),
    ({"model.loss_chunk": 300}, "model.loss_chunk is 300, which does not divide"),
    ({"model.dtype": "int8"}, "model.dtype is 'int8'; choose one of float32"),
    ({"replicas": 0}, "replicas is 0; it must be at least 1"),
    ({"train.steps": 0}, "train.steps is 0 and train.tokens is 0; set train.steps"),
    ({"train.steps": -5}, "train.steps is -5; it must be at least 1"),
    (
      {"train.steps": 0, "train.tokens": 10},
      "train.steps is 0 and train.tokens is 10; .* one batch of 524288 tokens",
    ),
    ({"train.steps": 0, "model.seq_len": 0}, "model.seq_len is 0; it must be at least"),
    ({"inner.learning_rate": float("nan")}, "inner.learning_rate is nan; choose a fin"),
    ({"inner.learning_rate": float("inf")}, "inner.learning_rate is inf; choose a fin"),
    ({"inner.b1": 1.0}, "inner.b1 is 1.0; choose a value from 0 to below 1"),
    ({"inner.b2": -0.5}, "inner.b2 is -0.5; choose a value from 0 to below 1"),
    ({"inner.eps": 0.0}, "inner.eps is 0.0; choose a value above 0"),
    ({"outer.momentum": -0.1}, "outer.momentum is -0.1; choose a value from 0"),
    (
      {"outer.momentum": 1.5},
      "outer.momentum is 1.5; choose a value from 0 to bel",
    ),
    ({"outer.optimizer": "clip"}, "outer.optimizer is 'clip'; choose one of nesterov"),
    ({"outer.optimizer": "lbfgs"}, "outer.optimizer is 'lbfgs'; choose one of nest"),
    ({"model.ff_dim": -3}, "model.ff_dim is -3; it must be at least 1"),
    ({"overlap.taus": (1.5, 2)}, r"overlap.taus is \(1.5, 2\), .* give whole numbers"),
  ],
)
def test_errors_name_field_value_and_remedy(fields, message):
  with pytest.raises(ConfigError, match=message):
    resolve(make(**fields))


def test_unknown_and_missing_fields():
  c = make()
  with c.unlocked():
    c.model.width = 3
  with pytest.raises(
    ConfigError, match=r"model.width is set to 3, but there is no such"
  ):
    resolve(c)
  c = make()
  del c.outer.momentum
  with pytest.raises(ConfigError, match=r"outer.momentum is missing; .* it is 0.9"):
    resolve(c)


def test_resolving_fills_in_and_is_idempotent():
  c = make(**{"train.steps": 0, "train.tokens": 10_000_000})
  r = resolve(c)
  assert r.train.steps == 10_000_000 // (256 * 2048)
  assert r.train.tokens == r.train.steps * 256 * 2048
  assert r.inner.weight_decay == 1 / r.train.steps
  assert (r.wire.format, tuple(r.overlap.taus), r.model.ff_dim) == (
    "e3m0",
    (1, 1),
    2048,
  )
  assert config_lib.difference(r.to_dict(), resolve(r).to_dict()) == []


def test_diloco_is_one_fragment_without_overlap():
  r = resolve(make(algorithm="diloco", **{"overlap.tau": 5, "overlap.alpha": 0.5}))
  assert len(config_lib.make_fragments(r)) == 1
  assert tuple(r.overlap.taus) == (0, 0)
  assert (r.overlap.alpha, r.wire.format) == (0.0, "fp32")


def test_difference_shows_the_changed_leaves():
  a, b = make().to_dict(), make(**{"outer.momentum": 0.5, "replicas": 4}).to_dict()
  assert config_lib.difference(a, b) == [
    "outer.momentum: 0.9 -> 0.5",
    "replicas: 2 -> 4",
  ]


def run_main(*args):
  return subprocess.run(
    [sys.executable, "-m", "diloco.main", *args],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )


def test_the_command_says_one_sentence_and_fails(tmp_path):
  result = run_main(
    "--config=configs/sample.py", f"--workdir={tmp_path}", "--config.overlap.tau=99"
  )
  assert result.returncode == 2
  assert (
    result.stderr.strip().splitlines()[-1].startswith("error: overlap.tau is 99, but")
  )
  assert "Traceback" not in result.stderr
  unknown = run_main(
    "--config=configs/sample.py", f"--workdir={tmp_path}", "--config.overlap.tua=1"
  )
  assert unknown.returncode == 2
  assert "tua" in unknown.stderr.strip().splitlines()[-1]
  assert "Traceback" not in unknown.stderr
  for flag in ("--config.wire.format=e9m9", "--config.wire.compressor=zip"):
    wrong = run_main("--config=configs/sample.py", f"--workdir={tmp_path}", flag)
    assert wrong.returncode == 2
    assert wrong.stderr.strip().splitlines()[-1].startswith("error: wire.")
  assert not list(tmp_path.iterdir())
  scale = run_main("--config=configs/chinchilla.py:7X", f"--workdir={tmp_path}")
  assert scale.returncode == 2
  assert "the size is '7X'; write one of 35M" in scale.stderr
  assert "Traceback" not in scale.stderr
