"""The architecture qwen3 in plain NumPy, float64: an independent reference."""

import dataclasses

import jax
import numpy as np
import numpy_attention

from diloco.contrib.qwen3 import Qwen3
from diloco.spec.fields import ModelConfig

# Small enough for the reference; heads of another size than dim / num_heads.
OWN = Qwen3(kv_heads=2, head_dim=6, rope_theta=100.0, norm_eps=1e-3)
SIZES = {"num_layers": 3, "dim": 16, "num_heads": 4, "ff_dim": 24}
SIZES |= {"vocab_size": 50, "seq_len": 12}
MODEL = ModelConfig(name="qwen3", **SIZES, extensions=(OWN,), dtype="float32")


def with_own(m, **fields):
  """The model with other fields of the plug-in."""
  own = dataclasses.replace(m.of(Qwen3), **fields)
  return dataclasses.replace(m, extensions=(own,))


def norm(x, scale, eps):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rotated(x_LxHxK, theta):
  """Rotates each pair (i, i + K / 2) as a complex number, position by position."""
  half = x_LxHxK.shape[-1] // 2
  pairs = x_LxHxK[..., :half] + 1j * x_LxHxK[..., half:]
  angles = np.outer(np.arange(len(x_LxHxK)), theta ** (-np.arange(half) / half))
  pairs = pairs * np.exp(1j * angles)[:, None]
  return np.concatenate([pairs.real, pairs.imag], axis=-1)


def numpy_qwen3(m, params, ids):
  """Hidden states [L, D] of one sequence of input ids [L], float64."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x, own = p["embed"]["tokens"][ids], m.of(Qwen3)
  for layer in range(m.num_layers):
    b = jax.tree.map(lambda a, i=layer: a[i], p["blocks"])
    h, att = norm(x, b["attention_norm"]["scale"], own.norm_eps), b["attention"]
    q, k, v = ((h @ att[n]).reshape(len(ids), -1, own.head_dim) for n in "qkv")
    q, k = (
      rotated(norm(x, att[f"{n}_norm"]["scale"], own.norm_eps), own.rope_theta)
      for x, n in ((q, "q"), (k, "k"))
    )
    k, v = (np.repeat(x, m.num_heads // own.kv_heads, axis=1) for x in (k, v))
    [y] = numpy_attention.attention(q, k, v)
    x = x + y.reshape(len(ids), -1) @ att["out"]
    h = norm(x, b["ff_norm"]["scale"], own.norm_eps)
    gate = h @ b["ff"]["gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (h @ b["ff"]["up"])) @ b["ff"]["down"]
  return norm(x, p["embed"]["norm"]["scale"], own.norm_eps)


def numpy_head(params):
  """The head [V, D], float64."""
  embed = params["embed"]
  return np.asarray(embed.get("head", embed["tokens"]), np.float64)
