"""Encodes and decodes trees of outer gradients, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import one_tensor
import plugins  # noqa: F401  Registers compressors.
import pytest

from diloco.config import resolve
from diloco.contrib import chunked_topk, error_feedback  # noqa: F401  Register.
from diloco.mesh.devices import make_mesh
from diloco.mesh.sharding import REPLICA
from diloco.spec import sizes
from diloco.spec.fields import WireConfig
from diloco.wire import compressors, exchange

NAMES = ("quantize", "topk", "random", "signs", "feedback")
KEYS = jax.random.split(jax.random.key(1), 2)


def draw_M() -> dict:
  """Outer gradients of two replicas; fsdp can shard axes of 8, but not of 5."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  return {
    "blocks": {"w": draw(2, 3, 8, 6), "odd": draw(2, 3, 5)},
    "embed": {"tokens": draw(2, 8, 4)},
  }


_encode = jax.jit(exchange.encode, static_argnums=(0, 1))
_decode = jax.jit(exchange.decode, static_argnums=(0, 1, 4))


def encode(wire, mesh, delta_M, state_M=None):
  state_M = exchange.init_state(wire, delta_M) if state_M is None else state_M
  return _encode(wire, mesh, delta_M, state_M, KEYS)


def decode(wire, mesh, payload, like, lead=(REPLICA,)):
  return _decode(wire, mesh, payload, like, lead)


def first(tree_M):
  return jax.tree.map(lambda x: x[0], tree_M)


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_is_coded_tensor_by_tensor(tiny, name):
  wire = WireConfig(compressor=name, format="e4m3fn", density=0.5, block_size=4)
  mesh = make_mesh(resolve(tiny), jax.devices()[:1])
  delta_M = draw_M()
  payload, _ = encode(wire, mesh, delta_M)
  shapes = jax.tree.map(np.shape, first(delta_M))
  assert payload.shape == (2, 1, sizes.payload_bytes(wire, shapes))
  assert payload.dtype == jnp.uint8
  found_M = decode(wire, mesh, payload, first(delta_M))
  leaves = jax.tree_util.tree_leaves_with_path(delta_M)
  for i, ((path, x_M), y_M) in enumerate(zip(leaves, jax.tree.leaves(found_M))):
    for x, y, key in zip(x_M, y_M, KEYS):
      n = len(x) if path[0].key == "blocks" else 1
      flat, row = x.reshape(n, -1), x.shape[-1]
      state, leaf_key = compressors.get(name).init(flat), jax.random.fold_in(key, i)
      code, _ = one_tensor.encode(wire, flat, state, row, leaf_key)
      alone = one_tensor.decode(wire, code, *flat.shape, row)
      np.testing.assert_array_equal(y, alone.reshape(x.shape))


@pytest.mark.parametrize(
  ("name", "beta"),
  [("quantize", 1.0), ("chunked_topk(chunk=4)", 0.75), ("feedback", 0.75)],
)
def test_error_feedback_sends_what_earlier_codes_lost(tiny, name, beta):
  options = {"format": "e3m0", "block_size": 4, "density": 0.3}
  plain = WireConfig(compressor=name, **options)
  text = f"error_feedback(beta={beta}, of={name!r})"
  wire = WireConfig(compressor=text, **options)
  mesh = make_mesh(resolve(tiny), jax.devices()[:1])
  delta_M, state_M = draw_M(), None
  error_M = jax.tree.map(lambda x: np.zeros(x.shape, np.float64), delta_M)
  for send in range(4):
    payload, state_M = encode(wire, mesh, delta_M, state_M)
    sent_M = decode(wire, mesh, payload, first(delta_M))
    wanted_M = jax.tree.map(lambda e, x: beta * e + x, error_M, delta_M)
    if name != "feedback":  # That compressor has an error of its own.
      alone, _ = encode(plain, mesh, jax.tree.map(jnp.float32, wanted_M))
      assert np.mean(np.asarray(payload) != alone) < 0.02  # Rounding of float32.
    error_M = jax.tree.map(lambda x, y: np.asarray(x - y), wanted_M, sent_M)
    leaves = jax.tree.structure(delta_M).flatten_up_to(state_M)
    for (_, found), x in zip(leaves, jax.tree.leaves(error_M), strict=True):
      np.testing.assert_allclose(found, x, atol=1e-5)
      assert send == 0 or np.abs(x).max() > 1e-3
