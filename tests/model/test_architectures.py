"""Each architecture against plain NumPy: losses, masks, cache; shapes and FLOPs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_decoder
import numpy_qwen3
import pytest

from diloco.model import registry
from diloco.spec import shapes
from diloco.spec.shapes import BOS_ID, EOS_ID

DECODER, QWEN3 = numpy_decoder.MODEL, numpy_qwen3.MODEL
UNTIED = numpy_qwen3.with_own(QWEN3, tie_embeddings=False)


@functools.cache
def make_params(m):
  init = jax.jit(registry.get(m).init, static_argnums=0)
  return numpy_decoder.moved(init(m, jax.random.key(0)))


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(m, params, ids_BxL):
  return registry.get(m).Decoder(m).apply({"params": params}, jnp.asarray(ids_BxL))[0]


def by_numpy(m, params, ids):
  """Hidden states [L, D] of one sequence."""
  qwen3 = m.name == "qwen3"
  states = numpy_qwen3.numpy_qwen3 if qwen3 else numpy_decoder.numpy_decoder
  return states(m, params, ids)


def draw(seed, *shape):
  return np.random.default_rng(seed).integers(4, 50, shape)


# 8 divides no length of 12: 4.
@pytest.mark.parametrize(
  ("m", "chunk"), [(DECODER, 0), (DECODER, 8), (QWEN3, 0), (UNTIED, 0)]
)
def test_losses_agree_with_numpy(m, chunk):
  tokens, params = draw(0, 2, 12), make_params(m)
  m = dataclasses.replace(m, loss_chunk=chunk)
  compiled = lambda f: jax.jit(f, static_argnums=0)(m, params, jnp.asarray(tokens))
  nll, z2 = compiled(registry.get(m).losses)
  objective, mean = compiled(registry.get(m).objective)
  expected = np.zeros((2, 12)), np.zeros((2, 12))
  for b, row in enumerate(tokens):
    x = by_numpy(m, params, [BOS_ID, *row[:-1]])
    logits = x @ numpy_qwen3.numpy_head(params).T
    log_z = np.log(np.exp(logits).sum(-1))
    expected[0][b], expected[1][b] = log_z - logits[np.arange(12), row], log_z**2
  np.testing.assert_allclose(nll, expected[0], rtol=2e-4, atol=2e-4)
  np.testing.assert_allclose(z2, expected[1], rtol=1e-3, atol=1e-3)
  assert float(mean) == pytest.approx(expected[0].mean(), rel=1e-4)
  whole = expected[0].mean() + m.z_loss * expected[1].mean()
  assert float(objective) == pytest.approx(whole, rel=1e-4)


# Documents, EOS included, that fill a sequence of 12; the last is cut.
@pytest.mark.parametrize(
  ("m", "lengths"), [(DECODER, (1, 1, 9, 1)), (DECODER, (12,)), (QWEN3, (5, 3, 4))]
)
def test_masked_documents_do_not_see_each_other(m, lengths):
  params, masked = make_params(m), dataclasses.replace(m, segment_masks=True)
  documents = [[*draw(n, n - 1), EOS_ID] for n in lengths]
  documents[-1][-1] = 17
  packed = [BOS_ID, *np.concatenate(documents)[:-1]]
  found, start = hidden_states(masked, params, [packed])[0], 0
  for document in documents:
    alone = by_numpy(m, params, [BOS_ID, *document[:-1]])
    end = start + len(document)
    np.testing.assert_allclose(found[start:end], alone, rtol=2e-4, atol=2e-4)
    start = end


def cached_logits(m, params, ids, chunks) -> np.ndarray:
  """Logits after every id, float32 [B, L, V], from a cache that grows by chunks."""
  step = jax.jit(functools.partial(registry.get(m).logits, m))
  cache, start, found = registry.get(m).init_cache(m, len(ids)), 0, []
  # Entries of the cache beyond `start` must not be read.
  cache = jax.tree.map(lambda x: x + 7.0, cache)
  for size in chunks:
    part = ids[:, start : start + size]
    steps = [step(params, part, cache, start, at) for at in range(size)]
    found += [logits for logits, _ in steps]
    cache, start = steps[-1][1], start + size
  return np.stack(found, axis=1)


@pytest.mark.parametrize(
  "m", [DECODER, dataclasses.replace(DECODER, qk_norm=False), UNTIED]
)
def test_cached_decoding_gives_the_logits_of_the_whole_forward(m):
  params, ids = make_params(m), jnp.asarray(draw(2, 2, 12), jnp.int32)
  embed = params["embed"]
  whole = hidden_states(m, params, ids) @ embed.get("head", embed["tokens"]).T
  found = cached_logits(m, params, ids, (5, 1, 1, 3, 2))
  np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)
  assert np.ptp(whole) > 3


def test_cached_decoding_in_bfloat16():
  m = dataclasses.replace(DECODER, dtype="bfloat16")
  params, ids = make_params(m), jnp.asarray(draw(0, 1, 12), jnp.int32)
  assert registry.get(m).init_cache(m, 1)["k"].dtype == jnp.bfloat16
  whole = cached_logits(m, params, ids, (12,))
  found = cached_logits(m, params, ids, (1,) * 12)
  np.testing.assert_allclose(found, whole, rtol=0.05, atol=0.1)


@pytest.mark.parametrize(
  "m", [DECODER, dataclasses.replace(DECODER, qk_norm=False), QWEN3, UNTIED]
)
def test_shapes_equal_those_of_initialised_parameters(m):
  params = jax.eval_shape(lambda key: registry.get(m).init(m, key), jax.random.key(0))
  assert jax.tree.map(lambda x: x.shape, dict(params)) == shapes.parameters(m)
  assert shapes.num_params(m) == sum(x.size for x in jax.tree.leaves(params))
  paths = jax.tree_util.tree_leaves_with_path(params)
  assert [tuple(k.key for k in path) for path, _ in paths] == [
    path for path, _ in shapes.leaves(shapes.parameters(m))
  ]


@pytest.mark.parametrize("m", [DECODER, numpy_qwen3.with_own(UNTIED, head_dim=32)])
def test_flops_equal_the_count_of_xla(m):
  m = dataclasses.replace(m, num_layers=1, dim=64, ff_dim=256, seq_len=64)
  params, tokens = make_params(m), jnp.zeros((4, 64), jnp.int32)
  loss = lambda p, tokens: registry.get(m).objective(m, p, tokens)[0]
  program = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
  # The scan of one layer is counted once. XLA counts norms, softmax and GELU, too.
  counted = program.cost_analysis()["flops"] / tokens.size
  assert shapes.flops_per_token(m) == pytest.approx(counted, rel=0.15)
