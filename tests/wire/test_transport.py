"""The two ways from send to update: same results, and what waits for what."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco import config as config_lib
from diloco.algorithm import outer as outer_lib
from diloco.algorithm import sync as sync_lib
from diloco.model import sharding as mesh_lib
from diloco.run import mesh as run_mesh
from diloco.wire import transport as transport_lib

STEPS = 11


def make(tiny, transport: str, **fields):
  tiny.overlap.tau, tiny.overlap.alpha = 3, 0.25
  tiny.overlap.transport = transport
  tiny.update_from_flattened_dict(fields)
  c = config_lib.resolve(tiny)
  mesh = run_mesh.make_mesh(c, jax.devices()[:1])
  return c, mesh, outer_lib.make_outer(c, mesh)


def walk(c, mesh, outer, steps: int = STEPS):
  """A run whose inner steps are random increments: (replicas, outer, events)."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(0.1 * rng.standard_normal(shape), jnp.float32)
  layers, replicas = c.model.num_layers, c.replicas
  tree = lambda *lead: {
    "blocks": {"w": draw(*lead, layers, 6, 5)},
    "embed": {"tokens": draw(*lead, 7, 4)},
  }
  with jax.set_mesh(mesh):
    start = tree()
    params_M = jax.tree.map(lambda x: jnp.stack([x] * replicas), start)
    params_M = jax.device_put(params_M, mesh_lib.shardings(params_M, mesh, True))
    state, events = outer.init(params_M), []
    for t in range(1, steps + 1):
      params_M = jax.tree.map(jnp.add, params_M, tree(replicas))
      params_M, state, more = sync_lib.outer_step(outer, t, params_M, state)
      events += more
    params_M, state, more = sync_lib.drain(outer, steps, params_M, state)
    theta = outer_lib.assemble(outer, state, start)
  return jax.device_get(params_M), jax.device_get(theta), events + more


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_hosts_compute_what_devices_compute_bit_for_bit(tiny, optimizer):
  fields = {"outer.optimizer": optimizer}
  device = walk(*make(tiny, "device", **fields))
  host = walk(*make(tiny, "host", **fields))
  assert_same(device[:2], host[:2])
  described = lambda events: [(e.kind, e.step, e.fragment) for e in events]
  assert described(device[2]) == described(host[2])


def test_a_late_exchange_is_awaited_and_merged_at_its_step(tiny, monkeypatch):
  expected = walk(*make(tiny, "host"))
  c, mesh, outer = make(tiny, "host")
  send, finish = outer.transport._transmit_codes, outer.transport.finish
  awaited, threads = threading.Semaphore(0), set()

  def late(payload):
    threads.add(threading.current_thread())
    awaited.acquire()
    return send(payload)

  def ask(*args):
    threading.Timer(0.2, awaited.release).start()
    return finish(*args)

  monkeypatch.setattr(outer.transport, "_transmit_codes", late)
  monkeypatch.setattr(outer.transport, "finish", ask)
  params_M, theta, events = walk(c, mesh, outer)
  assert_same((params_M, theta), expected[:2])
  assert len(threads) == 1
  assert threading.main_thread() not in threads
  received = [e for e in events if e.kind == "receive"]
  assert received[0].step == c.sync_every + 3
  # The timer that lets the exchange go starts when training begins to wait.
  assert all(e.metrics["waited_s"] >= 0.19 for e in received)


def test_a_failed_exchange_names_the_fragment_and_the_remedy(tiny, monkeypatch):
  c, mesh, outer = make(tiny, "host")

  def fail(payload):
    raise OSError("connection closed by peer")

  monkeypatch.setattr(outer.transport, "_transmit_codes", fail)
  with pytest.raises(
    transport_lib.ExchangeFailed,
    match=r"fragment 0 failed \(connection closed by peer\).*same command to go on",
  ):
    walk(c, mesh, outer)


def test_what_was_sent_before_a_restart_is_exchanged_after_it(tiny, monkeypatch):
  c, mesh, outer = make(tiny, "host")
  expected = walk(c, mesh, outer)
  monkeypatch.setattr(outer.transport, "start", lambda *args: None)
  assert_same(walk(c, mesh, outer)[:2], expected[:2])


def test_state_is_the_same_after_it_was_saved_and_restored(tiny):
  c, mesh, outer = make(tiny, "host")
  with jax.set_mesh(mesh):
    params_M = {
      "blocks": {"w": jnp.ones((c.replicas, c.model.num_layers, 2, 3))},
      "embed": {"tokens": jnp.ones((c.replicas, 4, 2))},
    }
    state = outer.init(params_M)
    saved = sync_lib.publish(outer, state)
    again = sync_lib.adopt(outer, saved)
    shapes = sync_lib.published(outer, jax.eval_shape(outer.fresh, params_M))
  same = lambda a, b: (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
  assert jax.tree.all(jax.tree.map(same, saved, shapes))
  assert_same(jax.device_get(state), jax.device_get(again))
  places = lambda s: [x.sharding for x in jax.tree.leaves(s)]
  assert places(again) == places(state)


class _Device:
  """Of a process; enough to lay out a mesh."""

  platform = "cpu"

  def __init__(self, process_index: int):
    self.process_index = process_index


@pytest.mark.parametrize(
  ("processes", "message"),
  [
    ([[0, 1], [0, 1]], r"mesh row 0 belong to the processes 0, 1; lower mesh.fsdp"),
    ([[0], [0], [1]], r"different numbers of mesh rows: 2, 1"),
  ],
)
def test_replicas_have_to_fit_the_processes(processes, message):
  grid = np.asarray([[_Device(p) for p in row] for row in processes], dtype=object)
  mesh = type("FakeMesh", (), {"devices": grid})
  with pytest.raises(config_lib.ConfigError, match=message):
    transport_lib._rows_of_processes(mesh)


def test_offloaded_outer_state_waits_at_the_host_and_changes_nothing(tiny):
  expected = walk(*make(tiny, "device"))
  c, mesh, outer = make(tiny, "device", **{"outer.offload": True})
  found = walk(c, mesh, outer)
  assert_same(expected[:2], found[:2])
  with jax.set_mesh(mesh):
    params_M = {
      "blocks": {"w": jnp.zeros((c.replicas, c.model.num_layers, 6, 5))},
      "embed": {"tokens": jnp.zeros((c.replicas, 7, 4))},
    }
    state = outer.init(params_M)
    kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
    assert kinds((state.theta, state.opt_state)) == {"pinned_host"}
    struct = sync_lib.payload_struct(outer, 1, params_M, state.theta[1])
    state, _ = sync_lib.send_fragment(outer, 4, 1, params_M, state)
    assert state.in_flight["1"].shape == struct.shape
    state, theta, _ = sync_lib.receive_fragment(outer, 5, 1, state)
    assert kinds(theta) == {"device"}
    assert_same(jax.device_get(theta), jax.device_get(state.theta[1]))
    assert kinds((state.theta, state.opt_state)) == {"pinned_host"}
    assert kinds(outer.transport.fetch(state.theta[1])) == {"device"}


@pytest.mark.parametrize(("taus", "fetches"), [((1, 1), 2), ((1, 2), 3)])
def test_offloaded_outer_state_is_copied_once_each_way(
  tiny, monkeypatch, taus, fetches
):
  tiny.fragments.pattern = "whole"
  c, mesh, outer = make(tiny, "device", **{"outer.offload": True})
  schedule = dataclasses.replace(outer.schedule, taus=taus)
  outer = dataclasses.replace(outer, schedule=schedule)
  copied, copy = [], transport_lib._in_memory
  monkeypatch.setattr(
    transport_lib, "_in_memory", lambda x, kind: copied.append(kind) or copy(x, kind)
  )
  walk(c, mesh, outer, steps=c.sync_every)
  # At first everything goes to the host, and at last theta comes for evaluation.
  assert copied[0] == "pinned_host"
  assert copied[-1] == "device"
  # Between them a round: theta and optimizer state come and go, and theta comes again
  # for a replica with a larger tau.
  assert copied[1:-1].count("device") == fetches
  assert copied[1:-1].count("pinned_host") == 2


def test_hosts_compute_on_cpus_which_jax_has_to_use(tiny, monkeypatch):
  devices = jax.devices()

  def no_cpus(backend=None):
    if backend == "cpu":
      raise RuntimeError("Unknown backend cpu")
    return devices

  monkeypatch.setattr(jax, "devices", no_cpus)
  monkeypatch.setattr(type(jax.config), "jax_platforms", "cuda")
  with pytest.raises(config_lib.ConfigError, match=r"set it to 'cuda,cpu', or choose"):
    make(tiny, "host")


def test_offloading_needs_pinned_memory(tiny, monkeypatch):
  monkeypatch.setattr(transport_lib, "_memory_kinds", lambda device: ["device"])
  message = "needs memory of kind pinned_host, but cpu has device"
  with pytest.raises(config_lib.ConfigError, match=message):
    make(tiny, "device", **{"outer.offload": True})
