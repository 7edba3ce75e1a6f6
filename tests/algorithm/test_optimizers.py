"""Optimizers by name: AdamW by hand, what is refused, how their state is sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from test_inner import resolve

from diloco.algorithm import optimizers
from diloco.algorithm.method import make_method
from diloco.errors import ConfigError
from diloco.evaluate.evaluation import Evaluation
from diloco.interop import load
from diloco.mesh.devices import make_mesh
from diloco.spec.fields import OuterConfig
from diloco.train import train
from diloco.util.command import load_module

METHODS = load_module("methods", "get_config", "methods").METHODS
BY_HAND = {"inner.learning_rate": 0.02, "inner.warmup_steps": 0}
BY_HAND |= {"inner.clip_norm": 0.0, "train.steps": 10}


def test_schedule_warms_up_and_ends_at_five_per_cent(tiny):
  tiny.train.steps, tiny.inner.warmup_steps = 1000, 100
  c = resolve(tiny, **{"inner.learning_rate": 0.1})
  rate = optimizers.learning_rate(c)
  assert rate(0) == 0
  assert rate(50) == pytest.approx(0.05)
  assert rate(100) == pytest.approx(0.1)
  assert rate(550) == pytest.approx(0.1 * (0.05 + 0.95 / 2))
  assert rate(1000) == pytest.approx(0.005)


@pytest.mark.parametrize(("scaling", "factor"), [("schedule", 1.0), ("rate", 0.02)])
def test_adamw_by_hand(tiny, scaling, factor):
  c = resolve(tiny, **BY_HAND, **{"inner.weight_decay_scaling": scaling})
  assert c.inner.weight_decay == 1 / 10
  optimizer, rate = optimizers.make_inner(c), optimizers.learning_rate(c)
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


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("nope", r"is 'nope', but optax has no optimizer nope with a learning_rate"),
    ("clip", r"has no optimizer clip with a learning_rate"),
    ("adam(", r"is 'adam\('; write a name, alone or with keyword"),
    ("adam(0.9)", "write a name, alone or with keyword"),
    ("adam(b1=x)", "write a name, alone or with keyword"),
    ("adam(momentum=0.9)", "takes no argument momentum here; choose among b1, b2"),
    ("adam(learning_rate=1.0)", "adam takes no argument learning_rate here"),
    ("dpsgd(noise_multiplier=1)", "which optax refuses"),
    ("sgd(momentum=-0.1)", r"whose momentum is -0\.1; give a number"),
    ("sgd(nesterov=True)", "without momentum optax ignores nesterov; give momentum"),
    ("sgd(momentum=0.9, momentum=0.5)", "keyword arguments, each once, for example"),
    ("sgd(momentum=True)", "whose momentum is True; give a number"),
    ("adam(b2=1)", "whose b2 is 1; give a number of at least 0 and below 1"),
    ("adam(eps=1e400)", r"which has the number inf; give at most 3\.4e"),
    (f"adam(eps={'-' * 99_999}1)", "write a name, alone or with keyword arguments"),
    ("sgd(momentum='0.9')", "whose momentum is '0.9'; give a number"),
  ],
)
def test_an_unknown_outer_optimizer_is_refused(text, message):
  with pytest.raises(ConfigError, match=f"outer.optimizer .*{message}"):
    optimizers.make_outer(OuterConfig(optimizer=text))


def test_weight_decay_is_refused_for_an_optimizer_without_it(tiny):
  message = "which takes no weight decay, but inner.weight_decay is not 0; set it to 0"
  c = resolve(tiny, **{"inner.optimizer": "adam"})
  with pytest.raises(ConfigError, match=f"inner.optimizer is 'adam', {message}"):
    optimizers.make_inner(c)
  c = resolve(tiny, **{"inner.optimizer": "madgrad"})
  with pytest.raises(ConfigError, match=r"decay is not decoupled, .* is not 0; set it"):
    optimizers.make_inner(c)
  optimizers.make_inner(resolve(tiny, **{"inner.weight_decay": 0.0}))


@pytest.mark.parametrize("name", ["adamw", "lion", "nadamw"])
def test_parameters_decay_only_if_the_config_says_so(tiny, name):
  theta = {"w": jnp.ones(3)}

  def update(optimizer):
    return optimizer.update({"w": jnp.zeros(3)}, optimizer.init(theta), theta)[0]["w"]

  outer = lambda text: optimizers.make_outer(OuterConfig(text, learning_rate=0.5))
  np.testing.assert_array_equal(update(outer(name)), 0)
  decayed = update(outer(f"{name}(weight_decay=0.1)"))
  np.testing.assert_allclose(decayed, -0.05, rtol=1e-6)
  fields = {"inner.weight_decay": 0.0, "inner.warmup_steps": 0}
  inner = optimizers.make_inner(resolve(tiny, **{"inner.optimizer": name, **fields}))
  np.testing.assert_array_equal(update(inner), 0)


@pytest.mark.parametrize(
  "text",
  [
    "adafactor(min_dim_size_to_factor=2)",
    "fromage",
    "galore(rank=2)",
    "lamb",
    "lars",
    "novograd",
    "sm3",
  ],
)
def test_a_layer_is_a_tensor_of_its_own(text):
  optimizer = optimizers.make_outer(OuterConfig(text))
  draw = np.random.default_rng(0).normal
  scales = np.array([1, 10, 100])[:, None, None]
  x_N, g_N = (jnp.float32(scales * draw(size=(3, 8, 8))) for _ in range(2))

  def step(tree, x, g):
    return optimizer.update(tree(g), optimizer.init(tree(x)), tree(x))[0]

  stacked = step(lambda x: {"blocks": {"w": x}}, x_N, g_N)["blocks"]["w"]
  alone = step(lambda x: {"embed": dict(enumerate(x))}, x_N, g_N)["embed"].values()
  np.testing.assert_allclose(stacked, jnp.stack([*alone]), rtol=1e-4, atol=1e-6)


def newton_schulz(x):
  """Five iterations towards the nearest orthogonal matrix (Jordan, 2024)."""
  x = x / (np.linalg.norm(x) + 1e-8)
  if x.shape[0] > x.shape[1]:
    return newton_schulz(x.T).T
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
  return x


def nesterov(m, g, b, t):
  """Momentum of the next step, with optax's corrections of the start."""
  return b * m / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)


def test_muon_by_hand(tiny):
  """A matrix of each layer has Muon, everything else Adam; all of it decays."""
  text = METHODS["muon"]["inner.optimizer"]
  c = resolve(tiny, **BY_HAND, **{"inner.optimizer": text})
  optimizer, rate = optimizers.make_inner(c), optimizers.learning_rate(c)
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape)
  x = {
    "blocks": {"up": draw(3, 4, 8), "out": draw(3, 8, 4)},
    "embed": {"e": draw(8, 4)},
  }
  mine = jax.tree.map(jnp.float32, x)
  opt_state = optimizer.init(mine)
  m, v = (jax.tree.map(np.zeros_like, x) for _ in range(2))
  for t in range(1, 5):
    g = jax.tree.map(lambda x: draw(*x.shape), x)
    updates, opt_state = optimizer.update(jax.tree.map(jnp.float32, g), opt_state, mine)
    mine = optax.apply_updates(mine, updates)
    lr, decay = float(rate(t - 1)), float(rate(t - 1)) / 0.02 / 10
    for name, x_N in x["blocks"].items():
      g_N = g["blocks"][name]
      m["blocks"][name] = 0.95 * m["blocks"][name] + 0.05 * g_N
      toward_N = nesterov(m["blocks"][name], g_N, 0.95, t)
      step_N = 0.2 * 8**0.5 * np.stack([newton_schulz(a) for a in toward_N])
      x["blocks"][name] = x_N - lr * step_N - decay * x_N
    e, g_e = x["embed"]["e"], g["embed"]["e"]
    m["embed"]["e"] = 0.9 * m["embed"]["e"] + 0.1 * g_e
    v["embed"]["e"] = 0.99 * v["embed"]["e"] + 0.01 * g_e**2
    root = np.sqrt(v["embed"]["e"] / (1 - 0.99**t)) + 1e-8
    x["embed"]["e"] = e - lr * nesterov(m["embed"]["e"], g_e, 0.9, t) / root - decay * e
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4), mine, x)


def test_schedule_free_is_judged_by_its_average(caplog):
  rng = np.random.default_rng(1)
  x = z = y = rng.normal(size=(1, 3, 4))  # Leads with an axis, as in data-parallel.
  optimizer = optax.contrib.schedule_free_adamw(0.1, b1=0.7, b2=0.95)
  mine_M = {"a": jnp.float32(y)}
  state_M, v = jax.vmap(optimizer.init)(mine_M), 0
  for t in range(1, 10):
    g = np.asarray(mine_M["a"], float) ** 3
    updates_M, state_M = jax.vmap(optimizer.update)(
      {"a": jnp.float32(g)}, state_M, mine_M
    )
    mine_M = optax.apply_updates(mine_M, updates_M)
    v = 0.95 * v + 0.05 * (y**3) ** 2
    z = z - 0.1 * y**3 / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    x = (1 - 1 / t) * x + z / t
    y = 0.7 * x + 0.3 * z
  found_M = optimizers.judged(mine_M, state_M)
  np.testing.assert_allclose(mine_M["a"], y, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(found_M["a"], x, rtol=1e-4, atol=1e-4)
  with jax.log_compiles(), caplog.at_level("WARNING"):
    optimizers.judged(mine_M, state_M)
  assert not caplog.records  # It was compiled before.
  assert optimizers.judged(mine_M, optax.adamw(0.1).init(mine_M)) is mine_M


@pytest.mark.parametrize("name", ["schedule_free_adamw", "schedule_free_sgd"])
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


@pytest.mark.integration("a whole run")
def test_a_run_and_its_checkpoint_are_judged_by_the_average(tiny, tmp_path):
  tiny.algorithm, tiny.inner.optimizer = "data_parallel", "schedule_free_adamw"
  losses = train(resolve(tiny), tmp_path)["eval_loss"]
  assert abs(losses["outer"] - losses["first"]) > 1e-3
  model = load.load(tmp_path)
  with jax.set_mesh(model.mesh):
    found = Evaluation(model.config, model.mesh).loss(model.params).loss
  np.testing.assert_allclose(found, losses["outer"], rtol=1e-5)


SHAPES = {
  "blocks": {"w": (3, 256, 128), "norm": {"scale": (3, 256)}},
  "embed": {"tokens": (512, 256)},
}


def placed(text: str, fsdp: int = 4, lead: tuple = ()):
  """(state, its shardings) of an outer optimizer on an abstract mesh."""
  mesh = jax.sharding.AbstractMesh(
    (1, fsdp), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2
  )
  shape = lambda s: jax.ShapeDtypeStruct(s, jnp.float32)
  params = jax.tree.map(shape, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
  optimizer = optimizers.make_outer(OuterConfig(optimizer=text))
  places = optimizers.state_shardings("outer.optimizer", optimizer, params, mesh, lead)
  return jax.eval_shape(optimizer.init, params), places


@pytest.mark.parametrize("lead", [(), ("replica",)])
@pytest.mark.parametrize(
  "text", ["adam", "sgd(momentum=0.9)", "adan", "muon", "lion", "adamw", "yogi"]
)
def test_state_shaped_like_a_parameter_is_sharded_like_it(text, lead):
  state, places = placed(text, lead=lead)
  for x, at in zip(jax.tree.leaves(state), jax.tree.leaves(places)):
    if x.shape in ((3, 256, 128), (3, 256)):
      assert at.spec == jax.sharding.PartitionSpec(*lead, None, "fsdp")
    elif x.shape == (512, 256):
      assert at.spec == jax.sharding.PartitionSpec(*lead, "fsdp")
    else:  # Counts and constants.
      assert x.size <= 3
      assert at.spec == jax.sharding.PartitionSpec(*lead)


def test_moments_that_optax_does_not_map_to_parameters_are_sharded_too():
  state, places = placed("sm3")
  pairs = zip(jax.tree.leaves(state), jax.tree.leaves(places))
  moments = [at for x, at in pairs if x.shape == (3, 256, 128)]
  assert moments
  assert all("fsdp" in at.spec for at in moments)


def test_the_limit_of_unsharded_state_is_a_share_of_one_device():
  # Adafactor keeps 1920 sums whole, of 230,144 parameters: a tenth of a device's share
  # is 2877 values on 8 devices, and 1438 on 16.
  factored = "adafactor(min_dim_size_to_factor=16)"
  state, places = placed(factored, fsdp=8)
  assert jax.tree.structure(state) == jax.tree.structure(places)
  message = (
    r"outer.optimizer keeps [\d,]+ bytes of state on every device, which mesh.fsdp = 16"
    " cannot shard"
  )
  with pytest.raises(ConfigError, match=message):
    placed(factored, fsdp=16)


def test_an_optimizer_that_needs_more_than_gradients_is_refused():
  with pytest.raises(ConfigError, match=r"outer.optimizer cannot step these"):
    placed("momo")
