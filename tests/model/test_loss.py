"""The losses against float64, and their cost in the compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.model import loss

B, L, D, V, Z_LOSS = 2, 12, 8, 20, 0.3


def inputs(dtype=np.float32):
  rng = np.random.default_rng(3)
  x, head = rng.normal(size=(B, L, D)), rng.normal(size=(V, D))
  return jnp.asarray(x, dtype), jnp.asarray(head, dtype), rng.integers(0, V, (B, L))


def reference(x, head, targets):
  """Returns nll, log(Z)^2 and the gradients of the mean objective, in float64."""
  x, head = np.asarray(x, np.float64), np.asarray(head, np.float64)
  logits = x @ head.T
  log_z = np.log(np.exp(logits).sum(-1, keepdims=True))
  hit = np.eye(V)[targets]
  nll = (log_z - logits)[hit == 1].reshape(B, L)
  p = np.exp(logits - log_z)
  g = (p - hit + Z_LOSS * 2 * log_z * p) / targets.size
  return nll, log_z[..., 0] ** 2, g @ head, np.einsum("blv,bld->vd", g, x)


@pytest.mark.parametrize("chunk", [0, 1, 12])
def test_losses_and_gradients_of_chunks_equal_float64(chunk):
  x, head, targets = inputs()
  nll, z2, grad_x, grad_head = reference(x, head, targets)
  found = loss.token_losses(x, head, targets, chunk)
  np.testing.assert_allclose(found, (nll, z2), rtol=1e-5, atol=1e-5)
  f = lambda x, head: loss.objective(x, head, targets, Z_LOSS, chunk)
  mean = (nll.mean() + Z_LOSS * z2.mean(), nll.mean())
  np.testing.assert_allclose(f(x, head), mean, rtol=1e-5)
  (objective, _), grads = jax.value_and_grad(
    lambda *args: (3 * f(*args)[0], f(*args)[1]), argnums=(0, 1), has_aux=True
  )(x, head)
  np.testing.assert_allclose(objective, 3 * mean[0], rtol=1e-5)
  np.testing.assert_allclose(grads[0], 3 * grad_x, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(grads[1], 3 * grad_head, rtol=1e-4, atol=1e-6)


def test_replicas_mapped_together_have_the_gradients_of_each_alone():
  x, head, targets = inputs()
  f = jax.grad(lambda *a: loss.objective(*a, Z_LOSS, 4)[0], argnums=(0, 1))
  both = jax.vmap(f)(*(jnp.stack([a, a[::-1]]) for a in (x, head, targets)))
  for m, one in enumerate((f(x, head, targets), f(x[::-1], head[::-1], targets[::-1]))):
    for a, b in zip(both, one):
      np.testing.assert_allclose(a[m], b, rtol=1e-5, atol=1e-7)


def test_bfloat16_gradients_accumulate_in_float32():
  x, head, targets = inputs(jnp.bfloat16)
  *_, grad_x, grad_head = reference(x, head, targets)
  f = lambda x, head: loss.objective(x, head.astype(jnp.bfloat16), targets, Z_LOSS, 1)
  grads = jax.grad(lambda *args: f(*args)[0], argnums=(0, 1))(x, head)
  assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]
  # The last rounding: 8 bits of mantissa. Twelve sums in bfloat16 would lose more.
  for found, expected in zip(grads, (grad_x, grad_head)):
    error = np.abs(np.asarray(found, np.float64) - expected).max()
    assert error < 0.01 * np.abs(expected).max()


def compiled(chunk, length=64, vocabulary=1000, width=8):
  x, head = jnp.zeros((2, length, width)), jnp.zeros((vocabulary, width))
  targets = jnp.zeros((2, length), jnp.int32)
  f = lambda x, head: loss.objective(x, head, targets, 0.1, chunk)[0]
  return jax.jit(jax.grad(f, argnums=(0, 1))).lower(x, head).compile()


def test_chunks_never_hold_all_logits():
  all_logits = 2 * 64 * 1000 * 4
  assert compiled(0).memory_analysis().temp_size_in_bytes >= all_logits
  assert compiled(8).memory_analysis().temp_size_in_bytes < all_logits / 2


@pytest.mark.parametrize("chunk", [0, 32])
def test_the_gradient_needs_three_products_and_not_a_fourth(chunk):
  width, positions = 512, chunk or 64
  product = 2 * 2 * positions * 1000 * width
  # XLA counts the body of the loop over chunks once.
  flops = compiled(chunk, width=width).cost_analysis()["flops"]
  assert 3 * product < flops < 3.2 * product
