"""GPA against float64 NumPy, against Schedule-Free, and in runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.algorithm.method import make_method
from diloco.algorithm.optimizers import judged, make_inner
from diloco.config import resolve
from diloco.contrib.gpa import gpa
from diloco.errors import ConfigError
from diloco.evaluate.evaluation import Evaluation
from diloco.interop import load
from diloco.mesh.devices import make_mesh
from diloco.train import train

STEPS, B2, EPS = 9, 0.95, 1e-8
MATRIX = np.random.default_rng(0).normal(size=(4, 4))


def gradient(y):
  """Of a quadratic function, so that it depends on the point."""
  return y @ MATRIX @ MATRIX.T


def by_hand(start, rates, mu_y, weights, b1, decay):
  """x, y and z after all steps; `weights` are those of z in x."""
  x = y = z = start
  m = v = 0
  for t, (rate, weight) in enumerate(zip(rates, weights), start=1):
    g = gradient(y)
    m, v = b1 * m + (1 - b1) * g, B2 * v + (1 - B2) * g**2
    step = m / (1 - b1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
    z = z - rate * (step + decay * z)
    x = (1 - weight) * x + weight * z
    y = mu_y * x + (1 - mu_y) * z
  return x, y, z


def trained(optimizer, start):
  """One model that leads with an axis, as in data-parallel."""
  y = {"a": jnp.asarray(start, jnp.float32)[None]}
  state = jax.vmap(optimizer.init)(y)
  for _ in range(STEPS):
    grads = {"a": jnp.asarray(gradient(np.asarray(y["a"], float)), jnp.float32)}
    updates, state = jax.vmap(optimizer.update)(grads, state, y)
    y = optax.apply_updates(y, updates)
  return y, state


@pytest.mark.parametrize(
  ("mu_y", "mu_x", "decay"), [(0.7, 0.9, 0.0), (0.9, 0.5, 0.3), (1.0, 0.9, 0.1)]
)
def test_three_sequences_equal_those_in_numpy(mu_y, mu_x, decay):
  start = np.random.default_rng(1).normal(size=(3, 4))
  rates = np.linspace(0.2, 0.02, STEPS)
  schedule = lambda t: jnp.asarray(rates)[t]
  fields = {"train_interp_coeff": mu_y, "eval_interp_coeff": mu_x}
  optimizer = gpa(schedule, 0.8, B2, EPS, weight_decay=decay, **fields)
  y, state = trained(optax.chain(optax.identity(), optimizer), start)
  want = by_hand(start, rates, mu_y, [1 - mu_x] * STEPS, 0.8, decay)
  found = judged(y, state), y, {"a": state[1].z["a"]}
  for tree, expected in zip(found, want):
    np.testing.assert_allclose(tree["a"][0], expected, rtol=1e-4, atol=1e-5)


def test_schedule_free_differs_by_its_weights_and_momentum_only():
  start = np.random.default_rng(1).normal(size=(3, 4))
  optimizer = optax.contrib.schedule_free_adamw(0.1, b1=0.7, b2=B2, eps=EPS)
  y, state = trained(optimizer, start)
  weights = [1 / t for t in range(1, STEPS + 1)]
  want = by_hand(start, [0.1] * STEPS, 0.7, weights, 0.0, 0.0)
  for tree, expected in zip((judged(y, state), y), want):
    np.testing.assert_allclose(tree["a"][0], expected, rtol=1e-4, atol=1e-4)


def test_the_average_compiles_once(caplog):
  y, state = trained(gpa(0.1), np.ones((2, 4)))
  judged(y, state)
  with jax.log_compiles(), caplog.at_level("WARNING"):
    judged(y, state)
  assert not caplog.records


def test_without_an_average_the_parameters_are_judged():
  y, state = trained(optax.adamw(0.1), np.ones((2, 4)))
  assert judged(y, state) is y


@pytest.mark.parametrize("name", ["gpa", "schedule_free_adamw", "schedule_free_sgd"])
def test_an_average_needs_one_float32_model(tiny, name):
  tiny.inner.optimizer = name
  message = f"inner.optimizer is {name}, .* is streaming and .*; choose data_parallel"
  made = lambda c: make_method(c, make_mesh(c))
  with pytest.raises(ConfigError, match=message):
    made(resolve(tiny))
  tiny.algorithm = "data_parallel"
  made(resolve(tiny))
  tiny.model.param_dtype = "bfloat16"
  with pytest.raises(ConfigError, match="param_dtype bfloat16; choose"):
    made(resolve(tiny))


def test_coefficients_lie_in_range(tiny):
  tiny.algorithm, tiny.inner.optimizer = "data_parallel", "gpa(train_interp_coeff=0.0)"
  with pytest.raises(ConfigError, match=r"train_interp_coeff is 0\.0"):
    make_inner(resolve(tiny))


@pytest.mark.integration("whole runs")
@pytest.mark.parametrize("name", ["gpa(eval_interp_coeff=0.9)", "schedule_free_adamw"])
def test_a_run_and_its_checkpoint_are_judged_by_the_average(tiny, tmp_path, name):
  tiny.algorithm, tiny.inner.optimizer = "data_parallel", name
  c = resolve(tiny)
  losses = train(c, tmp_path)["eval_loss"]
  assert abs(losses["outer"] - losses["first"]) > 1e-3
  model = load.load(tmp_path)
  with jax.set_mesh(model.mesh):
    found = Evaluation(model.config, model.mesh).loss(model.params).loss
  np.testing.assert_allclose(found, losses["outer"], rtol=1e-5)
