"""The recipe for a new compressor or model: register it, then name it in the config."""

import json
import os
import pathlib
import subprocess
import sys

import plugins  # Registers `signs`, `feedback` and `bigram`.
import pytest

from diloco import train
from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.simulate import from_config
from diloco.spec import shapes, sizes


def test_a_registered_compressor_works_in_trainer_ledger_and_simulator(tiny, tmp_path):
  tiny.wire.compressor = "signs"
  c = resolve(tiny)
  summary = train.train(tiny, tmp_path)
  whole = shapes.parameters(c.model)
  # A bit for every value, rounded up to bytes, and four bytes for every layer's tensor.
  payloads = []
  for fragment in c.make_fragments():
    rows = [sizes.layout(*leaf) for leaf in shapes.leaves(fragment.shapes(whole))]
    payloads.append(sum(4 * n + -(-n * s // 8) for n, s, _ in rows))
  sends = metrics.read(tmp_path, "send")
  assert sends
  for send in sends:  # M = 2: to one other replica.
    assert send["bytes"] == payloads[send["fragment"]]
    assert 0.1 < send["quantization_error"][0] < 1
  assert summary["bytes_sent_per_replica"] == sum(send["bytes"] for send in sends)
  bits = from_config.workload(c, seconds=1.0).bits
  assert bits == pytest.approx(8 * sum(payloads) / shapes.num_params(c.model))
  assert summary["eval_loss"]["outer"] < 7.7  # log(2048) is 7.62.


@pytest.mark.integration("whole runs")
@pytest.mark.parametrize("transport", ["device", "host"])
def test_the_state_of_a_compressor_is_saved_and_resumed_exactly(
  tiny, tmp_path, transport
):
  tiny.wire.compressor, tiny.wire.format = "feedback", "e3m0"
  tiny.overlap.tau, tiny.overlap.transport, tiny.checkpoint.keep = 2, transport, 9
  # A fragment is in flight at steps 5 and 10, where checkpoints are written.
  schedule = resolve(tiny).make_schedule()
  assert schedule.in_flight(5)
  assert schedule.in_flight(10)
  train.train(tiny, tmp_path / "whole")
  train.train(tiny, tmp_path / "resumed")
  checkpoints = tmp_path / "resumed" / "checkpoints"
  for path in list(checkpoints.iterdir()):
    if path.name != "5":
      path.rename(tmp_path / f"removed_{path.name}")
  (tmp_path / "resumed" / "summary.json").unlink()
  train.train(tiny, tmp_path / "resumed")
  clock = ("time", "tokens_per_s", "waited_s")
  for kind in ("step", "send", "receive", "eval"):
    whole, resumed = (
      [{k: v for k, v in r.items() if k not in clock} for r in metrics.read(d, kind)]
      for d in (tmp_path / "whole", tmp_path / "resumed")
    )
    assert json.dumps(whole) == json.dumps(resumed)
  plain = tiny.copy_and_resolve_references()
  plain.wire.compressor = "quantize"
  train.train(plain, tmp_path / "plain")
  losses = lambda d: [r["loss"] for r in metrics.read(tmp_path / d)]
  assert losses("plain")[-1] != losses("whole")[-1]


@pytest.mark.integration("whole runs")
def test_a_registered_model_trains_like_the_decoder(tiny, tmp_path):
  tiny.model.name, tiny.log.sample_tokens = "bigram", 3
  tiny.train.batch_size, tiny.train.steps = 32, 60
  tiny.inner.learning_rate, tiny.inner.warmup_steps = 0.05, 5
  summary = train.train(tiny, tmp_path)
  params = 2048 * 16 + 3 * 16 * 16
  assert summary["params"] == params
  assert shapes.flops_per_token(resolve(tiny).model) == 6 * params  # No attention.
  losses = [r["loss"] for r in metrics.read(tmp_path)]
  assert sum(losses[-5:]) / 5 < losses[0] - 0.3
  assert summary["syncs"] == len(metrics.read(tmp_path, "send")) > 0


@pytest.mark.integration("whole runs")
def test_other_commands_import_the_plugins_of_a_run(tiny, tmp_path):
  tiny.model.name, tiny.wire.compressor, tiny.plugins = "bigram", "signs", ("plugins",)
  train.train(tiny, tmp_path / "run")
  command = [sys.executable, "-m", "diloco.cli.export", f"--output={tmp_path / 'out'}"]
  env = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent)}
  subprocess.run([*command, f"--workdir={tmp_path / 'run'}"], check=True, env=env)
  exported = json.loads((tmp_path / "out/config.json").read_text())
  assert exported["architecture"] == plugins.Bigram.DESCRIPTION


def test_a_plugin_that_cannot_be_imported_is_named(tiny):
  tiny.plugins = ("nowhere_to_be_found",)
  with pytest.raises(ConfigError, match=r"plugins names 'nowhere.*PYTHONPATH"):
    resolve(tiny)
