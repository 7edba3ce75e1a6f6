"""Cached decoding against whole forward passes, and the sampler's distribution."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco import config as config_lib
from diloco.model import decoder as model_lib
from diloco.model import sampling as generate_lib

DIMS = model_lib.ModelDims(3, 16, 2, 32, 50, 12, dtype="float32")


def make_params(dims=DIMS):
  """Scales away from one and logits far apart, so that mistakes are seen."""
  params = model_lib.init_params(dims, jax.random.key(0))
  return jax.tree.map(
    lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype),
    params,
  )


@functools.cache
def compiled(dims=DIMS):
  """The whole forward pass and the cached one, compiled once per shape."""
  return (
    jax.jit(lambda p, ids: model_lib.hidden_states(dims, p, ids)),
    jax.jit(lambda p, ids, cache, i: model_lib.decode(dims, p, ids, cache, i)),
  )


def last_hidden(params, ids):
  """x_D of the last of at most seq_len input ids, by a whole forward pass."""
  padded = np.zeros((1, DIMS.seq_len), np.int32)
  padded[0, : len(ids)] = ids
  return compiled()[0](params, padded)[0, len(ids) - 1]


def logits_of(params, x):
  return np.asarray(jnp.einsum("...d,vd->...v", x, params["embed"]["tokens"]))


@pytest.mark.parametrize(
  ("chunks", "qk_norm"), [((12,), True), ((5, 1, 1, 3, 2), True), ((5, 7), False)]
)
def test_cached_decoding_gives_the_logits_of_the_whole_forward(chunks, qk_norm):
  dims = dataclasses.replace(DIMS, qk_norm=qk_norm)
  params = make_params(dims)
  ids = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 12)), jnp.int32)
  forward, decode = compiled(dims)
  whole = logits_of(params, forward(params, ids))
  cache, start, parts = model_lib.init_cache(dims, 2), 0, []
  # What a cache holds beyond `start` must not be seen.
  cache = jax.tree.map(lambda x: x + 7.0, cache)
  for size in chunks:
    x, cache = decode(params, ids[:, start : start + size], cache, start)
    parts.append(logits_of(params, x))
    start += size
  np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-5, atol=1e-5)
  assert np.ptp(whole) > 3


def test_cached_decoding_in_bfloat16():
  dims = dataclasses.replace(DIMS, dtype="bfloat16")
  params = make_params(dims)
  ids = jnp.asarray(np.random.default_rng(0).integers(0, 50, (1, 12)), jnp.int32)
  forward, decode = compiled(dims)
  whole = forward(params, ids).astype(jnp.float32)
  cache, parts = model_lib.init_cache(dims, 1), []
  assert cache["k"].dtype == jnp.bfloat16
  for i in range(12):
    x, cache = decode(params, ids[:, i : i + 1], cache, i)
    parts.append(x.astype(jnp.float32))
  np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=0.05, atol=0.05)


@functools.cache
def make_generate():
  c = config_lib.default_config()
  c.train.steps = 1
  c.model.update({"num_layers": 3, "dim": 16, "num_heads": 2, "ff_dim": 32})
  c.model.update({"vocab_size": 50, "seq_len": 12, "dtype": "float32"})
  return generate_lib.make_generate(config_lib.resolve(c))


def greedy(params, prompt, length):
  """By whole forward passes, with the documented windows."""
  ids, context = list(prompt), list(prompt)
  while len(ids) < len(prompt) + length:
    if len(context) >= DIMS.seq_len:
      context = context[-(DIMS.seq_len // 2) :]
    x = last_hidden(params, [model_lib.BOS_ID, *context])
    token = int(logits_of(params, x).argmax())
    ids, context = [*ids, token], [*context, token]
    if token == model_lib.EOS_ID:
      break
  return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", [[], [9, 8, 7, 6, 5, 4, 9], list(range(4, 20))])
def test_greedy_text_is_that_of_whole_forward_passes(prompt):
  params = make_params()
  # Far longer than the cache, which is filled anew twice.
  made = make_generate()(params, prompt, 25, temperature=0.0)
  assert made == greedy(params, prompt, 25)
  assert len(made) == 25 or made[-1] == model_lib.EOS_ID


def test_the_seed_decides_and_the_end_of_a_document_ends_the_text():
  params, generate = make_params(), make_generate()
  draw = lambda **kwargs: generate(params, [5, 6], 8, **kwargs)
  assert draw(seed=1) == draw(seed=1)
  assert len({tuple(draw(seed=s)) for s in range(6)}) > 3
  assert draw(seed=3, top_k=1) == draw(temperature=0.0)
  # A head in which EOS always wins.
  x = last_hidden(params, [model_lib.BOS_ID, 5, 6])
  table = params["embed"]["tokens"].at[model_lib.EOS_ID].set(100 * x)
  params["embed"]["tokens"] = table
  assert generate(params, [5, 6], 8) == [model_lib.EOS_ID]


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 3)])
def test_draws_follow_the_tempered_and_truncated_distribution(temperature, top_k):
  logits = np.random.default_rng(1).normal(size=8).astype(np.float32)
  keys = jax.random.split(jax.random.key(0), 20_000)
  draws = jax.vmap(lambda k: generate_lib.sample(logits, k, temperature, top_k))(keys)
  weights = np.exp(logits.astype(np.float64) / temperature)
  if top_k:
    weights[logits < np.sort(logits)[-top_k]] = 0
  expected = weights / weights.sum()
  found = np.bincount(np.asarray(draws), minlength=8) / len(keys)
  # Five standard errors.
  bound = 5 * np.sqrt(expected * (1 - expected) / len(keys))
  assert np.all(np.abs(found - expected) <= bound)
