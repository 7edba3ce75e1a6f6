"""Which attention a device gets, and the sentences that refuse one.

tests/mesh/test_layouts.py compares values and gradients with NumPy on several devices.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy_attention
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from diloco.config import changed, resolve
from diloco.errors import ConfigError
from diloco.model import attention
from diloco.spec.fields import ModelConfig
from diloco.train import train

MODEL = ModelConfig(dim=128, num_heads=2, seq_len=256)
KINDS = {"cpu": "cpu", "v5e": "TPU v5 lite", "h100": "NVIDIA H100 80GB HBM3"}
KINDS |= {"t4": "Tesla T4", "rtx": "NVIDIA GeForce RTX 4090"}


CUDNN = {"attention": "cudnn"}


@pytest.fixture
def with_cudnn(monkeypatch):
  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91_000)


@pytest.mark.parametrize(
  ("name", "fields", "expected"),
  [
    ("cpu", {}, "xla"),
    ("v5e", {}, "splash"),
    ("v5e", {"segment_masks": True, "dtype": "float32"}, "splash"),
    ("v5e", {"seq_len": 200}, "xla"),
    ("v5e", {"attention": "xla"}, "xla"),
    ("h100", {}, "cudnn"),
    ("h100", {"num_heads": 32}, "xla"),  # Heads of size 4.
    ("t4", {}, "xla"),
    ("rtx", {}, "xla"),
    ("rtx", {"attention": "cudnn"}, "cudnn"),
  ],
)
def test_the_attention_that_a_device_gets(with_cudnn, name, fields, expected):
  m = dataclasses.replace(MODEL, **fields)
  assert attention.choose(m, KINDS[name]) == expected
  attention.check(m, KINDS[name])


@pytest.mark.parametrize("chosen", ["auto", "splash"])
def test_sequences_of_another_length_than_the_model_take_what_suits_them(chosen):
  m = dataclasses.replace(MODEL, attention=chosen)
  lengths = (256, 128, 64, 32)
  found = [attention.choose(m, KINDS["v5e"], length) for length in lengths]
  assert found == ["splash", "splash", "xla", "xla"]


@pytest.mark.parametrize(
  ("name", "fields", "reason"),
  [
    ("cpu", {"attention": "splash"}, "kind TPU, and these are cpu; choose auto or xla"),
    ("v5e", {"attention": "cudnn"}, "needs devices of kind NVIDIA, and these are TPU"),
    ("v5e", {"attention": "splash", "seq_len": 200}, "of 128 .* model.seq_len is 200"),
    ("h100", {**CUDNN, "dtype": "float32"}, "bfloat16, and model.dtype is float32"),
    ("h100", {**CUDNN, "segment_masks": True}, "documents, and model.segment_masks is"),
    ("h100", {**CUDNN, "num_heads": 32}, "multiple of 8, but got 4"),
  ],
)
def test_an_attention_that_cannot_work_is_refused(with_cudnn, name, fields, reason):
  m = dataclasses.replace(MODEL, **fields)
  with pytest.raises(ConfigError, match=f"model.attention is .*{reason}") as error:
    attention.check(m, KINDS[name])
  assert "\n" not in str(error.value)


def test_without_cudnn_auto_takes_xla_and_cudnn_is_refused(monkeypatch):
  monkeypatch.setattr(cudnn, "cuda_versions", None)
  # Another length than in the other tests, whose shapes JAX remembers.
  m = dataclasses.replace(MODEL, seq_len=512)
  assert attention.choose(m, KINDS["h100"]) == "xla"
  m = dataclasses.replace(m, attention="cudnn")
  with pytest.raises(ConfigError, match="cuDNN is not detected"):
    attention.check(m, KINDS["h100"])


def test_a_run_on_devices_without_the_kernel_is_refused(tiny, tmp_path):
  c = changed(resolve(tiny), {"model.attention": "splash", "model.seq_len": 128})
  with pytest.raises(ConfigError, match="these are cpu"):
    train(c, tmp_path)


@pytest.mark.parametrize("masks", [False, True])
def test_a_cpu_computes_what_numpy_computes(masks):
  *qkv, weights = np.random.default_rng(0).normal(size=(4, 3, 128, 2, 64))
  segment = np.arange(3 * 128).reshape(3, 128) // 50 if masks else None
  mine = lambda q, k, v: attention.attend(MODEL, q, k, v, segment)
  y, pull = jax.vjp(mine, *(jnp.asarray(x, jnp.float32) for x in qkv))
  found = y, *pull(jnp.asarray(weights, jnp.float32))
  expected = numpy_attention.attention(*qkv, segment, weights)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["xla", "cudnn", "splash"])
@pytest.mark.parametrize(
  "shape",  # B, L, heads, heads of keys and values, head size.
  [
    (2, 256, 4, 2, 64),
    pytest.param((2, 2048, 20, 20, 64), marks=pytest.mark.slow("2048 positions")),
    pytest.param((2, 1024, 8, 2, 128), marks=pytest.mark.slow("1024 positions")),
  ],
  ids=str,
)
def test_in_bfloat16_a_kernel_differs_from_float32_by_rounding(name, shape):
  batch, length, heads, kv_heads, size = shape
  sizes = {"dim": heads * size, "num_heads": heads, "seq_len": length}
  plain = ModelConfig(**sizes, dtype="float32", attention="xla")
  m = dataclasses.replace(plain, dtype="bfloat16", attention=name)
  try:
    attention.check(m, jax.devices()[0].device_kind)
  except ConfigError as error:
    pytest.skip(str(error))
  keys = jax.random.split(jax.random.key(0), 4)
  *qkv, weights = (
    jax.random.normal(key, (batch, length, g, size), jnp.bfloat16).astype(jnp.float32)
    for key, g in zip(keys, (heads, kv_heads, kv_heads, heads))
  )

  def with_gradients(m: ModelConfig) -> list[np.ndarray]:
    def loss(*qkv):
      y = attention.attend(m, *qkv, None)
      return (y * weights).sum(dtype=jnp.float32), y

    f = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    with jax.default_matmul_precision("highest"):
      grads, y = f(*(x.astype(m.dtype) for x in qkv))
    return [np.asarray(x, np.float64) for x in (y, *grads)]

  for found, expected in zip(with_gradients(m), with_gradients(plain)):
    # bfloat16 keeps 8 bits: distances near 2^-9 are rounding.
    distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert distance < 2**-7
    print(f"{shape} {name} {distance:.2e}")
