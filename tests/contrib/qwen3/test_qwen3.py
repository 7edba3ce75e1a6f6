"""The architecture qwen3 against plain NumPy, its cache, masks, kernels and counts."""

import dataclasses
import functools
import json

import conftest
import cpu_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_qwen3 import MODEL, numpy_head, numpy_qwen3, with_own

from diloco import train
from diloco.config import complete, resolve
from diloco.contrib.qwen3 import Qwen3
from diloco.contrib.qwen3 import model as qwen3
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.simulate import from_config
from diloco.spec import shapes
from diloco.spec.shapes import BOS_ID, EOS_ID

UNTIED = with_own(MODEL, tie_embeddings=False)


@functools.cache
def make_params(m):
  """Scales away from one, so that a norm that ignores its scale is noticed."""
  params = jax.jit(qwen3.init, static_argnums=0)(m, jax.random.key(0))
  return jax.tree.map(
    lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params
  )


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(m, params, ids_BxL):
  return qwen3.Decoder(m).apply({"params": params}, jnp.asarray(ids_BxL))[0]


def draw(seed, *shape):
  return np.random.default_rng(seed).integers(4, 50, shape)


@pytest.mark.parametrize("m", [MODEL, UNTIED], ids=["tied", "untied"])
def test_losses_agree_with_numpy(m):
  tokens, params = draw(0, 2, 12), make_params(m)
  compiled = lambda f: jax.jit(f, static_argnums=0)(m, params, jnp.asarray(tokens))
  nll, z2 = compiled(qwen3.losses)
  objective, mean = compiled(qwen3.objective)
  expected = np.zeros((2, 12)), np.zeros((2, 12))
  for b, row in enumerate(tokens):
    x = numpy_qwen3(m, params, [BOS_ID, *row[:-1]])
    logits = x @ numpy_head(params).T
    log_z = np.log(np.exp(logits).sum(-1))
    expected[0][b], expected[1][b] = log_z - logits[np.arange(12), row], log_z**2
  np.testing.assert_allclose(nll, expected[0], rtol=2e-4, atol=2e-4)
  np.testing.assert_allclose(z2, expected[1], rtol=1e-3, atol=1e-3)
  assert float(mean) == pytest.approx(expected[0].mean(), rel=1e-4)
  whole = expected[0].mean() + m.z_loss * expected[1].mean()
  assert float(objective) == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("lengths", [(5, 3, 4), (1, 1, 9, 1), (12,)])
def test_masked_documents_do_not_see_each_other(lengths):
  m, params = dataclasses.replace(MODEL, segment_masks=True), make_params(MODEL)
  documents = [[*draw(n, n - 1), EOS_ID] for n in lengths]
  packed = [BOS_ID, *np.concatenate(documents)[:-1]]
  found, start = hidden_states(m, params, [packed])[0], 0
  for document in documents:
    alone = numpy_qwen3(m, params, [BOS_ID, *document[:-1]])
    end = start + len(document)
    np.testing.assert_allclose(found[start:end], alone, rtol=2e-4, atol=2e-4)
    start = end


@pytest.mark.parametrize("chunks", [(12,), (5, 1, 1, 3, 2)])
def test_cached_decoding_gives_the_logits_of_the_whole_forward(chunks):
  params, ids = make_params(UNTIED), jnp.asarray(draw(2, 2, 12), jnp.int32)
  whole = hidden_states(UNTIED, params, ids) @ params["embed"]["head"].T
  # Entries of the cache beyond `start` must not be read.
  cache = jax.tree.map(lambda x: x + 7.0, qwen3.init_cache(UNTIED, 2))
  assert cache["k"].shape == (3, 2, 12, 2, 6)
  step, start, found = jax.jit(functools.partial(qwen3.logits, UNTIED)), 0, []
  for size in chunks:
    part = ids[:, start : start + size]
    steps = [step(params, part, cache, start, at) for at in range(size)]
    found += [logits for logits, _ in steps]
    cache, start = steps[-1][1], start + size
  np.testing.assert_allclose(np.stack(found, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.integration("long compiles")
def test_splash_attention_takes_grouped_heads():
  m = dataclasses.replace(MODEL, seq_len=128, num_layers=1, dim=8)
  m = with_own(m, head_dim=128)
  params, ids = make_params(m), draw(3, 1, 128)
  plain, splash = (
    hidden_states(dataclasses.replace(m, attention=name), params, ids)
    for name in ("xla", "splash")
  )
  np.testing.assert_allclose(plain, splash, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_nothing_but_memory(remat):
  ids, params = draw(4, 2, 12), make_params(MODEL)
  loss = lambda p, m: (hidden_states(m, p, ids) ** 2).sum()
  f = lambda m: jax.jit(jax.grad(loss), static_argnums=1)(params, m)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
  jax.tree.map(close, f(MODEL), f(dataclasses.replace(MODEL, remat=remat)))


@pytest.mark.parametrize("m", [MODEL, UNTIED], ids=["tied", "untied"])
def test_shapes_equal_those_of_initialised_parameters(m):
  params = jax.eval_shape(lambda key: qwen3.init(m, key), jax.random.key(0))
  assert jax.tree.map(lambda x: x.shape, dict(params)) == shapes.parameters(m)
  block = 16 * 24 + 2 * 16 * 12 + 24 * 16 + 3 * 16 * 24  # q; k and v; out; ff.
  assert shapes.matrix_params(m) == 3 * block + 50 * 16
  norms = 3 * (2 * 16 + 2 * 6) + 16
  copies = 1 if m.of(Qwen3).tie_embeddings else 2
  assert shapes.num_params(m) == 3 * block + norms + copies * 50 * 16


def test_flops_equal_the_count_of_xla():
  m = dataclasses.replace(UNTIED, num_layers=1, dim=64, ff_dim=256, seq_len=64)
  m = with_own(m, head_dim=32)
  params, tokens = make_params(m), jnp.zeros((4, 64), jnp.int32)
  loss = lambda p, tokens: qwen3.objective(m, p, tokens)[0]
  program = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
  # The scan of one layer is counted once. XLA counts norms and softmax, too.
  counted = program.cost_analysis()["flops"] / tokens.size
  assert shapes.flops_per_token(m) == pytest.approx(counted, rel=0.15)


DECODER = {"model.name": "decoder"}


@pytest.mark.parametrize("algorithm", ["streaming", "data_parallel"])
@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"qwen3.kv_heads": 2} | DECODER, "kv_heads is 2, which only model.name=qwen3 has"),
    ({"qwen3.rope_theta": 1e4} | DECODER, "choose qwen3, or set .*_theta=1000000.0"),
    ({"qwen3.tie_embeddings": False} | DECODER, "tie_embeddings is False, which"),
    ({"model.qk_norm": False}, "qk_norm is False, but model.name=qwen3 always"),
    ({"qwen3.head_dim": 3}, "the head size is 3, but model.name=qwen3 rotates pairs"),
    ({"model.num_heads": 4, "qwen3.kv_heads": 3}, "kv_heads = 3 does not divide"),
    ({"model.num_heads": 3}, "model.num_heads = 3 does not divide"),
  ],
)
def test_fields_that_no_architecture_has_are_refused(tiny, algorithm, fields, message):
  tiny.algorithm = algorithm
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


def test_the_name_and_former_fields_say_which_plug_in_has_them(tiny):
  saved = resolve(tiny).to_dict()
  former = {"num_kv_heads": 0, "head_dim": 0, "rope_theta": 1e6, "norm_eps": 1e-6}
  saved["model"] |= former | {"tie_embeddings": True}
  assert complete(saved) == resolve(tiny)  # A run of the decoder.
  saved["model"]["num_kv_heads"] = 1
  now = r"it is qwen3.kv_heads=8; the plug-in qwen3 has it: set plugins=\('qwen3',\)"
  with pytest.raises(ConfigError, match=rf"model.num_kv_heads is 1, .*; now {now}"):
    complete(saved)
  tiny.model.name = "qwen3"
  with pytest.raises(ConfigError, match=r"choose one of decoder.*; the plug-in qwen3 "):
    resolve(tiny)


@pytest.mark.integration("long compiles")
def test_it_trains_by_streaming_diloco_and_has_a_workload(tiny, tmp_path):
  fields = {"model.name": "qwen3", "model.ff_dim": 32, "qwen3.kv_heads": 1}
  fields |= {"qwen3.head_dim": 16, "qwen3.tie_embeddings": False}
  conftest.update(tiny, fields)
  tiny.train.batch_size, tiny.train.steps = 16, 40
  tiny.inner.learning_rate = 0.02
  c = resolve(tiny)
  summary = train.train(tiny, tmp_path)
  assert summary["params"] == shapes.num_params(c.model)
  losses = [r["loss"] for r in metrics.read(tmp_path)]
  assert sum(losses[-5:]) / 5 < losses[0] - 0.3
  assert {r["fragment"] for r in metrics.read(tmp_path, "send")} == {0, 1, 2, 3}
  workload = from_config.workload(c, seconds=1.0)
  sent = sum(r["bytes"] for r in metrics.read(tmp_path, "send")[-4:])
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
