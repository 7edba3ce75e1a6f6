"""Texts against full forward passes, and the sampler's distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_decoder import MODEL, moved

from diloco.model import decoder, sampling
from diloco.spec import shapes


def make_params():
  return moved(jax.jit(decoder.init, static_argnums=0)(MODEL, jax.random.key(0)))


@functools.partial(jax.jit, static_argnames="m")
def hidden_states(params, ids, *, m=MODEL):
  return decoder.Decoder(m).apply({"params": params}, ids)[0]


def last_hidden(params, ids):
  """The hidden state x_D of the last input id, from a full forward pass."""
  padded = np.zeros((1, MODEL.seq_len), np.int32)
  padded[0, : len(ids)] = ids
  return hidden_states(params, padded)[0, len(ids) - 1]


def logits_of(params, x):
  return np.asarray(jnp.einsum("...d,vd->...v", x, params["embed"]["tokens"]))


def greedy(params, prompt, length):
  """Generates text by full forward passes, with the documented windows."""
  ids, context = list(prompt), list(prompt)
  while len(ids) < len(prompt) + length:
    if len(context) >= MODEL.seq_len:
      context = context[-(MODEL.seq_len // 2) :]
    x = last_hidden(params, [shapes.BOS_ID, *context])
    token = int(logits_of(params, x).argmax())
    ids, context = [*ids, token], [*context, token]
    if token == shapes.EOS_ID:
      break
  return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", [[], list(range(4, 20))])
def test_greedy_text_equals_that_of_full_forward_passes(prompt):
  params = make_params()
  # Much longer than the cache, which is filled again twice.
  made = sampling.generate(MODEL, params, prompt, 25, temperature=0.0)
  assert made == greedy(params, prompt, 25)
  assert len(made) == 25 or made[-1] == shapes.EOS_ID


def test_the_seed_fixes_the_text_and_eos_ends_it():
  params = make_params()
  draw = lambda **kwargs: sampling.generate(MODEL, params, [5, 6], 8, **kwargs)
  assert draw(seed=1) == draw(seed=1)
  assert len({tuple(draw(seed=s)) for s in range(6)}) > 3
  assert draw(seed=3, top_k=1) == draw(temperature=0.0)
  # A head in which EOS always wins.
  x = last_hidden(params, [shapes.BOS_ID, 5, 6])
  table = params["embed"]["tokens"].at[shapes.EOS_ID].set(100 * x)
  params["embed"]["tokens"] = table
  assert sampling.generate(MODEL, params, [5, 6], 8) == [shapes.EOS_ID]


def test_numbers_are_drawn_once_also_in_a_text_longer_than_the_context():
  params = make_params()
  params["embed"]["tokens"] *= 0.0  # All tokens are equally likely.
  made = sampling.generate(MODEL, params, [], 3 * MODEL.seq_len, seed=1)
  assert len(made) > 2 * MODEL.seq_len  # It did not end.
  runs = [tuple(made[i : i + 3]) for i in range(len(made) - 2)]
  assert len(set(runs)) == len(runs)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 3)])
def test_draws_follow_the_tempered_and_truncated_distribution(temperature, top_k):
  logits = np.random.default_rng(1).normal(size=8).astype(np.float32)
  keys = jax.random.split(jax.random.key(0), 20_000)
  draws = jax.vmap(lambda k: sampling.sample(logits, k, temperature, top_k))(keys)
  weights = np.exp(logits.astype(np.float64) / temperature)
  if top_k:
    weights[logits < np.sort(logits)[-top_k]] = 0
  expected = weights / weights.sum()
  found = np.bincount(np.asarray(draws), minlength=8) / len(keys)
  # Five standard errors.
  bound = 5 * np.sqrt(expected * (1 - expected) / len(keys))
  assert np.all(np.abs(found - expected) <= bound)
