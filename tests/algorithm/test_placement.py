"""Outer state on devices, in host memory and on hosts: the results are the same."""

import dataclasses
import itertools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.algorithm import placement
from diloco.algorithm.outer import outer_step
from diloco.algorithm.streaming import make_streaming
from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.mesh.devices import make_mesh
from diloco.wire.transport import ExchangeFailed

STEPS = 11
SHAPES = {"blocks": {"w": (3, 6, 5)}, "embed": {"tokens": (7, 4)}}


def make(tiny, **fields):
  tiny.overlap.tau, tiny.overlap.alpha = 3, 0.25
  tiny.update_from_flattened_dict(fields)
  c = resolve(tiny)
  return make_streaming(c, make_mesh(c, jax.devices()[:1]), SHAPES)


def host(tiny, **fields):
  return make(tiny, **{"overlap.transport": "host", **fields})


def start(sync):
  """Equal replicas and their outer state."""
  ones = lambda shape: jnp.ones((sync.replicas, *shape), jnp.float32)
  params_M = jax.tree.map(ones, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
  places = sharding.shardings(params_M, sync.mesh, (sharding.REPLICA,))
  params_M = jax.device_put(params_M, places)
  return params_M, sync.init(params_M)


def walk(sync, steps: int = STEPS, before_every_step=lambda t, params_M, state: None):
  """A run whose inner steps are random increments: (replicas, outer, events)."""
  rng = np.random.default_rng(0)
  with jax.set_mesh(sync.mesh):
    params_M, state = start(sync)
    events = []
    for t in range(1, steps + 1):
      add = lambda x: x + jnp.asarray(0.1 * rng.standard_normal(x.shape), jnp.float32)
      params_M = jax.tree.map(add, params_M)
      before_every_step(t, params_M, state)
      params_M, state, more = outer_step(sync, t, params_M, state)
      events += more
    params_M, state, more = sync.drain(steps, params_M, state)
    theta = sync.params(state)
  return jax.device_get(params_M), jax.device_get(theta), events + more


def test_a_payload_that_has_arrived_is_not_carried_again(tiny):
  sync = make(tiny)
  once = dataclasses.replace(sync, transport=None)
  with jax.set_mesh(sync.mesh):
    params_M, state = start(sync)
    state, _ = sync.send(1, 0, params_M, state)
    flying = state.in_flight[0]
    theta, opt_state, _ = state.fragment(0)
    with pytest.raises(AttributeError, match="carry"):
      once.update(theta, opt_state, flying)
    once.update(theta, opt_state, dataclasses.replace(flying, arrived=True))


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("optimizer", ["sgd(momentum=0.9, nesterov=True)", "adam"])
def test_hosts_compute_what_devices_compute_bit_for_bit(tiny, optimizer):
  tiny.outer.optimizer = optimizer
  on_devices, on_hosts = walk(make(tiny)), walk(host(tiny))
  assert_same(on_devices[:2], on_hosts[:2])
  described = lambda events: [(e.kind, e.step, e.fragment) for e in events]
  assert described(on_devices[2]) == described(on_hosts[2])


def test_a_late_exchange_is_awaited_and_merged_at_its_step(tiny, monkeypatch):
  expected = walk(host(tiny))
  sync = host(tiny)
  carry, finish = sync.transport.carry, sync.place._jobs.finish
  awaited, threads = threading.Semaphore(0), set()

  def late(payload):
    threads.add(threading.current_thread())
    awaited.acquire()
    return carry(payload)

  def ask(*args):
    threading.Timer(0.2, awaited.release).start()
    return finish(*args)

  monkeypatch.setattr(sync.transport, "carry", late)
  monkeypatch.setattr(sync.place._jobs, "finish", ask)
  ticks = itertools.count()
  clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)))
  monkeypatch.setattr(placement, "time", clock)
  params_M, theta, events = walk(sync)
  assert_same((params_M, theta), expected[:2])
  assert len(threads) == 1
  assert threading.main_thread() not in threads
  received = [e for e in events if e.kind == "receive"]
  assert received[0].step == sync.schedule.sync_every + 3
  assert {float(e.metrics["waited_s"]) for e in received} == {1.0}


def test_two_methods_exchange_in_the_order_of_their_sends(tiny, monkeypatch):
  carried, other = [], threading.Event()

  def send(name, before):
    sync = host(tiny)
    carry = sync.transport.carry
    note = lambda payload: (before(), carried.append(name), carry(payload))[-1]
    monkeypatch.setattr(sync.transport, "carry", note)
    with jax.set_mesh(sync.mesh):
      sync.send(1, 0, *start(sync))
    return sync.place

  send("a", lambda: other.wait(0.5))
  send("b", other.set).settle()
  assert carried == ["a", "b"]


def test_a_failed_exchange_names_the_reason_and_the_remedy(tiny, monkeypatch):
  sync = host(tiny)

  def fail(payload):
    raise OSError("connection closed by peer")

  monkeypatch.setattr(sync.transport, "_gather", fail)
  with pytest.raises(
    ExchangeFailed, match=r"\(connection closed by peer\).*same command continues"
  ):
    walk(sync)


@pytest.mark.parametrize("kept", [lambda x: x, jnp.copy], ids=["itself", "a copy"])
def test_a_state_that_goes_back_merges_its_own_payloads(tiny, kept):
  sync = host(tiny)
  expected = walk(sync)

  def abandon_a_future(t, params_M, state):
    """Fragments of the state arrive, and others are sent; nothing of it counts."""
    future_M, state = jax.tree.map(lambda x: x + t, params_M), jax.tree.map(kept, state)
    for later in range(t, t + t % 6):
      future_M, state, _ = outer_step(sync, later, future_M, state)

  assert_same(walk(sync, before_every_step=abandon_a_future)[:2], expected[:2])


def test_offloaded_outer_state_lives_in_host_memory_and_changes_no_result(tiny):
  expected = walk(make(tiny))
  sync = make(tiny, **{"outer.offload": True, "overlap.tau": 3})
  assert_same(expected[:2], walk(sync)[:2])
  kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
  with jax.set_mesh(sync.mesh):
    params_M, state = start(sync)
    assert kinds((state.theta, state.opt_state)) == {"pinned_host"}
    for t in (4, 5, 6, 7):
      params_M, state, events = outer_step(sync, t, params_M, state)
      flying = sync.schedule.in_flight(t)
      for p in range(len(sync.fragments)):
        place = "device" if p in flying else "pinned_host"
        assert kinds((state.theta[p], state.opt_state[p])) == {place}
    assert events[-1].kind == "receive"
    assert kinds(sync.params(state)) == {"device"}


@pytest.mark.parametrize(("taus", "fetches"), [((1, 1), 2), ((1, 2), 3)])
def test_offloaded_outer_state_is_copied_once_each_way(
  tiny, monkeypatch, taus, fetches
):
  sync = make(tiny, **{"outer.offload": True, "fragments.pattern": "whole"})
  schedule = dataclasses.replace(sync.schedule, taus=taus)
  sync = dataclasses.replace(sync, schedule=schedule)
  copied = []

  def copy(tree, kind):
    moved = {x.sharding.memory_kind for x in jax.tree.leaves(tree)} != {kind}
    copied.extend([kind] * (moved * len(tree)))
    return in_memory(tree, kind)

  in_memory = placement._in_memory
  monkeypatch.setattr(placement, "_in_memory", copy)
  walk(sync, steps=sync.schedule.sync_every)
  # theta and optimizer state: to the host at first; in a round to the devices and back;
  # theta once more for a replica with a larger tau, and for evaluation.
  theta = len(SHAPES)
  assert copied.count("pinned_host") == 4
  assert copied.count("device") == 2 + (fetches - 2) * theta + theta


def test_offloading_needs_pinned_memory():
  memories = [types.SimpleNamespace(kind="device")]
  device = types.SimpleNamespace(
    device_kind="cpu", addressable_memories=lambda: memories
  )
  fake = types.SimpleNamespace(devices=np.asarray([[device]], dtype=object))
  message = "needs memory of kind pinned_host, but cpu has device"
  with pytest.raises(ConfigError, match=message):
    placement.make_place(fake, None, offload=True)
