"""The library: Streaming DiLoCo for any pytree, against NumPy and the trainer."""

import dataclasses
import functools
import itertools
import json
import re
import runpy
import subprocess
import sys
import types

import cpu_devices
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import running
from conftest import first_of
from threads import free_port

import diloco
from diloco.algorithm.outer import outer_step
from diloco.algorithm.state import Event
from diloco.algorithm.streaming import make_streaming
from diloco.config import default_config, resolve
from diloco.contrib import error_feedback  # noqa: F401  Registers.
from diloco.library import arguments
from diloco.mesh.devices import make_mesh

M, STEPS = 2, 23


def tree(seed=0):
  """Parameters of one model, in dicts, lists and tuples."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return {"net": [{"w": draw(4, 6), "b": draw(6)}, (draw(6, 3), draw())], "z": draw(5)}


def moved(t, params_M):
  """An inner step: replicas move by different amounts."""
  rng = np.random.default_rng(t)
  move = lambda x: x - jnp.asarray(rng.normal(size=x.shape), x.dtype) / 8
  return jax.tree.map(move, params_M)


def train(method, params_M, start=0, state=None, last=STEPS):
  """Trains to the end; returns the state of each step, and the result."""
  state, states = state or method.init(params_M), {}
  for t in range(start + 1, last + 1):
    params_M, state, _ = method.step(t, moved(t, params_M), state)
    states[t] = jax.tree.map(np.asarray, (params_M, state))
  params_M, state, _ = method.drain(last, params_M, state)
  return states, jax.tree.map(np.asarray, (params_M, method.params(state)))


def assert_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    np.testing.assert_array_equal(x, y)


def by_hand(params_M, sync_every, fragment_of, tau, alpha, rate=0.5, mu=0.8):
  """Streaming DiLoCo with Nesterov momentum for a list of leaves, in float64."""
  inner = [np.asarray(x, np.float64) for x in params_M]
  outer, trace = [x[0] for x in inner], [np.zeros(x.shape[1:]) for x in inner]
  count, deltas = max(fragment_of) + 1, {}
  for t in range(1, STEPS + tau + 1):
    if t <= STEPS:
      rng = np.random.default_rng(t)
      inner = [x - rng.normal(size=x.shape) / 8 for x in inner]
    for i, p in enumerate(fragment_of):
      sent = t - p * sync_every // count
      if t <= STEPS and sent > 0 and sent % sync_every == 0:
        deltas[i, t] = outer[i] - inner[i].mean(axis=0)
      if (i, t - tau) in deltas:
        delta = deltas.pop((i, t - tau))
        trace[i] = delta + mu * trace[i]
        outer[i] = outer[i] - rate * (delta + mu * trace[i])
        inner[i] = alpha * inner[i] + (1 - alpha) * outer[i]
  return inner, outer


@pytest.mark.parametrize(("tau", "alpha"), [(0, 0.0), (0, 0.5), (1, 0.0), (2, 0.5)])
def test_any_tree_trains_as_in_numpy(tau, alpha):
  params_M = diloco.replicate(tree(), M)
  leaves, structure = jax.tree.flatten(params_M)
  numbers = {"net/0/b": 1, "net/0/w": 0, "net/1/0": 2, "net/1/1": 0, "z": 2}
  method = diloco.streaming(
    params_M,
    sync_every=6,
    fragments=numbers.get,
    tau=tau,
    alpha=alpha,
    outer=diloco.OuterConfig("sgd(momentum=0.8, nesterov=True)", 0.5),
  )
  _, (params_M, params) = train(method, params_M)
  expected = by_hand(leaves, 6, [*numbers.values()], tau, alpha)
  assert jax.tree.structure(params_M) == jax.tree.structure(params) == structure
  for found, wanted in zip((params_M, params), expected):
    for x, y in zip(jax.tree.leaves(found), wanted):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.integration("compiles the library and the trainer")
def test_stacked_layers_train_as_in_the_trainer(capsys):
  c = default_config()
  c.replicas, c.train.batch_size, c.train.steps, c.sync_every = M, 2 * M, STEPS, 8
  c.model.num_layers, c.fragments.size, c.wire.format = 5, 2, "e3m0"
  c.overlap.tau, c.overlap.alpha = 2, 0.25
  c.eval.batch_size = 1
  c = resolve(c)
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  one = {"blocks": {"v": draw(5, 6), "w": draw(5, 3, 4)}, "embed": {"t": draw(7, 4)}}
  sync = make_streaming(c, make_mesh(c, jax.devices()[:1]), jax.tree.map(np.shape, one))
  params_M = diloco.replicate(one, M)
  state = sync.init(params_M)
  for t in range(1, STEPS + 1):
    params_M, state, _ = outer_step(sync, t, moved(t, params_M), state)
  params_M, state, _ = sync.drain(STEPS, params_M, state)
  expected = jax.tree.map(np.asarray, (params_M, sync.params(state)))

  params_M = diloco.replicate(one, M)
  method = diloco.streaming(
    params_M,
    sync_every=8,
    fragments=diloco.Stacked("blocks", size=2),
    tau=2,
    alpha=0.25,
    wire="e3m0",
  )
  assert method.fragments[0] == ("blocks/v[0, 3]", "blocks/w[0, 3]")
  assert method.fragments[-1] == ("embed/t",)
  method.print_fragments()
  *_, last = capsys.readouterr().out.splitlines()
  assert last == f"fragment 3: {method.sync_bytes(3)} bytes, embed/t"
  assert [method.sync_bytes(p) for p in range(4)] == [
    sync.sync_bytes(p) for p in range(4)
  ]
  assert_equal(train(method, params_M)[1], expected)


def test_a_run_goes_on_from_any_step_bit_for_bit():
  start_M = diloco.replicate(tree(), M)
  wire = diloco.WireConfig("error_feedback(beta=0.9, of='random')", "e3m0", density=0.5)
  make = lambda seed=3: diloco.streaming(
    start_M,
    sync_every=6,
    fragments=lambda path: int(path == "z"),
    tau=2,
    wire=wire,
    outer=diloco.OuterConfig("adam"),
    seed=seed,
  )
  states, expected = train(make(), start_M)
  _, other = train(make(seed=4), start_M)  # Draws other values to send.
  pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(other), strict=True)
  assert any((x != y).any() for x, y in pairs)
  in_flight = 0
  for t in (1, 6, 7, 9, 10, 19):
    params_M, state = states[t]
    method = make()
    like = method.abstract_state(start_M, t)
    assert jax.tree.map(np.shape, like) == jax.tree.map(np.shape, state)
    in_flight += len(state.in_flight)
    put = lambda x, like: jax.device_put(x, like.sharding)
    state = jax.tree.map(put, state, like)
    params_M = jax.tree.map(jnp.asarray, params_M)
    assert_equal(train(method, params_M, t, state)[1], expected)
  assert in_flight > 3


def test_hosts_and_optax_change_nothing():
  found = []
  names = diloco.OuterConfig("sgd(momentum=0.5, nesterov=True)", 0.25)
  itself = optax.sgd(0.25, momentum=0.5, nesterov=True)
  for transport, outer in (("device", names), ("host", names), ("device", itself)):
    params_M = diloco.replicate(tree(), M)
    method = diloco.streaming(
      params_M, sync_every=5, tau=2, wire="e3m0", transport=transport, outer=outer
    )
    states, end = train(method, params_M)
    params_M, state = states[6]  # NumPy arrays, with a payload in flight.
    assert_equal(method.params(state), tree())  # Nothing has arrived yet.
    assert_equal(train(method, params_M, 6, state)[1], end)
    found.append(end)
    method.close()
  assert_equal(found[0], found[1])
  for x, y in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[2])):
    np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_a_state_takes_no_step_but_the_next():
  params_M = diloco.replicate({"w": jnp.ones(3)}, M)
  make = lambda tau: diloco.streaming(params_M, sync_every=6, tau=tau)
  method = make((1, 3))  # Sent after step 6, merged after steps 7 and 9.

  def refused(call, t, state, message):
    with pytest.raises(diloco.ConfigError, match=f"^{message}"):
      call(t, params_M, state)

  state, after = method.init(params_M), "but state is that after step"
  for t in (0, 2, 6):  # As with `if t % 6 == 0: method.step(...)`.
    refused(method.step, t, state, f"t is {t}, {after} 0; .* t is 1 here")
  for t in range(1, 7):
    params_M, state, _ = method.step(t, params_M, state)
  places = jax.tree.map(lambda x: x.sharding, method.abstract_state(params_M, 6))
  restored = jax.device_put(jax.tree.map(np.asarray, state), places)
  for at_6 in (state, restored):
    for t in (5, 6, 8):
      refused(method.step, t, at_6, f"t is {t}, {after} 6; .* t is 7 here")
    for t in (5, 7):
      refused(method.drain, t, at_6, f"last is {t}, {after} 6; .* last is 6 here")
    for t in (7.0, "7", None):
      refused(method.step, t, at_6, f"t is {t!r}; give a whole number")
    refused(make(0).step, 7, at_6, "state was made by a method with another")
    message = r"state was drained after step 0 \(0: never\), .* begins after step 6"
    refused(method.after_drain(6).step, 7, at_6, message)
  params_M, state, _ = method.drain(6, params_M, state)
  message = r"state was drained after step 6 .* use method.after_drain\(6\)"
  refused(method.step, 7, state, message)
  refused(method.drain, 6, state, message)
  method, kinds = method.after_drain(6), []
  like = method.abstract_state(params_M, 6)
  assert jax.tree.map(np.shape, like) == jax.tree.map(np.shape, state)
  for t in range(7, 14):
    params_M, state, events = method.step(t, params_M, state)
    kinds += [(e.kind, t) for e in events]
  assert kinds == [("send", 12), ("receive", 13)]


def test_a_state_takes_no_method_but_its_own():
  stack = {"blocks": {"w": jnp.arange(24.0).reshape(6, 4)}, "rest": jnp.ones(5)}
  params_M = diloco.replicate(stack, M)

  def make(pattern="strided", size=3, rest="last", **changed):
    layers = diloco.Stacked("blocks", size=size, pattern=pattern, rest=rest)
    given = {"sync_every": 6, "tau": (2, 4), "wire": "e3m0", "fragments": layers}
    return diloco.streaming(params_M, **given | changed)

  method = make()
  state, other = method.init(params_M), diloco.OuterConfig("adam")
  message = "state was made by a method with another"
  refused = functools.partial(pytest.raises, diloco.ConfigError, match=message)
  for t in range(1, 7):
    params_M, state, _ = method.step(t, params_M, state)
  layouts = [make("sequential"), make(size=2), make(rest="first"), make(outer=other)]
  later = [make(wire="e2m1"), make(tau=2), make(sync_every=7)]
  for changed in layouts + later:
    with refused():
      changed.step(7, params_M, state)
  for changed in layouts:
    with refused():
      changed.params(state)
  params_M, state, _ = method.drain(6, params_M, state)
  for changed in later:  # Nothing is in flight.
    copies_M, copy = jax.tree.map(jnp.copy, (params_M, state))
    changed.after_drain(6).step(7, copies_M, copy)
  with refused():
    layouts[0].after_drain(6).step(7, params_M, state)


SHAPES = [(), (1,), (7,), (3, 5), (1, 1, 3), (70_001,)]


def test_leaves_of_any_shape_and_type_are_coded():
  # Values of another leaf would differ by a fifth or more; five bits lose a 32nd.
  dtypes = itertools.cycle((jnp.float32, jnp.bfloat16))
  shapes = enumerate(zip(SHAPES, dtypes), start=1)
  leaves = {str(i): jnp.full((M, 4, *s), i, dtype) for i, (s, dtype) in shapes}
  first_M = {"layers": leaves, "rest": jnp.ones((M,))}
  grown = lambda x: jnp.stack([x[0] * 1.25, x[1] * 1.5])
  found = []
  for wire in ("fp32", "e3m4"):
    params_M = jax.tree.map(jnp.copy, first_M)
    how = diloco.Stacked("layers", size=4)
    method = diloco.streaming(params_M, sync_every=2, fragments=how, wire=wire)
    state = method.init(params_M)
    for t in range(1, 7):
      params_M = jax.tree.map(grown, params_M)
      params_M, state, _ = method.step(t, params_M, state)
    # Replicas are equal after a sync: the layers now, the rest after step 5.
    rest = grown(jnp.ones(M))
    for x in jax.tree.leaves({**params_M, "rest": params_M["rest"] / rest}):
      np.testing.assert_allclose(np.float32(x[0]), np.float32(x[1]), rtol=1e-6)
    found.append(params_M)
  plain, coded = found
  for x, y in zip(jax.tree.leaves(plain), jax.tree.leaves(coded)):
    np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=0.1)


def test_mistakes_are_named():
  good = diloco.replicate(tree(), M)
  bad = {**good, "count": jnp.zeros((M, 1), jnp.int32)}
  stack = {"layers": {"w": jnp.zeros((M, 3, 2)), "b": jnp.zeros((M, 4))}}
  alike = {"a/b": good["z"], "a": {"b": good["z"]}}
  psum = diloco.WireConfig(format="fp32", exchange="psum")
  axes = jax.make_mesh((1, 1), ("replica", "fsdp"))
  cases = [
    ({}, {}, "params_M has no leaves"),
    (tree()["net"][1], {}, r"params_M has leaves with first axes of \[0, 6\]"),
    ({"a": 1.0}, {}, r"the leaf a of params_M is 1\.0; give an array whose first axis"),
    (alike, {}, "params_M has 2 leaves with the path a/b; rename"),
    (good, {"fragments": lambda path: path == "z"}, r"fragments\('.*'\) is False; gi"),
    (good, {"fragments": lambda path: 10**18}, r"no leaf to fragment 0 of 0\.\.10{18}"),
    (stack, {"fragments": diloco.Stacked(None)}, "whose path is None; give the path"),
    (good, {"mesh": "cpu"}, "mesh is cpu; give one with the axes"),
    (bad, {}, "the leaf count of params_M has the type int32"),
    ({**good, "no": jnp.zeros((M, 0))}, {}, r"the leaf no of params_M has the shape"),
    (good, {"fragments": diloco.Stacked("layers")}, "there is no such leaf"),
    (stack, {"fragments": diloco.Stacked("layers")}, r"second axes are \[3, 4\]"),
    (good, {"sync_every": 2.5}, "sync_every is 2.5; give a whole number"),
    (good, {"tau": 1.5}, r"tau is 1\.5; give a whole number"),
    (good, {"fragments": 3}, "fragments is 3; give diloco.Stacked"),
    (good, {"wire": None}, "wire is None; give a number format"),
    (good, {"outer": "sgd"}, "outer is 'sgd'; give a diloco.OuterConfig"),
    (good, {"fragments": diloco.Stacked("net", pattern="x")}, "pattern is 'x'; choose"),
    (good, {"fragments": diloco.Stacked("net", rest="mid")}, "rest is 'mid'; choose"),
    (good, {"tau": 6}, "overlap.tau is 6, but sync_every is 6"),
    (good, {"tau": (1, 2, 3)}, r"tau is \(1, 2, 3\); give"),
    (good, {"transport": "pigeon"}, "transport is 'pigeon'; choose device or host"),
    (good, {"outer": diloco.OuterConfig(final_sync=True)}, "an argument of drain"),
    (good, {"outer": optax.lbfgs()}, "outer.optimizer cannot step these"),
    (good, {"wire": psum, "transport": "host"}, "wire.exchange is psum, where"),
    (good, {"mesh": jax.make_mesh((1,), ("data",))}, r"Mesh\('data': 1.* divides 2"),
    (good, {"mesh": axes}, "whose axes are not of type Auto; give one"),
  ]
  for params_M, given, message in cases:
    with pytest.raises(diloco.ConfigError, match=message):
      diloco.streaming(params_M, **{"sync_every": 6} | given)
  for params, replicas, message in (
    *((tree(), n, f"replicas is {n}; ") for n in (-1, 0, 2.5, True)),
    ({"w": jnp.sin}, M, "the leaf w of params is .*, which is no array; keep"),
  ):
    with pytest.raises(diloco.ConfigError, match=message):
      diloco.replicate(params, replicas)
  for sizes, message in (((0,), "replicas is 0"), ((2, 1.5), "mesh.fsdp is 1.5")):
    with pytest.raises(diloco.ConfigError, match=message):
      diloco.replica_mesh(*sizes)
  given = (
    (tree(), r"the shape of the leaf net/0/b of params_M is \(6,\), but \(2, 6\) in"),
    (diloco.replicate(tree(), 1), r"net/0/b of params_M is \(1, 6\), but \(2, 6\) in"),
    ({"net": good["net"]}, r"leaf z of params_M is None, but \(2, 5\) in"),
    (bad, r"leaf count of params_M is \(2, 1\), but None in"),
    ({**good, "net": tuple(good["net"])}, "the structure of params_M is PyTreeDef"),
  )
  method = diloco.streaming(good, sync_every=6)
  state = method.init(good)
  step = lambda params_M: method.step(1, params_M, state)
  drain = lambda params_M: method.drain(0, params_M, state)
  abstract = lambda params_M: method.abstract_state(params_M, 0)
  for params_M, message in given:
    for call in (method.init, step, drain, abstract):
      with pytest.raises(diloco.ConfigError, match=message):
        call(params_M)
  describe = functools.partial(method.abstract_state, good)
  for call in (describe, method.after_drain, method.sync_bytes):
    for number in (3.5, -1):
      with pytest.raises(diloco.ConfigError, match=f"is {number}; give a whole"):
        call(number)


def test_a_stack_is_cut_as_in_the_trainer_by_default():
  stack, c = diloco.Stacked("blocks"), default_config().fragments
  assert (stack.size, stack.pattern, stack.rest) == (c.size, c.pattern, c.embedding)


def test_parameters_train_on_the_device_on_which_they_lie():
  class Device:
    id, platform, process_index = 1, "cpu", 0

  there, other = Device(), Device()
  lies_on = lambda *devices: types.SimpleNamespace(
    sharding=types.SimpleNamespace(device_set={*devices})
  )
  assert arguments.mesh_under([lies_on(there)]).devices.tolist() == [[there]]
  with pytest.raises(diloco.ConfigError, match="lies on 2 devices, but not on a mesh"):
    arguments.mesh_under([lies_on(there, other)])


def test_a_wire_without_a_format_sends_e3m0():
  params_M = diloco.replicate(tree(), M)
  for wire in (diloco.WireConfig(), diloco.WireConfig("topk")):
    method = diloco.streaming(params_M, sync_every=6, wire=wire)
    assert method.sync.wire == dataclasses.replace(wire, format="e3m0")


def test_numbers_may_be_of_any_kind():
  params_M = diloco.replicate(tree(), np.int64(M))
  number = lambda path: np.int64(path == "z")
  assert len(diloco.streaming(params_M, sync_every=6, fragments=number).fragments) == 2
  for tau in (2, np.int64(2), np.asarray([2] * M)):
    method = diloco.streaming(params_M, sync_every=6, tau=tau)
    assert method.sync.schedule.taus == (2,) * M


@pytest.mark.integration("trains the examples")
@pytest.mark.parametrize("name", ["plain_jax", "nnx_model", "equinox_model"])
def test_the_examples_train(name, capsys):
  runpy.run_path(str(running.ROOT / f"examples/{name}.py"))
  assert float(capsys.readouterr().out.split("loss ")[1].split(",")[0].split()[0]) < 0.3


@pytest.mark.integration("trains an example three times")
def test_the_example_that_is_stopped_ends_as_one_that_is_not(
  tmp_path, monkeypatch, capsys
):
  ends = []
  for folder, last in (("cut", "63"), ("cut", "120"), ("whole", "120")):
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / folder), last])
    runpy.run_path(str(running.ROOT / "examples/save_and_resume.py"))
    ends.append(capsys.readouterr().out)
  assert ends[1].startswith("steps 61 to 120")
  assert ends[1].partition("loss")[2] == ends[2].partition("loss")[2]


@pytest.mark.parametrize("transport", first_of("two processes", "device", "host"))
def test_two_processes_train_together(transport):
  words = ("2", f"localhost:{free_port()}", transport)
  how = {"env": running.environment(XLA_FLAGS=""), "stdout": subprocess.PIPE}
  script = running.ROOT / "examples/two_processes.py"
  started = [running.start(script, str(i), *words, **how) for i in range(2)]
  lines = [process.communicate(timeout=300)[0] for process in started]
  losses = [line.split("loss ")[1].split()[0] for line in lines]
  assert losses[0] == losses[1]  # Of the same outer parameters.
  assert float(losses[0]) < 0.5


def test_public_names_exist():
  for name in diloco.__all__:
    assert getattr(diloco, name).__doc__
  assert set(diloco.__all__) <= set(dir(diloco))
  with pytest.raises(AttributeError, match="no attribute 'torch'"):
    diloco.torch()


def test_the_page_says_what_is_there(tmp_path):
  page = (running.ROOT / "docs/library.md").read_text()
  blocks = re.findall(r"```(?:python|diff)\n(.*?)```", page, re.S)
  code, saving, counting, patch = blocks
  params, M, T, batch_M = tree(), 2, 12, 1
  code = code.replace("fragments=...", "fragments=lambda path: 0").replace("30", "6")
  step = lambda params_M, opt_state_M, t: (moved(t, params_M), opt_state_M)
  names = {"diloco": diloco, "train_step": step, "params": params, "M": M, "T": T}
  names |= {"batch_M": batch_M, "opt_state_M": None}
  exec(code, names)
  assert jax.tree.map(np.shape, names["params"]) == jax.tree.map(np.shape, params)
  names |= {"params_M": diloco.replicate(params, M), "t": 0, "ocp": ocp}
  names |= {"opt_state_M": {"count": np.arange(M)}, "folder": tmp_path}
  names["state"] = names["method"].init(names["params_M"])
  before = jax.tree.map(np.asarray, (names["params_M"], names["state"]))
  exec(saving, names)
  after = names["params_M"], names["state"]
  jax.tree.map(np.testing.assert_array_equal, after, before)
  ledger = diloco.Ledger()
  names |= {"ledger": ledger, "json": json, "dataclasses": dataclasses}
  names["events"] = [Event("send", 0, 6, 70, {}), Event("receive", 0, 7, 0, {})]
  exec(counting, names)
  assert (ledger.total, ledger.syncs) == (70, 1)
  changed = [x for x in patch.splitlines() if re.match(r"[+-](?![+-])\s*\S", x)]
  assert len(changed) <= 25
  assert {*re.findall(r"diloco\.(\w+)", patch)} <= {*diloco.__all__}


MANY_FRAGMENTS = """
import diloco, jax, jax.numpy as jnp
mesh = diloco.replica_mesh(2)
params_M = diloco.replicate({"blocks": {"w": jnp.ones((24, 256, 256))}}, 2, mesh)
layers = diloco.Stacked("blocks", size=1)
method = diloco.streaming(params_M, sync_every=100, fragments=layers, mesh=mesh)
state = method.init(params_M)
params_M, state, events = method.drain(0, params_M, state, final_sync=True)
jax.block_until_ready(params_M)
print(len(events))
"""


@pytest.mark.integration("a process with two CPU devices")
def test_a_final_sync_of_many_fragments_ends():
  """With all launches at once, the collectives of two CPU devices hang."""
  assert cpu_devices.run(2, "-c", MANY_FRAGMENTS) == 2 * 24
