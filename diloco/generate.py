"""Text from a model: sampling with a temperature, by whole forward passes."""

import jax
import jax.numpy as jnp
import numpy as np

from diloco import model as model_lib


def make_generate(c):
  """Builds the sampler of a resolved config.

  Returns:
    generate(params, prompt_ids, length, temperature, seed) -> list of new ids. A
    window of the last seq_len tokens is the context; temperature 0 is greedy.
  """
  dims = model_lib.ModelDims.from_config(c)

  @jax.jit
  def next_token(params, context_1xL, position, temperature, key):
    x_1xLxD = model_lib.hidden_states(dims, params, model_lib.shift_right(context_1xL))
    logits_V = (params["embed"]["tokens"] @ x_1xLxD[0, position]).astype(jnp.float32)
    drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits_V))

  def generate(params, prompt_ids, length, temperature=0.8, seed=0) -> list[int]:
    ids = list(prompt_ids)
    for i in range(length):
      window = ids[-(dims.seq_len - 1) :]
      context_1xL = np.zeros((1, dims.seq_len), np.int32)
      context_1xL[0, : len(window)] = window
      key = jax.random.fold_in(jax.random.key(seed), i)
      # Inputs are shifted right: position p sees the p tokens before it.
      ids.append(int(next_token(params, context_1xL, len(window), temperature, key)))
    return ids[len(prompt_ids) :]

  return generate
