"""Memory, loops and dtypes of the decoder, and the papers' parameter counts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_decoder import MODEL

from diloco.model import decoder
from diloco.spec import shapes
from diloco.spec.fields import ModelConfig

init = jax.jit(decoder.init, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(m: ModelConfig, params, ids_BxL):
  return decoder.Decoder(m).apply({"params": params}, jnp.asarray(ids_BxL))[0]


losses = jax.jit(decoder.losses, static_argnums=0)


@pytest.fixture(scope="module")
def params():
  return init(MODEL, jax.random.key(0))


def test_a_model_without_masks_computes_none(params):
  ids = jnp.zeros((2, 12), jnp.int32)

  def program(dims):
    f = lambda p: hidden_states(dims, p, ids).sum()
    return str(jax.make_jaxpr(jax.grad(f))(params))

  assert "cumsum" not in program(MODEL)
  assert "cumsum" in program(dataclasses.replace(MODEL, segment_masks=True))


def gradient(m: ModelConfig, ids):
  return jax.jit(jax.grad(lambda p: (hidden_states(m, p, ids) ** 2).sum()))


def test_memory_and_loops_change_no_gradient(params):
  ids = jnp.asarray(np.random.default_rng(2).integers(0, 50, (2, 12)))
  plain = gradient(MODEL, ids)(params)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
  for fields in ({"remat": "dots", "unroll": 2}, {"remat": "full", "unroll": 0}):
    other = gradient(dataclasses.replace(MODEL, **fields), ids)(params)
    jax.tree.map(close, plain, other)


@pytest.mark.parametrize(("unroll", "barriers"), [(1, False), (0, True)])
def test_without_a_loop_barriers_keep_what_is_computed_again(params, unroll, barriers):
  m = dataclasses.replace(MODEL, remat="full", unroll=unroll)
  text = gradient(m, jnp.zeros((2, 12), int)).lower(params).as_text()
  assert ("optimization_barrier" in text) == barriers


@pytest.mark.parametrize(("remat", "kernels"), [("dots", 1), ("full", 2)])
def test_only_full_rematerialisation_repeats_the_kernel_of_attention(remat, kernels):
  m = dataclasses.replace(MODEL, seq_len=128, attention="splash", remat=remat)
  params = jax.eval_shape(lambda key: decoder.init(m, key), jax.random.key(0))
  jaxpr = jax.make_jaxpr(gradient(m, jnp.zeros((1, 128), int)))(params)
  assert str(jaxpr).count("name=splash_mha_fwd_residuals") == kernels


def test_without_unrolling_the_blocks_are_one_loop(params):
  def loops(unroll: int) -> int:
    f = gradient(dataclasses.replace(MODEL, unroll=unroll), jnp.zeros((2, 12), int))
    return f.lower(params).as_text().count("stablehlo.while")

  assert (loops(1), loops(0)) == (2, 0)  # Forward and backward.


def test_bfloat16_compute_keeps_float32_parameters_and_logits():
  dims = dataclasses.replace(MODEL, dtype="bfloat16", param_dtype="bfloat16")
  params = init(dims, jax.random.key(0))
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
  x = hidden_states(dims, params, jnp.zeros((1, 12), jnp.int32))
  assert x.dtype == jnp.bfloat16
  nll, z2 = losses(dims, params, jnp.zeros((1, 12), jnp.int32))
  assert nll.dtype == z2.dtype == jnp.float32


def test_parameter_counts_give_the_papers_names():
  for layers, heads, millions in ((6, 8, 35.7), (18, 24, 559.9), (48, 64, 9798)):
    sizes = {"num_layers": layers, "num_heads": heads, "dim": 64 * heads}
    m = ModelConfig(**sizes, vocab_size=32768)
    assert shapes.matrix_params(m) == pytest.approx(millions * 1e6, rel=2e-3)
    assert shapes.matrix_params(m) == 12 * layers * m.dim**2 + 32768 * m.dim
