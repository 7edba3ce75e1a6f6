"""Model and loss against plain NumPy, and the papers' parameter counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_decoder import numpy_decoder

from diloco import config as config_lib
from diloco.model import decoder as model_lib
from diloco.model import loss as loss_lib

DIMS = model_lib.ModelDims(3, 16, 2, 32, 50, 12, dtype="float32")


@pytest.fixture(scope="module")
def params():
  return model_lib.init_params(DIMS, jax.random.key(0))


def test_hidden_states_agree_with_numpy(params):
  # Scales away from one, so that a norm that ignores its scale is noticed.
  params = jax.tree.map(
    lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params
  )
  ids = np.random.default_rng(0).integers(0, 50, (2, 12))
  x = model_lib.hidden_states(DIMS, params, jnp.asarray(ids))
  for row, mine in zip(ids, np.asarray(x)):
    np.testing.assert_allclose(
      mine, numpy_decoder(DIMS, params, row), rtol=2e-4, atol=2e-4
    )


def test_a_position_sees_only_what_comes_before(params):
  ids = np.random.default_rng(1).integers(4, 50, (1, 12))
  other = ids.copy()
  other[0, 7] = 3
  a, b = (
    np.asarray(
      model_lib.hidden_states(DIMS, params, model_lib.shift_right(jnp.asarray(i)))
    )
    for i in (ids, other)
  )
  np.testing.assert_array_equal(a[0, :8], b[0, :8])
  assert np.abs(a[0, 8:] - b[0, 8:]).min(axis=0).max() > 0
  inputs = model_lib.shift_right(jnp.asarray(ids))
  assert inputs[0, 0] == model_lib.BOS_ID
  np.testing.assert_array_equal(inputs[0, 1:], ids[0, :-1])


def masked_states(params, tokens, **changes):
  dims = dataclasses.replace(DIMS, segment_masks=True, **changes)
  return model_lib.hidden_states(
    dims, params, model_lib.shift_right(jnp.asarray(tokens))
  )


# Documents, EOS included, that fill a sequence of 12; the last is cut.
@pytest.mark.parametrize("lengths", [(5, 3, 4), (1, 1, 9, 1), (12,), (11, 1)])
def test_masked_documents_are_what_they_are_alone(params, lengths):
  rng = np.random.default_rng(sum(lengths[:1]))
  documents = [[*rng.integers(4, 50, n - 1), model_lib.EOS_ID] for n in lengths]
  documents[-1][-1] = 17
  packed = masked_states(params, [np.concatenate(documents)])[0]
  start = 0
  for document in documents:
    ids = np.asarray([model_lib.BOS_ID, *document[:-1]])
    alone = numpy_decoder(DIMS, params, ids)
    np.testing.assert_allclose(
      packed[start : start + len(document)], alone, rtol=2e-4, atol=2e-4
    )
    start += len(document)


def test_without_masks_documents_see_the_ones_before(params):
  tokens = np.asarray([[9, 8, 1, 7, 6, 5, 4, 9, 8, 7, 6, 5]])
  other = tokens.copy()
  other[0, 0] = 30
  plain = lambda t: model_lib.hidden_states(
    DIMS, params, model_lib.shift_right(jnp.asarray(t))
  )
  assert np.abs(plain(tokens) - plain(other))[0, 3:].max() > 1e-3
  np.testing.assert_array_equal(
    masked_states(params, tokens)[0, 3:], masked_states(params, other)[0, 3:]
  )


def test_masks_without_an_end_of_document_change_nothing(params):
  tokens = np.random.default_rng(5).integers(4, 50, (2, 12))
  plain = model_lib.hidden_states(
    DIMS, params, model_lib.shift_right(jnp.asarray(tokens))
  )
  np.testing.assert_allclose(masked_states(params, tokens), plain, rtol=1e-5, atol=1e-5)


def test_a_model_without_masks_computes_none(params):
  ids = jnp.zeros((2, 12), jnp.int32)

  def program(dims):
    f = lambda p: model_lib.hidden_states(dims, p, ids).sum()
    return str(jax.make_jaxpr(jax.grad(f))(params))

  assert "cumsum" not in program(DIMS)
  assert "cumsum" in program(dataclasses.replace(DIMS, segment_masks=True))


def test_rematerialisation_changes_nothing_but_memory(params):
  ids = jnp.asarray(np.random.default_rng(2).integers(0, 50, (2, 12)))
  f = lambda d: jax.grad(lambda p: (model_lib.hidden_states(d, p, ids) ** 2).sum())
  plain, remat = f(DIMS)(params), f(dataclasses.replace(DIMS, remat=True))(params)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
  jax.tree.map(close, plain, remat)


def test_bfloat16_compute_keeps_float32_parameters_and_logits():
  dims = dataclasses.replace(DIMS, dtype="bfloat16", param_dtype="bfloat16")
  params = model_lib.init_params(dims, jax.random.key(0))
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
  x = model_lib.hidden_states(dims, params, jnp.zeros((1, 12), jnp.int32))
  assert x.dtype == jnp.bfloat16
  nll, z2 = loss_lib.token_losses(
    x, params["embed"]["tokens"], jnp.zeros((1, 12), jnp.int32), jnp.ones((1, 12))
  )
  assert nll.dtype == z2.dtype == jnp.float32


@pytest.mark.parametrize("chunk", [0, 1, 3, 12])
def test_loss_in_chunks_is_the_loss(chunk):
  rng = np.random.default_rng(3)
  x = rng.normal(size=(2, 12, 8)).astype(np.float32)
  head = rng.normal(size=(20, 8)).astype(np.float32)
  targets, weights = rng.integers(0, 20, (2, 12)), rng.integers(0, 2, (2, 12))
  logits = x.astype(np.float64) @ head.T
  log_z = np.log(np.exp(logits).sum(-1))
  nll = log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
  f = lambda x: loss_lib.token_losses(
    x, jnp.asarray(head), jnp.asarray(targets), jnp.float32(weights), chunk
  )
  np.testing.assert_allclose(f(x)[0], (nll * weights).sum(), rtol=1e-5)
  np.testing.assert_allclose(f(x)[1], (log_z**2 * weights).sum(), rtol=1e-5)
  gradient = jax.grad(lambda x: f(x)[0])(x)
  probs = np.exp(logits - log_z[..., None])
  probs[np.arange(2)[:, None], np.arange(12), targets] -= 1
  np.testing.assert_allclose(
    gradient, (probs * weights[..., None]) @ head, rtol=1e-4, atol=1e-5
  )


def test_chunked_loss_never_holds_all_logits():
  x, head = jnp.zeros((2, 64, 8)), jnp.zeros((1000, 8))
  targets, weights = jnp.zeros((2, 64), jnp.int32), jnp.ones((2, 64))

  def compiled(chunk):
    f = lambda x, h: loss_lib.token_losses(x, h, targets, weights, chunk)[0]
    return jax.jit(jax.grad(f, argnums=(0, 1))).lower(x, head).compile()

  all_logits = 2 * 64 * 1000 * 4
  assert compiled(0).memory_analysis().temp_size_in_bytes >= all_logits
  assert compiled(8).memory_analysis().temp_size_in_bytes < all_logits / 2


@pytest.mark.parametrize(
  ("layers", "heads", "vocab", "millions"),
  [
    (6, 8, 32768, 35.7),
    (9, 12, 32768, 88.9),
    (12, 16, 32768, 184.5),
    (15, 20, 32768, 336.9),
    (18, 24, 32768, 559.9),
    (24, 32, 32768, 1275),
    (30, 40, 32768, 2443),
    (36, 48, 32768, 4178),
    (48, 64, 32768, 9798),
  ],
)
def test_parameter_counts_give_the_papers_names(layers, heads, vocab, millions):
  c = config_lib.default_config()
  c.train.steps = 1
  c.model.update(
    {"num_layers": layers, "num_heads": heads, "dim": 64 * heads, "vocab_size": vocab}
  )
  count = config_lib.num_params(config_lib.resolve(c), with_positions_and_norms=False)
  assert count == pytest.approx(millions * 1e6, rel=2e-3)


def test_the_counted_parameters_are_those_of_the_model():
  c = config_lib.default_config()
  c.train.steps = 1
  c.model.update({"num_layers": 3, "num_heads": 2, "dim": 16, "vocab_size": 50})
  r = config_lib.resolve(c)
  params = jax.eval_shape(
    lambda k: model_lib.init_params(model_lib.ModelDims.from_config(r), k),
    jax.random.key(0),
  )
  assert config_lib.num_params(r) == sum(x.size for x in jax.tree.leaves(params))
