"""Pier's warm start: against float64 NumPy, and against data-parallel."""

import dataclasses
import functools

import cpu_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import diloco
from diloco.algorithm.inner import mean_of_all
from diloco.config import add_plugins, changed, resolve
from diloco.contrib import warm_start
from diloco.log import metrics
from diloco.mesh.devices import make_mesh
from diloco.spec.plugins import OuterStep
from diloco.spec.schedule import Schedule
from diloco.train import train
from diloco.wire.ledger import gradient_bytes

M, H, STEPS, RATE, MOMENTUM = 2, 6, 27, 0.5, 0.8
FRAGMENTS = {"a": 0, "b": 1, "c": 0}


def increments(t, warm):
  """What step t adds to each parameter of each replica; equal in the warm start."""
  rng = np.random.default_rng(t)
  add = {name: rng.normal(size=(M, 3, 2)) for name in FRAGMENTS}
  return {name: x[:1].repeat(M, 0) if t <= warm else x for name, x in add.items()}


def by_hand(start, warm, tau, accumulates):
  """Algorithm 2 with Nesterov momentum after a warm start; one tensor after another."""
  found = {}
  for name, p in FRAGMENTS.items():
    inner, outer = [start[name].astype(float)] * M, start[name].astype(float)
    trace, deltas = 0, {}
    for t in range(1, STEPS + tau + 1):
      if t <= STEPS:
        add = increments(t, warm)[name]
        inner = [x + add[m] for m, x in enumerate(inner)]
      since = t - p * H // 2
      delta = outer - sum(inner) / M
      if t <= STEPS and since > 0 and since % H == 0:
        if t > warm:
          deltas[t] = delta
        else:
          if accumulates:
            trace = delta + MOMENTUM * trace
          outer = inner[0]
      if t - tau in deltas:
        delta = deltas.pop(t - tau)
        trace = delta + MOMENTUM * trace
        outer = outer - RATE * (delta + MOMENTUM * trace)
        inner = [outer] * M
    found[name] = outer, inner[0]
  return found


@pytest.mark.parametrize(
  ("warm", "tau", "accumulates"),
  # One warm start is longer than the run, whose drain passes step 30.
  [(13, 2, False), (16, 1, True), (4, 0, True), (40, 4, True)],
)
def test_fragments_follow_and_momentum_grows_as_in_numpy(warm, tau, accumulates):
  start = {name: np.float32(x[0]) for name, x in increments(0, 0).items()}
  params_M = diloco.replicate(start, M)
  method = diloco.streaming(
    params_M,
    sync_every=H,
    fragments=FRAGMENTS.get,
    tau=tau,
    outer=diloco.OuterConfig(f"sgd(momentum={MOMENTUM}, nesterov=True)", RATE),
  )
  # The library refuses a warm start, whose gradients it cannot average.
  schedule = dataclasses.replace(method.sync.schedule, joint_steps=warm)
  step = functools.partial(warm_start.outer_step, momentum=accumulates)
  fields = {"schedule": schedule, "outer_step": OuterStep(step)}
  sync = dataclasses.replace(method.sync, **fields)
  method = dataclasses.replace(method, sync=sync)
  state, kinds = method.init(params_M), {}
  for t in range(1, STEPS + 1):
    add = increments(t, warm)
    params_M = {name: x + jnp.float32(add[name]) for name, x in params_M.items()}
    params_M, state, events = method.step(t, params_M, state)
    kinds |= {(e.step, e.fragment): e.kind for e in events if e.kind != "receive"}
    assert not state.in_flight or t > warm
  params_M, state, _ = method.drain(STEPS, params_M, state)
  assert all((kind == "send") == (t > warm) for (t, _), kind in kinds.items())
  expected = by_hand(start, warm, tau, accumulates)
  params = method.params(state)
  for name, (outer, inner) in expected.items():
    np.testing.assert_allclose(params[name], outer, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(params_M[name][0], inner, rtol=1e-5, atol=1e-5)


@given(
  fragments=st.integers(1, 5),
  sync_every=st.integers(1, 12),
  warm=st.integers(0, 40),
  steps=st.integers(1, 60),
)
def test_a_due_fragment_follows_and_is_sent_later(fragments, sync_every, warm, steps):
  cold = Schedule(fragments, sync_every, (0,))
  schedule = Schedule(fragments, sync_every, (0,), joint_steps=warm)
  sends = {p: [] for p in range(fragments)}
  for t in range(1, steps + 1):
    follows, sent = schedule.follows(t), schedule.sends(t)
    assert (sent if t > warm else follows) == cold.sends(t)
    assert not (follows if t > warm else sent)
    assert schedule.is_busy(t) == bool(follows or sent)
    for p in sent:
      sends[p].append(t)
  for p, found in sends.items():
    assert schedule.num_sends(p, steps) == len(found)
    assert not found or found[0] == schedule.first_send(p)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_replica_gets_the_mean_gradient(tiny, dtype):
  tiny.inner.gradient_dtype = dtype
  c, rng = resolve(tiny), np.random.default_rng(0)
  grads_M = {"a": rng.normal(size=(M, 5)), "b": rng.normal(size=(M, 2, 3))}
  grads_M = jax.tree.map(jnp.float32, grads_M)
  with jax.set_mesh(make_mesh(c, jax.devices()[:1])):
    found = jax.jit(functools.partial(mean_of_all, c))(grads_M)
  for name, x_M in grads_M.items():
    mean = np.asarray(x_M, float).mean(axis=0, keepdims=True).repeat(M, axis=0)
    rounded = jnp.asarray(mean, jnp.float32).astype(dtype).astype("float32")
    np.testing.assert_allclose(found[name], rounded, rtol=1e-6)
    assert found[name].dtype == "float32"


@pytest.mark.slow("whole runs")
def test_a_run_begins_as_data_parallel_and_counts_its_bytes(tiny, tmp_path):
  add_plugins(tiny, "warm_start")
  tiny.warm_start.steps, tiny.train.steps, tiny.sync_every = 9, 16, 4
  tiny.train.batch_size, tiny.train.accumulate, tiny.inner.clip_norm = 8, 2, 0.5
  c = resolve(tiny)
  one = changed(c, {"algorithm": "data_parallel"})
  summary = train(c, tmp_path / "warm")
  train(one, tmp_path / "one")
  warm, cold = (metrics.read(tmp_path / name) for name in ("warm", "one"))
  for mine, other in zip(warm[:9], cold[:9]):
    for name in ("loss", "grad_norm"):
      np.testing.assert_allclose(mine[name], other[name], rtol=1e-4)
    assert mine["bytes_sent"] == other["bytes_sent"] == mine["step"] * gradient_bytes(c)
  sends = sum(r["bytes"] for r in metrics.read(tmp_path / "warm", "send"))
  assert summary["bytes_sent_per_replica"] == 9 * gradient_bytes(c) + sends
  assert summary["peak_bytes_per_sync"] == gradient_bytes(c)
  # The four fragments are due in turn, the first after sync_every steps.
  follows = [r["step"] for r in metrics.read(tmp_path / "warm", "warm_start")]
  assert follows == [*range(4, 10)]


@pytest.mark.slow("compiles for several devices")
def test_the_layout_changes_no_loss_and_the_gradients_cross_once():
  script = """
import json, jax, multidevice
from diloco.aot.programs import Programs
from diloco.spec.shapes import num_params
fields = {"warm_start.steps": 4, "inner.warmup_steps": 0, "wire.format": "fp32"}
fields |= {"inner.optimizer": "sgd", "inner.weight_decay": 0.0}
c = multidevice.make_config(**fields)
crossing = {}
for n in (2, 4):
  mesh = multidevice.make_mesh(c, jax.devices()[:n])
  found = Programs(c, mesh).compile("joint step").crossing
  crossing[n] = found / (4 * num_params(c.model))
print(json.dumps([[multidevice.losses(n, **fields) for n in (1, 2, 4)], crossing]))
"""
  losses, crossing = cpu_devices.run(8, "-c", script)
  for other in losses[1:]:
    np.testing.assert_allclose(other, losses[0], rtol=2e-5)
  for share in crossing.values():
    assert 1 <= share < 1.001
