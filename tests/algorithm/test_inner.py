"""The inner step: clipping per replica, accumulation, shared programs."""

import jax
import jax.numpy as jnp
import numpy as np

from diloco.algorithm.inner import inner_step
from diloco.algorithm.method import Method
from diloco.algorithm.optimizers import make_inner, tuned
from diloco.algorithm.streaming import make_streaming
from diloco.config import Config
from diloco.config import resolve as resolve_config
from diloco.mesh.devices import make_mesh
from diloco.model import decoder


def resolve(c, **fields) -> Config:
  c.update_from_flattened_dict(fields)
  return resolve_config(c)


def run_step(c, params_M, tokens_MxBxL):
  with jax.set_mesh(make_mesh(c)):
    copied = jax.tree.map(jnp.copy, params_M)
    opt_state_M = jax.jit(jax.vmap(make_inner(c).init))(copied)
    return inner_step(copied, opt_state_M, tokens_MxBxL, tuned(c), c=c)


def setup(c, seed=0):
  keys = jax.random.split(jax.random.key(seed), c.models)
  params_M = jax.jit(jax.vmap(lambda key: decoder.init(c.model, key)))(keys)
  shape = (len(keys), c.train.batch_size // len(keys), c.model.seq_len)
  return params_M, jax.random.randint(jax.random.key(1), shape, 4, 2048)


def test_accumulated_gradients_equal_the_gradient_of_the_whole_batch(tiny):
  fields = {"train.batch_size": 8, "inner.warmup_steps": 0}
  whole = resolve(tiny, **fields)
  params_M, tokens = setup(whole)
  a, _, metrics_a = run_step(whole, params_M, tokens)
  parts = resolve(tiny, **{"train.accumulate": 3})  # A replica's 4 are parts of one.
  b, _, metrics_b = run_step(parts, params_M, tokens)
  np.testing.assert_allclose(metrics_a.loss, metrics_b.loss, rtol=1e-5)
  np.testing.assert_allclose(metrics_a.grad_norm, metrics_b.grad_norm, rtol=1e-4)
  # Adam's first step is the sign of the gradient: compare where it is not tiny.
  close = lambda x, y: np.testing.assert_allclose(x, y, atol=3e-4)
  jax.tree.map(close, a["blocks"]["ff"], b["blocks"]["ff"])


# A step is proportional to the gradient, unlike Adam's first.
SGD = {"inner.optimizer": "sgd", "inner.weight_decay": 0.0, "inner.warmup_steps": 0}


def test_microbatches_in_bfloat16_accumulate_in_float32(tiny):
  fields = {"train.batch_size": 128, "train.accumulate": 64, "inner.clip_norm": 0.0}
  c = resolve(tiny, **SGD, **fields, **{"model.param_dtype": "bfloat16"})
  params_M, tokens_MxBxL = setup(c)
  _, _, metrics = run_step(c, params_M, tokens_MxBxL)

  @jax.jit
  def gradient(params, tokens_BxL):
    loss = lambda params: decoder.losses(c.model, params, tokens_BxL)[0].mean()
    return jax.tree.map(jnp.float32, jax.grad(loss)(params))

  for m in range(2):
    params = jax.tree.map(lambda x, m=m: x[m], params_M)
    parts = jax.tree.map(
      lambda *x: np.stack(x), *(gradient(params, x[None]) for x in tokens_MxBxL[m])
    )
    mean = jax.tree.map(lambda x: np.asarray(x, np.float64).mean(axis=0), parts)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(mean)))
    # The mean is rounded once to bfloat16, whose rounding errors nearly cancel.
    np.testing.assert_allclose(metrics.grad_norm[m], norm, rtol=1e-3)


def test_the_step_follows_the_clipped_gradient_of_cross_entropy_and_z_loss(tiny):
  fields = {"inner.learning_rate": 0.5, "inner.clip_norm": 0.25, "model.z_loss": 0.03}
  c = resolve(tiny, **SGD, **fields)
  params_M, tokens_MxBxL = setup(c)
  stepped_M, _, metrics = run_step(c, params_M, tokens_MxBxL)

  def loss(params, tokens_BxL):
    nll_BxL, z2_BxL = decoder.losses(c.model, params, tokens_BxL)
    return nll_BxL.mean() + 0.03 * z2_BxL.mean()

  gradient = jax.jit(jax.grad(loss))
  for m in range(2):
    params = jax.tree.map(lambda x, m=m: x[m], params_M)
    grads = gradient(params, tokens_MxBxL[m])
    norm = np.sqrt(
      sum(np.sum(np.square(g, dtype=float)) for g in jax.tree.leaves(grads))
    )
    assert norm > 2 * 0.25  # The gradient is clipped.
    np.testing.assert_allclose(metrics.grad_norm[m], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics.update_norm[m], 0.5 * 0.25, rtol=1e-4)
    expected = jax.tree.map(lambda x, g: x - 0.5 * g * 0.25 / norm, params, grads)  # noqa: B023
    close = lambda x, y: np.testing.assert_allclose(x[m], y, rtol=1e-4, atol=1e-6)  # noqa: B023
    jax.tree.map(close, stepped_M, expected)


def lowered(c: Config) -> str:
  mesh = make_mesh(c)
  with jax.set_mesh(mesh):
    s = Method(c, make_streaming(c, mesh)).init()
    tokens = jnp.zeros((2, 2, 16), jnp.int32)
    step = inner_step.lower(s.params, s.opt_state, tokens, tuned(c), c=c)
    return step.as_text()


def test_runs_with_different_rates_and_decays_share_one_program(tiny):
  a = resolve(tiny, **{"inner.learning_rate": 0.01, "inner.weight_decay": 0.1})
  b = resolve(tiny, **{"inner.learning_rate": 0.02, "inner.weight_decay": 0.3})
  assert lowered(a) == lowered(b)
  assert lowered(a) != lowered(resolve(tiny, **{"inner.clip_norm": 0.5}))


def test_the_program_does_not_grow_with_depth(tiny):
  def lines(layers):
    return len(lowered(resolve(tiny, **{"model.num_layers": layers})).splitlines())

  assert lines(3) == lines(24)
