"""Model and loss against plain NumPy, and the papers' parameter counts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_decoder import MODEL, numpy_decoder

from diloco.model import decoder
from diloco.spec import shapes
from diloco.spec.fields import ModelConfig

init = jax.jit(decoder.init, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(m: ModelConfig, params, ids_BxL):
  return decoder.Decoder(m).apply({"params": params}, jnp.asarray(ids_BxL))[0]


losses = jax.jit(decoder.losses, static_argnums=0)


def shift_right(tokens_BxL) -> np.ndarray:
  bos = np.full((len(tokens_BxL), 1), shapes.BOS_ID)
  return np.concatenate([bos, np.asarray(tokens_BxL)[:, :-1]], axis=1)


@pytest.fixture(scope="module")
def params():
  return init(MODEL, jax.random.key(0))


def test_hidden_states_agree_with_numpy(params):
  # Scales away from one, so that a norm that ignores its scale is noticed.
  params = jax.tree.map(
    lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params
  )
  ids = np.random.default_rng(0).integers(0, 50, (2, 12))
  x = hidden_states(MODEL, params, jnp.asarray(ids))
  for row, mine in zip(ids, np.asarray(x)):
    np.testing.assert_allclose(
      mine, numpy_decoder(MODEL, params, row), rtol=2e-4, atol=2e-4
    )


@pytest.mark.parametrize("chunk", [0, 4, 8])
def test_losses_depend_on_all_earlier_tokens_only(params, chunk):
  tokens = np.random.default_rng(7).integers(4, 50, (2, 12))
  m = dataclasses.replace(MODEL, loss_chunk=chunk)  # 8 divides no length of 12: 4.
  nll, z2 = losses(m, params, jnp.asarray(tokens))
  head = np.asarray(params["embed"]["tokens"], np.float64)
  for row, row_nll, row_z2 in zip(tokens, nll, z2):
    logits = numpy_decoder(m, params, shift_right(row[None])[0]) @ head.T
    log_z = np.log(np.exp(logits).sum(-1))
    expected = log_z - logits[np.arange(12), row]
    np.testing.assert_allclose(row_nll, expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(row_z2, log_z**2, rtol=1e-3, atol=1e-3)


def masked_states(params, tokens, **changes):
  dims = dataclasses.replace(MODEL, segment_masks=True, **changes)
  return hidden_states(dims, params, shift_right(jnp.asarray(tokens)))


# Documents, EOS included, that fill a sequence of 12; the last is cut.
@pytest.mark.parametrize("lengths", [(5, 3, 4), (1, 1, 9, 1), (12,), (11, 1)])
def test_masked_documents_do_not_see_each_other(params, lengths):
  rng = np.random.default_rng(sum(lengths[:1]))
  documents = [[*rng.integers(4, 50, n - 1), shapes.EOS_ID] for n in lengths]
  documents[-1][-1] = 17
  packed = masked_states(params, [np.concatenate(documents)])[0]
  start = 0
  for document in documents:
    ids = np.asarray([shapes.BOS_ID, *document[:-1]])
    alone = numpy_decoder(MODEL, params, ids)
    np.testing.assert_allclose(
      packed[start : start + len(document)], alone, rtol=2e-4, atol=2e-4
    )
    start += len(document)


def test_a_model_without_masks_computes_none(params):
  ids = jnp.zeros((2, 12), jnp.int32)

  def program(dims):
    f = lambda p: hidden_states(dims, p, ids).sum()
    return str(jax.make_jaxpr(jax.grad(f))(params))

  assert "cumsum" not in program(MODEL)
  assert "cumsum" in program(dataclasses.replace(MODEL, segment_masks=True))


def gradient(m: ModelConfig, ids):
  return jax.jit(jax.grad(lambda p: (hidden_states(m, p, ids) ** 2).sum()))


@pytest.mark.parametrize(
  "fields",
  [{"remat": "dots"}, {"remat": "full"}, {"unroll": 2}, {"unroll": 0, "remat": "full"}],
  ids=str,
)
def test_memory_and_loops_change_no_gradient(params, fields):
  ids = jnp.asarray(np.random.default_rng(2).integers(0, 50, (2, 12)))
  plain = gradient(MODEL, ids)(params)
  other = gradient(dataclasses.replace(MODEL, **fields), ids)(params)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
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


@pytest.mark.parametrize(
  ("layers", "heads", "vocab", "millions"),
  [
    *[(6, 8, 32768, 35.7), (18, 24, 32768, 559.9), (48, 64, 32768, 9798)],
  ],
)
def test_parameter_counts_give_the_papers_names(layers, heads, vocab, millions):
  m = ModelConfig(num_layers=layers, num_heads=heads, dim=64 * heads, vocab_size=vocab)
  assert shapes.matrix_params(m) == pytest.approx(millions * 1e6, rel=2e-3)
  d = m.dim
  assert shapes.matrix_params(m) == 12 * layers * d**2 + vocab * d


@pytest.mark.parametrize("qk_norm", [True, False])
def test_shapes_equal_those_of_initialised_parameters(qk_norm):
  m = dataclasses.replace(MODEL, qk_norm=qk_norm)
  params = jax.eval_shape(lambda key: decoder.init(m, key), jax.random.key(0))
  assert jax.tree.map(lambda x: x.shape, params) == shapes.parameters(m)
  assert shapes.num_params(m) == sum(x.size for x in jax.tree.leaves(params))
  paths = jax.tree_util.tree_leaves_with_path(params)
  assert [tuple(k.key for k in path) for path, _ in paths] == [
    path for path, _ in shapes.leaves(shapes.parameters(m))
  ]


def test_flops_equal_the_count_of_xla():
  m = dataclasses.replace(MODEL, num_layers=1, dim=64, ff_dim=256, seq_len=64)
  params = decoder.init(m, jax.random.key(0))
  loss = lambda p, tokens: decoder.objective(m, p, tokens)[0]
  tokens = jnp.zeros((4, 64), jnp.int32)
  program = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
  # The scan of one layer is counted once. XLA counts norms, softmax and GELU, too.
  counted = program.cost_analysis()["flops"] / tokens.size
  assert shapes.flops_per_token(m) == pytest.approx(counted, rel=0.15)
