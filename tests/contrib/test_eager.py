"""Eager updates against float64 NumPy: every replica with an outer state of its own."""

from types import SimpleNamespace

import conftest
import cpu_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import diloco
from diloco.algorithm.make import make_plan
from diloco.config import add_plugins, changed, default_config, resolve
from diloco.contrib.eager import Eager
from diloco.errors import ConfigError
from diloco.library.streaming import Streaming
from diloco.mesh.devices import make_mesh

M, LAYERS, H, STEPS = 3, 4, 4, 18
SHAPES = {"blocks": {"w": (LAYERS, 2, 3)}, "embed": {"t": (5, 3)}}


def draw(seed):
  rng = np.random.default_rng(seed)
  is_shape = lambda x: isinstance(x, tuple)
  return jax.tree.map(lambda s: rng.normal(size=s), SHAPES, is_leaf=is_shape)


def by_hand(start, fragments, mu, rate, compress, beta):
  """The update of arXiv 2502.12996 with Nesterov momentum, literally.

  A replica's own gradient is what its codes decode to. With error feedback, the codes
  are those of its outer gradient plus beta times what its earlier codes lost.
  """
  inner = [ref.split(start) for _ in range(M)]
  outer, trace = [ref.split(start) for _ in range(M)], [{} for _ in range(M)]
  late, lost = {}, [dict.fromkeys(outer[0], 0) for _ in range(M)]

  def sent(m, key):
    wanted = outer[m][key] - inner[m][key] + beta * lost[m][key]
    decoded = compress(wanted)
    lost[m][key] = wanted - decoded
    return decoded

  def step(keys, grads):
    for m in range(M):
      for key in keys:
        g = grads[m][key]
        trace[m][key] = g + mu * trace[m].get(key, 0)
        outer[m][key] = outer[m][key] - rate * (g + mu * trace[m][key])
        inner[m][key] = outer[m][key]

  mean = lambda deltas, key: sum(d[key] for d in deltas) / M
  for t in range(1, STEPS + 1):
    for m in range(M):
      add = ref.split(draw((t, m)))
      inner[m] = {key: x + add[key] for key, x in inner[m].items()}
    for p in ref.sent_at(t, len(fragments), H):
      keys = ref.keys_of(fragments[p], inner[0])
      now = [{key: sent(m, key) for key in keys} for m in range(M)]
      before = late.get(p, [dict.fromkeys(keys, 0)] * M)
      step(
        keys,
        [
          {key: mean(before, key) + (new[key] - old[key]) / M for key in keys}
          for new, old in zip(now, before)
        ],
      )
      late[p] = now
  in_flight = [x.copy() for x in outer]
  for p, last in late.items():
    keys = ref.keys_of(fragments[p], inner[0])
    step(keys, [{key: mean(last, key) - d[key] / M for key in keys} for d in last])
  return in_flight, outer, inner


def config(**fields):
  c = default_config()
  c.replicas, c.train.batch_size, c.sync_every = M, M, H
  c.train.steps, c.eval.batch_size = STEPS, 1
  c.model.num_layers, c.fragments.size = LAYERS, 2
  add_plugins(c, "eager", "error_feedback")
  c.eager.on, c.wire.format = True, "fp32"
  c.outer.optimizer = "sgd(momentum=0.7, nesterov=True)"
  conftest.update(c, fields)
  return resolve(c)


def method_of(c):
  mesh = make_mesh(c, jax.devices()[:1])
  same = lambda tree: tree  # The trainer's models have the names of the outer step.
  return Streaming(make_plan(c, mesh, SHAPES), SimpleNamespace(split=same, join=same))


def train(method, start=0, params_M=None, state=None):
  """Trains to the end; returns the states after each step and after the drain."""
  first = jax.tree.map(jnp.float32, draw(0))
  params_M = params_M or diloco.replicate(first, M)
  state, states, kinds = state or method.init(params_M), {}, []
  for t in range(start + 1, STEPS + 1):
    adds = [draw((t, m)) for m in range(M)]
    add = lambda x_M, *parts: x_M + jnp.asarray(np.stack(parts), jnp.float32)
    params_M = jax.tree.map(add, params_M, *adds)
    params_M, state, events = method.step(t, params_M, state)
    kinds += [(e.kind, t, e.fragment) for e in events]
    states[t] = jax.tree.map(np.asarray, (params_M, state))
  params_M, state, events = method.drain(STEPS, params_M, state)
  assert not state.in_flight
  assert {e.kind for e in events} == {"receive"}
  return states, kinds, params_M, state


@pytest.mark.parametrize(
  ("algorithm", "wire", "beta"),
  [("streaming", "e3m0", 0.0), ("diloco", "fp32", 0.0), ("streaming", "e3m0", 0.75)],
)
def test_every_replica_steps_along_the_mixture(algorithm, wire, beta):
  fields = {"wire.format": wire, "wire.block_size": -1}
  if beta:
    fields["wire.compressor"] = f"error_feedback(beta={beta}, of='quantize')"
  c = config(algorithm=algorithm, **fields)
  assert c.overlap.taus == (H,) * M
  method = method_of(c)
  states, kinds, params_M, state = train(method)
  pattern = "whole" if algorithm == "diloco" else "strided"
  fragments = ref.make_fragments(LAYERS, 2, pattern)

  def compress(x):
    if wire == "fp32":
      return x
    return ref.block_quantise(x.ravel(), x.shape[-1]).reshape(x.shape)

  start = jax.tree.map(lambda x: np.float32(x).astype(float), draw(0))
  before, outer, inner = by_hand(start, fragments, 0.7, 0.4, compress, beta)
  sends = [
    (t, p) for t in range(1, STEPS + 1) for p in ref.sent_at(t, len(fragments), H)
  ]
  assert [x[1:] for x in kinds if x[0] == "send"] == sends
  assert [x[1:] for x in kinds if x[0] == "receive"] == sends
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
  for found, expected in ((states[STEPS][1], before), (state, outer)):
    mean = {key: sum(x[key] for x in expected) / M for key in expected[0]}
    jax.tree.map(near, method.params(jax.tree.map(jnp.asarray, found)), ref.join(mean))
  for m in range(M):
    jax.tree.map(near, jax.tree.map(lambda x, m=m: x[m], params_M), ref.join(inner[m]))


def test_without_momentum_all_replicas_end_with_the_mean_of_every_sync():
  c = config(**{"outer.optimizer": "sgd", "outer.learning_rate": 1.0})
  method = method_of(c)
  _, _, _params_M, state = train(method)
  for x in jax.tree.leaves(state.theta):
    np.testing.assert_allclose(x, np.broadcast_to(x[:1], x.shape), atol=1e-5)
  fragments = ref.make_fragments(LAYERS, 2, "strided")
  want = ref.split(draw(0))
  for p, fragment in enumerate(fragments):
    last = max(t for t in range(STEPS + 1) if p in ref.sent_at(t, len(fragments), H))
    for key in ref.keys_of(fragment, want):
      for t in range(1, last + 1):
        want[key] = want[key] + sum(ref.split(draw((t, m)))[key] for m in range(M)) / M
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
  jax.tree.map(near, method.params(state), ref.join(want))


@pytest.mark.slow("trains six times")
def test_a_run_goes_on_from_any_step_bit_for_bit():
  fields = {"wire.compressor": "error_feedback(beta=0.9, of='random')"}
  c = config(algorithm="diloco", **fields)
  states, _, params_M, state = train(method_of(c))
  for t in (3, 6):
    method = method_of(c)
    old_M, old = jax.tree.map(jnp.asarray, states[t])
    like = method.abstract_state(old_M, t)
    assert jax.tree.map(np.shape, like) == jax.tree.map(np.shape, old)
    _, _, *found = train(method, t, old_M, old)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves((params_M, state))):
      np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("overlap.transport", "host"),
    ("outer.average", "radial"),
    ("outer.offload", True),
    ("outer.final_sync", True),
    ("warm_start.steps", 4),
  ],
)
def test_what_does_not_fit_is_refused(field, value):
  with pytest.raises(
    ConfigError, match=f"eager.on is True, .*but {field} is {value}; choose"
  ):
    config(**{field: value})


def test_sums_on_devices_do_not_fit():
  with pytest.raises(ConfigError, match=r"psum, .* eager.on is True; choose f"):
    changed(config(), {"wire.exchange": "psum"})


def test_a_single_replica_is_refused():
  with pytest.raises(ConfigError, match=r"eager\.on is True, but replicas is 1, and"):
    config(replicas=1)


def test_data_parallel_ignores_it():
  c = config(algorithm="data_parallel")
  assert c.overlap.taus == (0,) * M
  assert not c.own_outer
  assert config(algorithm="data_parallel", replicas=1).of(Eager).on  # Not refused.


@pytest.mark.slow("compiles for several devices")
def test_replicas_on_several_devices_exchange_payloads_only():
  script = """
import json, jax, multidevice
from diloco.algorithm import overlap
from diloco.algorithm.method import make_method
from diloco.aot.programs import Programs
fields = {"eager.on": True, "wire.format": "fp32", "sync_every": 4}
fields |= {"inner.optimizer": "sgd", "inner.weight_decay": 0.0, "mesh.replica": 0}
c = multidevice.make_config(**fields)
found = {"losses": [], "hidden": [], "crossing": []}
for n in (1, 2, 4):
  mesh = multidevice.make_mesh(c, jax.devices()[:n])
  losses, hidden = [], 0
  with jax.set_mesh(mesh):
    method = make_method(c, mesh)
    s = method.init()
    for steps in multidevice.conftest.spans(method.plan, 0, 11, ()):
      hidden += overlap.overlap_steps(method.plan, steps[0] - 1) > 0
      tokens = [multidevice.tokens_of(c, mesh, t) for t in steps]
      s, metrics = method.inner(steps, s, tokens)
      _, s, _ = method.outer(steps[-1], s)
      losses += [m.loss.tolist() for m in metrics]
    s, _ = method.drain(11, s)
    whole = method.params(s)
    losses.append([float(abs(x).sum()) for x in jax.tree.leaves(whole)][:2])
    if n > 1:
      programs = Programs(c, mesh)
      crossing = {name: programs.compile(name).crossing for name in ("send", "update")}
      found["crossing"] += crossing.values()
  found["losses"].append(losses)
  found["hidden"].append(hidden)
print(json.dumps(found))
"""
  found = cpu_devices.run(8, "-c", script)
  for other in found["losses"][1:]:
    for x, y in zip(other, found["losses"][0]):
      np.testing.assert_allclose(x, y, rtol=5e-5)
  assert found["hidden"][0] == 0 < found["hidden"][1] == found["hidden"][2]
  # Norms for the log cross; they are a few numbers.
  assert all(x < 100 for x in found["crossing"])
