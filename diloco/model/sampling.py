"""Generates text token by token, with a key-value cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from diloco.model import registry
from diloco.model.registry import Params
from diloco.spec.fields import ModelConfig
from diloco.spec.shapes import BOS_ID, EOS_ID
from diloco.util.types import PyTree


def generate(
  m: ModelConfig,
  params: Params,
  prompt_ids: list[int],
  length: int,
  temperature: float = 0.8,
  seed: int = 0,
  top_k: int = 0,
) -> list[int]:
  """Continues a prompt.

  When the text fills all seq_len positions, its last seq_len // 2 tokens become the new
  context: the cache holds rotated keys or learned positions, so it cannot slide.

  Args:
    params: parameters of one replica.
    prompt_ids: ids of the prompt, without BOS; may be empty.
    length: the largest number of new tokens.
    temperature: 0 always takes the most likely token.
    seed: seed of the random draws.
    top_k: draws only from the `top_k` most likely tokens; 0: from all tokens.

  Returns:
    The new ids; EOS, if drawn, is the last one.
  """
  ids, new = list(prompt_ids), list[int]()
  key = jax.random.key(seed)
  while len(new) < length and (not new or new[-1] != EOS_ID):
    full = len(ids) >= m.seq_len
    window = ids[-(m.seq_len // 2) :] if full else ids
    room = min(length - len(new), m.seq_len - len(window))
    count, out_L = _extend(
      params,
      _padded(window, m.seq_len),
      len(window),
      room,
      float(temperature),
      key,
      len(new),
      m=m,
      top_k=min(top_k, m.vocab_size),
    )
    drawn = np.asarray(out_L)[: int(count)].tolist()
    ids, new = ids + drawn, new + drawn
  return new


# Number of drawn tokens; the tokens, int32 [L]; next logits, float32 [V]; cache.
Carry = tuple[jax.Array | int, jax.Array, jax.Array, PyTree]


@functools.partial(jax.jit, static_argnames=("m", "top_k"))
def _extend(
  params: Params,
  ids_1xC: jax.Array,
  known: jax.Array | int,
  room: jax.Array | int,
  temperature: jax.Array | float,
  key: jax.Array,
  drawn: jax.Array | int,
  *,
  m: ModelConfig,
  top_k: int,
) -> tuple[jax.Array | int, jax.Array]:
  """Draws up to `room` tokens after BOS and `known` prompt tokens; ends after EOS."""
  model = registry.get(m)

  def more(carry: Carry) -> jax.Array:
    i, out_L, _, _ = carry
    last = out_L[jnp.maximum(i - 1, 0)]
    return (i < room) & ((i == 0) | (last != EOS_ID))

  def body(carry: Carry) -> Carry:
    i, out_L, logits_V, cache = carry
    token = sample(logits_V, jax.random.fold_in(key, drawn + i), temperature, top_k)
    # The logits after the last token are computed too, but nothing uses them.
    logits_1xV, cache = model.logits(
      m, params, token[None, None], cache, known + 1 + i, 0
    )
    return i + 1, out_L.at[i].set(token), logits_1xV[0], cache

  cache = model.init_cache(m, 1)
  logits_1xV, cache = model.logits(m, params, ids_1xC, cache, 0, known)
  out_L = jnp.zeros(m.seq_len, jnp.int32)
  first: Carry = (0, out_L, logits_1xV[0], cache)
  count, out_L, _, _ = jax.lax.while_loop(more, body, first)
  return count, out_L


def sample(
  logits_V: jax.Array, key: jax.Array, temperature: jax.Array | float, top_k: int
) -> jax.Array:
  """Draws a token from softmax(logits / temperature) over the top_k most likely.

  Args:
    logits_V: float32.
    key: PRNG key.
    temperature: 0 takes the most likely token; less than 1e-6 counts as 1e-6.
    top_k: number of tokens to draw from; tokens as likely as the last of these can be
      drawn too. 0: all tokens.
  """
  if top_k:
    least = jax.lax.top_k(logits_V, top_k)[0][-1]
    logits_V = jnp.where(logits_V >= least, logits_V, -jnp.inf)
  drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
  return jnp.where(temperature > 0, drawn, jnp.argmax(logits_V)).astype(jnp.int32)


def _padded(window: list[int], seq_len: int) -> np.ndarray:
  """Pads BOS and the window with zeros to int32 [1, C].

  C is a power of two, at most seq_len, so that XLA compiles few programs.
  """
  used = len(window) + 1
  ids_1xC = np.zeros((1, min(1 << (used - 1).bit_length(), seq_len)), np.int32)
  ids_1xC[0, :used] = [BOS_ID, *window]
  return ids_1xC
