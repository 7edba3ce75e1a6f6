"""Text from a model: sampling token by token with a key-value cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from diloco.model import decoder as model_lib


def make_generate(c):
  """Builds the sampler of a resolved config.

  Returns:
    generate(params, prompt_ids, length, temperature, seed, top_k) -> list of new ids,
    EOS among them at most as the last: it ends the text. Temperature 0 is greedy,
    top_k 0 keeps all tokens. When all seq_len positions are taken, the last
    seq_len // 2 tokens become the new context: positions are learned, so a cache
    cannot slide.
  """
  dims = model_lib.ModelDims.from_config(c)

  @functools.partial(jax.jit, static_argnames="top_k")
  def extend(params, ids_1xC, known, room, temperature, top_k, key, drawn):
    """Up to `room` new tokens after BOS and `known` tokens; all on the device."""
    head_VxD = params["embed"]["tokens"]
    x_1xCxD, cache = model_lib.decode(
      dims, params, ids_1xC, model_lib.init_cache(dims, 1), 0
    )

    def more(carry):
      i, out_L, _, _ = carry
      last = out_L[jnp.maximum(i - 1, 0)]
      return (i < room) & ((i == 0) | (last != model_lib.EOS_ID))

    def body(carry):
      i, out_L, x_D, cache = carry
      token = sample(
        next_logits(x_D, head_VxD),
        jax.random.fold_in(key, drawn + i),
        temperature,
        top_k,
      )
      # The last token's own hidden state is not needed; computing it changes nothing.
      x_1x1xD, cache = model_lib.decode(
        dims, params, token[None, None], cache, known + 1 + i
      )
      return i + 1, out_L.at[i].set(token), x_1x1xD[0, 0], cache

    out_L = jnp.zeros(dims.seq_len, jnp.int32)
    x_D = x_1xCxD[0, known]
    count, out_L, _, _ = jax.lax.while_loop(more, body, (0, out_L, x_D, cache))
    return count, out_L

  def generate(
    params, prompt_ids, length, temperature=0.8, seed=0, top_k=0
  ) -> list[int]:
    ids, new = list(prompt_ids), list[int]()
    key = jax.random.key(seed)
    while len(new) < length and (not new or new[-1] != model_lib.EOS_ID):
      full = len(ids) >= dims.seq_len
      window = ids[-(dims.seq_len // 2) :] if full else ids
      room = min(length - len(new), dims.seq_len - len(window))
      count, out_L = extend(
        params,
        _padded(window, dims.seq_len),
        len(window),
        room,
        float(temperature),
        min(top_k, dims.vocab_size),
        key,
        len(new),
      )
      drawn = np.asarray(out_L)[: int(count)].tolist()
      ids, new = ids + drawn, new + drawn
    return new

  return generate


def next_logits(x_D: jax.Array, head_VxD: jax.Array) -> jax.Array:
  """float32 [V] logits of the token after the one with hidden state x_D."""
  return jnp.einsum(
    "d,vd->v", x_D, head_VxD.astype(x_D.dtype), preferred_element_type=jnp.float32
  )


def sample(logits_V: jax.Array, key: jax.Array, temperature, top_k: int) -> jax.Array:
  """Draws a token from softmax(logits / temperature) over the top_k likeliest.

  Args:
    logits_V: float32.
    key: PRNG key.
    temperature: 0 takes the likeliest token.
    top_k: tokens kept; ties with the last of them are kept too; 0 keeps all.
  """
  if top_k:
    least = jax.lax.top_k(logits_V, top_k)[0][-1]
    logits_V = jnp.where(logits_V >= least, logits_V, -jnp.inf)
  drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
  return jnp.where(temperature > 0, drawn, jnp.argmax(logits_V)).astype(jnp.int32)


def _padded(window: list[int], seq_len: int) -> np.ndarray:
  """int32 [1, C]: BOS and the window, padded to a power of two: few programs."""
  used = len(window) + 1
  ids_1xC = np.zeros((1, min(1 << (used - 1).bit_length(), seq_len)), np.int32)
  ids_1xC[0, :used] = [model_lib.BOS_ID, *window]
  return ids_1xC
