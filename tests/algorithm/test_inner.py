"""The inner step: schedule, AdamW by hand, clipping per replica, accumulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco import config as config_lib
from diloco.algorithm import inner, state
from diloco.model import decoder as model_lib
from diloco.run import mesh as run_mesh


def resolve(c, **fields):
  c.update_from_flattened_dict(fields)
  return config_lib.resolve(c)


def test_schedule_warms_up_and_ends_at_five_per_cent(tiny):
  c = resolve(
    tiny, **{"train.steps": 1000, "inner.warmup_steps": 100, "inner.learning_rate": 0.1}
  )
  rate = inner.learning_rate(c)
  assert rate(0) == 0
  assert rate(50) == pytest.approx(0.05)
  assert rate(100) == pytest.approx(0.1)
  assert rate(550) == pytest.approx(0.1 * (0.05 + 0.95 / 2))
  assert rate(1000) == pytest.approx(0.005)


@pytest.mark.parametrize(("scaling", "factor"), [("schedule", 1.0), ("rate", 0.02)])
def test_adamw_by_hand(tiny, scaling, factor):
  c = resolve(
    tiny,
    **{
      "inner.weight_decay_scaling": scaling,
      "inner.learning_rate": 0.02,
      "inner.warmup_steps": 0,
      "inner.clip_norm": 0.0,
      "train.steps": 10,
    },
  )
  assert c.inner.weight_decay == 1 / 10
  optimizer, rate = inner.make_optimizer(c), inner.learning_rate(c)
  rng = np.random.default_rng(0)
  x = rng.normal(size=4)
  mine, opt_state = jnp.float32(x), optimizer.init(jnp.float32(x))
  m, v = np.zeros(4), np.zeros(4)
  for t in range(1, 6):
    g = rng.normal(size=4)
    updates, opt_state = optimizer.update(jnp.float32(g), opt_state, mine)
    mine = mine + updates
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    adam = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
    relative = float(rate(t - 1)) / 0.02
    # Decoupled: lambda times the schedule relative to its peak, or times the rate.
    x = x - relative * 0.02 * adam - relative * factor * (1 / 10) * x
    np.testing.assert_allclose(mine, x, rtol=1e-5)


def run_step(c, params_M, tokens_MxBxL):
  optimizer = inner.make_optimizer(c)
  with jax.set_mesh(run_mesh.make_mesh(c)):
    copied = jax.tree.map(jnp.copy, params_M)
    opt_state = jax.vmap(optimizer.init)(copied)
    step = inner.make_inner_step(c)
    return step(copied, opt_state, tokens_MxBxL, None)


def setup(c, seed=0):
  dims = model_lib.ModelDims.from_config(c)
  keys = jax.random.split(jax.random.key(seed), config_lib.trained_replicas(c))
  params_M = jax.vmap(lambda k: model_lib.init_params(dims, k))(keys)
  shape = (len(keys), c.train.batch_size // len(keys), c.model.seq_len)
  return params_M, jax.random.randint(jax.random.key(1), shape, 4, 2048)


def test_accumulated_gradients_are_those_of_the_whole_batch(tiny):
  fields = {"train.batch_size": 8, "inner.warmup_steps": 0}
  whole = resolve(tiny, **fields)
  params_M, tokens = setup(whole)
  a, _, metrics_a = run_step(whole, params_M, tokens)
  parts = resolve(tiny, **{"train.accumulate": 4})
  b, _, metrics_b = run_step(parts, params_M, tokens)
  np.testing.assert_allclose(metrics_a.loss, metrics_b.loss, rtol=1e-5)
  np.testing.assert_allclose(metrics_a.grad_norm, metrics_b.grad_norm, rtol=1e-4)
  # Adam's first step is the sign of the gradient: compare where it is not tiny.
  close = lambda x, y: np.testing.assert_allclose(x, y, atol=3e-4)
  jax.tree.map(close, a["blocks"]["ff"], b["blocks"]["ff"])


def test_each_replica_is_clipped_and_stepped_by_itself(tiny):
  c = resolve(tiny, **{"inner.warmup_steps": 0})
  params_M, tokens = setup(c)
  # Replica 1 alone, as the only replica of another run, takes the same step.
  both, _, metrics = run_step(c, params_M, tokens)
  one = resolve(tiny, **{"replicas": 1, "train.batch_size": c.train.batch_size // 2})
  alone, _, metrics_1 = run_step(
    one, jax.tree.map(lambda x: x[1:], params_M), tokens[1:]
  )
  np.testing.assert_allclose(metrics.loss[1], metrics_1.loss[0], rtol=1e-6)
  np.testing.assert_allclose(metrics.grad_norm[1], metrics_1.grad_norm[0], rtol=1e-5)
  assert float(metrics.grad_norm[0]) != float(metrics.grad_norm[1])
  close = lambda x, y: np.testing.assert_allclose(x[1], y[0], atol=2e-5)
  jax.tree.map(close, both["blocks"]["ff"], alone["blocks"]["ff"])


def lowered(c, values=None) -> str:
  mesh = run_mesh.make_mesh(c)
  with jax.set_mesh(mesh):
    s = state.init_state(c, mesh, inner.make_optimizer(c), None)
    tokens = jnp.zeros((2, 2, 16), jnp.int32)
    step = inner.make_inner_step(c)
    return step.lower(s.params, s.opt_state, tokens, None, values).as_text()


def test_runs_of_other_rates_and_decays_share_a_program(tiny):
  a = resolve(tiny, **{"inner.learning_rate": 0.01, "inner.weight_decay": 0.1})
  b = resolve(tiny, **{"inner.learning_rate": 0.02, "inner.weight_decay": 0.3})
  assert lowered(a, inner.tuned(a)) == lowered(b, inner.tuned(b))
  assert lowered(a) != lowered(b)


def test_the_program_does_not_grow_with_depth(tiny):
  def lines(layers):
    return len(lowered(resolve(tiny, **{"model.num_layers": layers})).splitlines())

  assert lines(3) == lines(24)
