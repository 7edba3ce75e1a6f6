"""The decoder in plain NumPy, float64: an independent reference."""

import jax
import numpy as np
import numpy_attention

from diloco.spec.fields import ModelConfig

# Small enough for the reference and for float64.
SIZES = {"num_layers": 3, "dim": 16, "num_heads": 2, "ff_dim": 32}
MODEL = ModelConfig(**SIZES, vocab_size=50, seq_len=12, dtype="float32")


def moved(params, scale=0.3):
  """Scales away from one and logits far apart, so that mistakes are seen."""
  return jax.tree.map(
    lambda x: x + scale * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype),
    params,
  )


def norm(x, scale):
  mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
  return (x - mean) / np.sqrt(var + 1e-6) * scale


def numpy_decoder(dims, params, ids):
  """Hidden states [L, D] of one sequence of input ids [L], float64."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = p["embed"]["tokens"][ids] + p["embed"]["positions"][: len(ids)]
  for layer in range(dims.num_layers):
    b = jax.tree.map(lambda a, i=layer: a[i], p["blocks"])
    h, att = norm(x, b["attention_norm"]["scale"]), b["attention"]
    q, k, v = ((h @ att[n]).reshape(len(ids), dims.num_heads, -1) for n in "qkv")
    q, k = norm(q, att["q_norm"]["scale"]), norm(k, att["k_norm"]["scale"])
    [y] = numpy_attention.attention(q, k, v)
    x = x + y.reshape(len(ids), -1) @ att["out"]
    h = norm(x, b["ff_norm"]["scale"]) @ b["ff"]["up"]
    gelu = h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    x = x + gelu @ b["ff"]["down"]
  return norm(x, p["embed"]["norm"]["scale"])
