"""Fields, counts and training of qwen3; tests/model/ compares it with NumPy."""

import dataclasses
import json

import conftest
import cpu_devices
import jax
import numpy as np
import pytest
from numpy_qwen3 import MODEL, with_own

from diloco import train
from diloco.config import complete, resolve
from diloco.contrib.qwen3 import Qwen3
from diloco.contrib.qwen3 import model as qwen3
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.simulate import from_config
from diloco.spec import shapes


@pytest.mark.integration("long compiles")
def test_splash_attention_takes_grouped_heads():
  m = dataclasses.replace(MODEL, seq_len=128, num_layers=1, dim=8)
  m = with_own(m, head_dim=128)
  ids = np.random.default_rng(3).integers(4, 50, (1, 128))
  params = {"params": qwen3.init(m, jax.random.key(0))}
  plain, splash = (
    jax.jit(qwen3.Decoder(dataclasses.replace(m, attention=name)).apply)(params, ids)[0]
    for name in ("xla", "splash")
  )
  np.testing.assert_allclose(plain, splash, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted(tied):
  m = with_own(MODEL, tie_embeddings=tied)
  block = 16 * 24 + 2 * 16 * 12 + 24 * 16 + 3 * 16 * 24  # q; k and v; out; ff.
  assert shapes.matrix_params(m) == 3 * block + 50 * 16
  norms = 3 * (2 * 16 + 2 * 6) + 16
  assert shapes.num_params(m) == 3 * block + norms + (1 if tied else 2) * 50 * 16


DECODER = {"model.name": "decoder"}


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"qwen3.kv_heads": 2} | DECODER, "kv_heads is 2, which only model.name=qwen3 has"),
    ({"qwen3.rope_theta": 1e4} | DECODER, "choose qwen3, or set .*_theta=1000000.0"),
    ({"model.qk_norm": False}, "qk_norm is False, but model.name=qwen3 always"),
    ({"qwen3.head_dim": 3}, "the head size is 3, but model.name=qwen3 rotates pairs"),
    ({"model.num_heads": 4, "qwen3.kv_heads": 3}, "kv_heads = 3 does not divide"),
    ({"model.num_heads": 3}, "model.num_heads = 3 does not divide"),
  ],
)
def test_fields_that_no_architecture_has_are_refused(tiny, fields, message):
  conftest.update(tiny, {"qwen3.kv_heads": 0, "model.name": "qwen3"} | fields)
  with pytest.raises(ConfigError, match=message):
    resolve(tiny)


@pytest.mark.parametrize("algorithm", ["streaming", "data_parallel"])
def test_open_fields_take_those_of_the_queries_and_are_saved(tiny, algorithm):
  tiny.algorithm = algorithm
  conftest.update(tiny, {"qwen3.norm_eps": 1e-5, "model.name": "qwen3"})
  c = resolve(tiny)
  assert c.model.of(Qwen3) == c.of(Qwen3) == Qwen3(2, 8, norm_eps=1e-5)
  assert complete(json.loads(json.dumps(c.to_dict()))) == c
  tiny.model.name, tiny.qwen3.norm_eps = "decoder", 1e-6
  c = resolve(tiny)
  assert (c.model.extensions, c.extensions) == ((), (Qwen3(),))


def test_the_name_says_which_plug_in_has_it(tiny):
  tiny.model.name = "qwen3"
  with pytest.raises(ConfigError, match=r"choose one of decoder.*; the plug-in qwen3 "):
    resolve(tiny)


@pytest.mark.integration("long compiles")
def test_it_trains_by_streaming_diloco_and_has_a_workload(tiny, tmp_path):
  fields = {"model.name": "qwen3", "model.ff_dim": 32, "qwen3.kv_heads": 1}
  fields |= {"qwen3.head_dim": 16, "qwen3.tie_embeddings": False}
  conftest.update(tiny, fields)
  tiny.train.batch_size, tiny.train.steps = 16, 24
  tiny.inner.learning_rate, tiny.fragments.size = 0.03, 3
  c = resolve(tiny)
  summary = train.train(tiny, tmp_path)
  assert summary["params"] == shapes.num_params(c.model)
  losses = [r["loss"] for r in metrics.read(tmp_path)]
  assert sum(losses[-5:]) / 5 < losses[0] - 0.3
  assert {r["fragment"] for r in metrics.read(tmp_path, "send")} == {0, 1}
  workload = from_config.workload(c, seconds=1.0)
  sent = sum(r["bytes"] for r in metrics.read(tmp_path, "send")[-2:])
  assert workload.bits == pytest.approx(8 * sent / shapes.num_params(c.model))


@pytest.mark.slow("compiles a round for one device and for four")
def test_fsdp_changes_nothing_but_the_rounding():
  fields = {"model.name": "qwen3", "qwen3.kv_heads": 1, "qwen3.head_dim": 8}
  fields |= {"qwen3.tie_embeddings": False, "wire.format": "fp32"}
  code = (
    "import json, sys, multidevice; fields = json.loads(sys.argv[1]);"
    "print([multidevice.losses(n, **fields) for n in (1, 4)])"
  )
  one, four = cpu_devices.run(4, "-c", code, json.dumps(fields))
  np.testing.assert_allclose(one, four, rtol=1e-4)
  assert np.ptp(one) > 1e-3
