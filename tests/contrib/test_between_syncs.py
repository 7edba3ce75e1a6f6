"""DES-LOC and SPARTA against float64 NumPy, and in whole runs of the trainer."""

import json

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plugins  # noqa: F401  Registers `bigram`.
import pytest
import reference as ref

from diloco import train
from diloco.algorithm.method import Method
from diloco.algorithm.optimizers import make_inner
from diloco.algorithm.outer import outer_step
from diloco.algorithm.state import TrainState
from diloco.algorithm.streaming import make_streaming
from diloco.config import add_plugins, default_config, resolve
from diloco.contrib import des_loc, sparta
from diloco.errors import ConfigError
from diloco.log import metrics, read_run
from diloco.mesh.devices import make_mesh
from diloco.spec.shapes import num_params
from diloco.together import training as together

M, STEPS, H = 3, 13, 2
RNG = np.random.default_rng
ONE = {
  "blocks": {"v": RNG(0).normal(size=(5, 6)), "w": RNG(1).normal(size=(5, 3, 4))},
  "embed": {"t": RNG(2).normal(size=(7, 4))},
}


# Fragments of two layers and of the embedding, received two steps after they were sent.
STREAMING = {"algorithm": "streaming", "sync_every": 4, "fragments.size": 2}
STREAMING |= {"overlap.tau": 2, "overlap.alpha": 0.25, "wire.format": "fp32"}


def make_config(**fields):
  """DES-LOC of its paper: a plain mean of the parameters every H steps."""
  c = default_config()
  c.algorithm, c.replicas, c.sync_every = "diloco", M, H
  c.train.batch_size, c.train.steps, c.eval.batch_size = M, STEPS, 1
  c.outer.optimizer, c.outer.learning_rate = "sgd", 1.0
  c.inner.warmup_steps, c.inner.weight_decay, c.inner.clip_norm = 0, 0.0, 0.0
  c.inner.optimizer, c.inner.learning_rate = "adam(b1=0.8, b2=0.9)", 0.1
  c.model.num_layers = 5
  conftest.update(c, fields)
  return resolve(c)


def gradients(t):
  """Gradients of all replicas at step t, leaves (M, ...)."""
  draw = lambda x: RNG([t, x.size]).normal(size=(M, *x.shape)).astype(np.float32)
  return jax.tree.map(draw, ONE)


def sync_of(c):
  return make_streaming(c, make_mesh(c, jax.devices()[:1]), jax.tree.map(np.shape, ONE))


def by_package(c):
  """Trains with the optimizers, averages and outer steps of the trainer."""
  sync = sync_of(c)
  inner, sent = make_inner(c), dict[str, list[int]]()
  inner_step = jax.jit(jax.vmap(inner.update))
  params = jax.tree.map(
    lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (M, *x.shape)), ONE
  )
  state = TrainState(params, jax.vmap(inner.init)(params), sync.init(params))
  with jax.set_mesh(sync.mesh):
    for t in range(1, STEPS + 1):
      updates, opt_state = inner_step(gradients(t), state.opt_state, state.params)
      params = optax.apply_updates(state.params, updates)
      state = TrainState(params, opt_state, state.outer)
      state, events = Method(c, sync).average(t, state)
      for event in events:
        assert (event.kind, event.step, event.metrics) == ("average", t, {})
        sent.setdefault(event.fragment, []).append(event.sent)
      params, outer, _ = outer_step(sync, t, state.params, state.outer)
      state = TrainState(params, state.opt_state, outer)
    params, outer, _ = sync.drain(STEPS, state.params, state.outer)
  return jax.tree.leaves(params), jax.tree.leaves(sync.params(outer)), sent


def by_hand(c, masks=None):
  """The same in float64: local Adam, whose states are averaged at their own periods.

  The inner rate falls along a cosine from 0.1 to 0.005. Every fragment is sent, arrives
  tau steps later, and steps the outer parameters with rate 1.

  Args:
    masks: which values SPARTA averages after each step, {t: leaves (...) of bool}.
  """
  x_M = [np.stack([x] * M).astype(np.float64) for x in jax.tree.leaves(ONE)]
  u_M, v_M = [0 * x for x in x_M], [0 * x for x in x_M]
  outer, sent = [x[0].copy() for x in x_M], {}
  mean = lambda a: np.broadcast_to(a.mean(axis=0), a.shape).copy()
  own = c.of(des_loc.DesLoc)

  def average(i, a, positive=False):
    """The mean of a moment of leaf i, or a step to the mean of its 4-bit codes."""
    if own.format == "fp32":
      return mean(a)
    layers = 5 if i < 2 else 1  # Each layer of a block is coded separately.
    parts = a.reshape(M * layers, -1)
    coded = np.stack([ref.block_quantise(x, 4) for x in parts]).reshape(a.shape)
    least = np.minimum(a, mean(coded)) if positive else -np.inf
    return np.maximum(a + mean(coded) - coded, least)

  parts = ref.make_fragments(5, c.fragments.size, c.fragments.pattern)
  # The layers or the whole of each leaf that belongs to a fragment.
  places = [
    [*((i, [*layers]) for i in (0, 1)), *[(2, ...)] * rest] for layers, rest in parts
  ]
  tau, alpha = c.overlap.tau, c.overlap.alpha
  for t in range(1, STEPS + tau + 1):
    for i, g in enumerate(jax.tree.leaves(gradients(t)) if t <= STEPS else []):
      u_M[i] = 0.8 * u_M[i] + 0.2 * g
      v_M[i] = 0.9 * v_M[i] + 0.1 * g.astype(np.float64) ** 2
      hat = (u_M[i] / (1 - 0.8**t)) / (np.sqrt(v_M[i] / (1 - 0.9**t)) + 1e-8)
      rate = 0.005 + 0.095 * (1 + np.cos(np.pi * (t - 1) / STEPS)) / 2
      x_M[i] = x_M[i] - rate * hat
      if masks:
        x_M[i] = np.where(masks[t][i], mean(x_M[i]), x_M[i])
      if own.first_every and t % own.first_every == 0:
        u_M[i] = average(i, u_M[i])
      if own.second_every and t % own.second_every == 0:
        v_M[i] = average(i, v_M[i], positive=True)
    for p in ref.sent_at(t, len(parts), c.sync_every) if t <= STEPS else []:
      sent[p, t] = [outer[i][at] - x_M[i][:, at].mean(axis=0) for i, at in places[p]]
    for p in range(len(parts)):
      for (i, at), delta in zip(places[p], sent.pop((p, t - tau), [])):
        outer[i][at] -= delta
        x_M[i][:, at] = alpha * x_M[i][:, at] + (1 - alpha) * outer[i][at]
  assert not sent
  return x_M, outer


def assert_by_hand(c, masks=None):
  """Compares replicas and outer parameters with `by_hand`; returns the bytes sent."""
  params_M, outer, sent = by_package(c)
  for found, want in zip((params_M, outer), by_hand(c, masks)):
    for x, y in zip(found, want, strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
  return sent


@pytest.mark.parametrize(
  ("first", "second", "fields"), [(1, 0, {}), (0, 5, {}), (3, 5, STREAMING)]
)
def test_des_loc_is_adam_with_states_averaged_at_own_periods(first, second, fields):
  own = {"des_loc.first_every": first, "des_loc.second_every": second}
  c = make_config(**own, **fields)
  sent = assert_by_hand(c)
  # A ring of 3 sends 2 x 2/3 of float32; both moments have a value per parameter.
  one = 4 * 4 * sum(x.size for x in jax.tree.leaves(ONE)) // 3
  periods = {"first_moments": first, "second_moments": second}
  assert sent == {kind: [one] * (STEPS // n) for kind, n in periods.items() if n}


@pytest.mark.parametrize(("every", "fields"), [(3, {"sync_every": 4}), (2, STREAMING)])
def test_sparta_averages_drawn_values_before_the_outer_step(every, fields, monkeypatch):
  """The masks come from the values that really change; their draw is tested below."""
  c = make_config(**{"sparta.share": 0.2, "sparta.every": every, **fields})
  masks = {
    t: [np.zeros(x.shape, bool) for x in jax.tree.leaves(ONE)] for t in range(99)
  }
  steps, average = [], sparta.average

  def watched(params_M, key, **static):
    steps.append(len(steps) * every + every)
    old = jax.tree.map(np.array, params_M)
    new = average(params_M, key, **static)
    changed = jax.tree.map(lambda a, b: (a != np.asarray(b)).any(axis=0), old, new)
    masks[steps[-1]] = jax.tree.leaves(changed)
    return new

  monkeypatch.setattr(sparta, "average", watched)
  sent = assert_by_hand(c, masks)  # `by_package` fills the masks.
  # 20% of the layers' 6 and 12 values and of the 28 of the embedding, rounded up.
  drawn = 5 * 2 + 5 * 3 + 6
  counts = [sum(mask.sum() for mask in masks[t]) for t in steps]
  # Adam's first step has the same length everywhere, so some values are equal already.
  assert 0 < counts[0] <= drawn
  assert counts[1:] == [drawn] * (STEPS // every - 1)
  assert not np.array_equal(masks[steps[0]][1], masks[steps[1]][1])
  assert sent == {"sparta": [round(4 / 3 * 4 * drawn)] * len(steps)}


@pytest.mark.parametrize("fields", [{}, STREAMING])
def test_moments_in_four_bits_move_to_the_mean_of_their_codes(fields):
  own = {"des_loc.first_every": 3, "des_loc.second_every": 5, "des_loc.format": "e3m0"}
  c = make_config(**own, **fields, **{"wire.block_size": 4})
  sent = assert_by_hand(c)
  # Each layer of 6 and 12 values and the embedding of 28: codes, and a scale for four.
  one = 5 * (3 + 2) + 5 * (6 + 3) + 14 + 7
  times = {"first_moments": STEPS // 3, "second_moments": STEPS // 5}
  # M = 3: each replica gathers the codes of two others.
  assert sent == {kind: [2 * one] * n for kind, n in times.items()}


def test_a_coded_mean_keeps_the_mean_of_the_replicas_and_brings_them_together():
  c = make_config(**{"des_loc.first_every": 1, "des_loc.format": "e3m0"})
  sync = sync_of(c)
  wire = c.of(des_loc.DesLoc).wire(sync.wire)
  to_mean = lambda x: des_loc.coded_mean(x, wire=wire, mesh=sync.mesh, positive=False)
  old = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), gradients(0))
  new = to_mean(jax.tree.map(jnp.asarray, old))
  apart = lambda x: np.square(np.float64(x) - np.float64(x).mean(axis=0)).sum()
  for x, y in zip(jax.tree.leaves(old), map(np.asarray, jax.tree.leaves(new))):
    assert y.dtype == jnp.bfloat16
    means = (np.float64(a).mean(axis=0) for a in (y, x))
    np.testing.assert_allclose(*means, atol=2**-7)
    # Nearest codes of E3M0 are at most a third away: a ninth of the squares is left.
    assert apart(y) < apart(x) / 4
  same = jax.tree.map(lambda x: jnp.stack([jnp.float32(x)] * M), ONE)
  want = jax.tree.map(np.asarray, same)
  for x, y in zip(jax.tree.leaves(to_mean(same)), jax.tree.leaves(want)):
    np.testing.assert_allclose(x, y, rtol=1e-6)


def test_a_warm_start_averages_nothing_because_its_replicas_are_equal():
  fields = {"sparta.share": 0.1, "des_loc.first_every": 2, "des_loc.second_every": 4}
  c = make_config(**fields, **{"warm_start.steps": 4})
  sync = sync_of(c)
  method, state = Method(c, sync), TrainState(ONE, ONE, None)
  assert all(method.average(t, state) == (state, []) for t in (1, 4))
  assert c.averages_after(5) == ["sparta"]
  assert c.averages_after(8) == ["first_moments", "second_moments", "sparta"]


def test_sparta_of_all_values_is_their_mean_in_any_dtype():
  c = make_config()
  sync = sync_of(c)
  old = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), gradients(0))
  want = [np.asarray(x, np.float64).mean(axis=0) for x in jax.tree.leaves(old)]
  found = sparta.average(old, jax.random.key(0), share=1.0, mesh=sync.mesh)
  for x_M, mean in zip(jax.tree.leaves(found), want, strict=True):
    assert x_M.dtype == jnp.bfloat16
    assert (x_M == x_M[:1]).all()
    np.testing.assert_allclose(np.asarray(x_M[0], np.float64), mean, rtol=2**-8)


@pytest.mark.parametrize(("n", "s", "k"), [(3, 20, 6), (2, 7, 7)])
def test_a_draw_gives_different_values_and_in_time_all(n, s, k):
  keys = jax.random.split(jax.random.key(0), 300)
  drawn = np.asarray(jax.vmap(lambda key: sparta.draw(key, n, s, k))(keys))
  assert drawn.shape == (300, n, k)
  assert (np.diff(drawn, axis=-1) > 0).all()
  assert drawn.min() >= 0
  counts = np.stack([np.bincount(drawn[:, i].ravel(), minlength=s) for i in range(n)])
  assert counts.shape == (n, s)
  # Each value is drawn with the probability 1 / ceil(s / k) or 1 / floor(s / k).
  low, high = 300 / -(-s // k), 300 / (s // k)
  assert (counts > low - 5 * np.sqrt(low)).all()
  assert (counts < high + 5 * np.sqrt(high)).all()
  assert (drawn[:, 0] != drawn[:, -1]).any() == (k < s)  # Layers differ.


@pytest.mark.parametrize(
  ("optimizer", "first", "second"),
  [
    ("adamw", 1, 1),
    ("amsgrad", 1, 2),
    ("sgd(momentum=0.9)", 1, 0),
    ("rmsprop", 0, 1),
    ("adan", 1, 1),  # And moments of differences, and the last gradient.
  ],
)
def test_moments_are_known_by_their_names(tiny, optimizer, first, second):
  tiny.inner.optimizer, tiny.inner.weight_decay = optimizer, 0.0
  n = num_params(resolve(tiny).model)
  assert values_of_moments(tiny) == (first * n, second * n)


def values_of_moments(config):
  """Counts the values of the first and second moments in one replica."""
  c = resolve(config)
  sync = make_streaming(c, make_mesh(c, jax.devices()[:1]))
  state = Method(c, sync).abstract().opt_state
  leaves, found = jax.tree.leaves(state), {des_loc.FIRST: 0, des_loc.SECOND: 0}
  for kind, places in des_loc.moments(sync.parameters, state):
    sizes = [np.prod(leaves[i].shape[1:], dtype=int) for i in jax.tree.leaves(places)]
    found[kind] += sum(sizes)
  return tuple(found.values())


def test_muon_has_a_second_moment_of_few_parameters(tiny):
  tiny.inner.optimizer = "muon"
  m = resolve(tiny).model
  n, matrices = num_params(m), 12 * m.num_layers * m.dim**2
  assert values_of_moments(tiny) == (n, n - matrices)


def test_moments_that_do_not_exist_are_refused_before_training(tiny, tmp_path):
  conftest.update(tiny, {"des_loc.second_every": 4, "des_loc.format": "int4"})
  with pytest.raises(ConfigError, match=r"des_loc\.format is 'int4'"):
    resolve(tiny)
  tiny.inner.optimizer, tiny.des_loc.format = "lion", "fp32"
  said = (
    "des_loc.second_every is 4, but inner.optimizer is 'lion', which keeps no second"
  )
  with pytest.raises(ConfigError, match=said):
    train.train(tiny, tmp_path / "run")
  assert not (tmp_path / "run").exists()
  (tmp_path / "runs").mkdir()
  with pytest.raises(ConfigError, match=said):
    together.train([together.Member(resolve(tiny), tmp_path / "runs")])


@pytest.mark.integration("whole runs")
def test_a_run_counts_its_averages_and_resumes_exactly(tiny, tmp_path):
  tiny.model.name = "bigram"  # A small model compiles quickly.
  add_plugins(tiny, "sparta", "des_loc")
  tiny.sparta.share, tiny.des_loc.first_every = 0.01, 6
  tiny.des_loc.second_every, tiny.overlap.tau, tiny.checkpoint.keep = 12, 2, 3
  c, whole, again = resolve(tiny), tmp_path / "whole", tmp_path / "again"
  summary = train.train(tiny, whole)
  found, n = conftest.arrays_of(whole), num_params(c.model)
  # Step 12 averages both moments; M = 2 sends each float32 value once.
  moments = {name: x for name, x in found.items() if "mu" in name or "nu" in name}
  assert sum(x.size for x in moments.values()) == 2 * 2 * n
  assert all((x[0] == x[1]).all() for x in moments.values())
  values = sparta.count(0.01, make_streaming(c, make_mesh(c)).parameters)
  assert 0.01 * n < values < 0.02 * n  # Small tensors send one value at least.
  assert summary["averages"] == {
    "sparta": {"times": 12, "bytes": 12 * 4 * values},
    "first_moments": {"times": 2, "bytes": 2 * 4 * n},
    "second_moments": {"times": 1, "bytes": 4 * n},
  }
  synced = sum(f["bytes"] for f in summary["fragments"].values())
  assert summary["bytes_sent_per_replica"] == synced + 4 * (12 * values + 3 * n)
  steps = metrics.read(whole)
  assert [r["bytes_sent"] for r in steps[:3]] == [4 * values * t for t in (1, 2, 3)]
  conftest.rewind(whole, again, 5)
  resumed = train.train(tiny, again)
  conftest.assert_same_end(again, whole)
  peak = summary["peak_bytes_per_sync"]
  assert read_run.read(whole, "run").peak == peak == max(r["peak_bytes"] for r in steps)
  for field in ("eval_loss", "averages", "bytes_sent_per_replica"):
    assert resumed[field] == json.loads((whole / "summary.json").read_text())[field]
