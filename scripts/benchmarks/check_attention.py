"""Compares the kernels of attention with float32 on the device that is there.

  python scripts/benchmarks/check_attention.py

A row is one shape and one value of model.attention, in bfloat16: the relative L2
distances of outputs and of the gradients for q, k and v to those of xla in float32.
bfloat16 keeps 8 bits, so distances near 2^-9 = 2e-3 are rounding.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from timing import print_devices

from diloco.errors import ConfigError
from diloco.model import attention
from diloco.spec.fields import ModelConfig

# B, L, heads, heads of keys and values, head size.
SHAPES = (
  (2, 2048, 20, 20, 64),
  (2, 256, 4, 4, 64),
  (2, 1024, 8, 2, 128),
)


def results(m: ModelConfig, weights: jax.Array, *qkv: jax.Array) -> list[np.ndarray]:
  """Returns outputs and gradients, in float64."""

  def loss(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = attention.attend(m, *qkv, None)
    return (y * weights).sum(dtype=jnp.float32), y

  f = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
  grads, y = f(*(x.astype(m.dtype) for x in qkv))
  return [np.asarray(x, np.float64) for x in (y, *grads)]


def rows(shape: tuple[int, ...]) -> None:
  """Prints the rows of one shape."""
  batch, length, heads, kv_heads, size = shape
  keys = jax.random.split(jax.random.key(0), 4)
  groups = (heads, kv_heads, kv_heads, heads)
  *qkv, weights = (
    jax.random.normal(key, (batch, length, g, size), jnp.bfloat16).astype(jnp.float32)
    for key, g in zip(keys, groups)
  )
  plain = ModelConfig(
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=size,
    seq_len=length,
    dtype="float32",
    attention="xla",
  )
  expected = results(plain, weights, *qkv)
  for name in ("xla", "cudnn", "splash"):
    m = dataclasses.replace(plain, dtype="bfloat16", attention=name)
    try:
      attention.check(m, jax.devices()[0])
    except ConfigError:
      continue
    distance = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b)
    found = map(distance, results(m, weights, *qkv), expected)
    print(f"{shape!s:<24}{name:<8}", "  ".join(f"{x:.2e}" for x in found))


if __name__ == "__main__":
  jax.config.parse_flags_with_absl()
  jax.config.update("jax_default_matmul_precision", "highest")
  print_devices()
  print(f"{'B, L, H, G, K':<24}{'kernel':<8} output    dq        dk        dv")
  for shape in SHAPES:
    rows(shape)
