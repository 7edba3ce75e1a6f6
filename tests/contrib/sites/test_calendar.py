"""The rounds of a run, beside the trainer's schedule and real payloads."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config, update

from diloco.algorithm.slices import take
from diloco.algorithm.streaming import make_streaming
from diloco.config import resolve
from diloco.contrib.sites.calendar import Calendar, as_all, config_of
from diloco.data.batches import Batches
from diloco.errors import ConfigError
from diloco.mesh.devices import make_mesh
from diloco.model import registry
from diloco.wire import exchange


def make(**fields) -> Calendar:
  c = tiny_config()
  c.replicas, c.train.batch_size, c.overlap.transport = 4, 8, "sites"
  update(c, {name.replace("__", "."): value for name, value in fields.items()})
  return Calendar(resolve(c))


CASES = [
  {"sync_every": every, "overlap__tau": tau, "outer__final_sync": final, **more}
  for every, tau, more in [
    (4, 2, {}),
    (3, 0, {"fragments__pattern": "whole"}),
    (2, 1, {"train__steps": 17}),  # More fragments than steps between two syncs.
    (5, 3, {"overlap__taus": (0, 3, 1, 2)}),
    (20, 1, {}),  # Ends before the first send.
  ]
  for final in (False, True)
  if final or every < 20
]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_rounds_are_the_sends_of_the_schedule_step_by_step(fields):
  calendar = make(**fields)
  c, schedule = calendar.config, calendar.config.make_schedule()
  sends = [(t, p) for t in range(1, c.train.steps + 1) for p in schedule.sends(t)]
  final = [p for t, p in calendar.rounds[len(sends) :]]
  assert list(calendar.rounds[: len(sends)]) == sends
  assert final == (list(range(calendar.fragments)) if c.outer.final_sync else [])
  # The final sync comes after the last arrival of a fragment in flight.
  for t, _ in calendar.rounds[len(sends) :]:
    assert t > c.train.steps + max(c.overlap.taus)
  for r, pair in enumerate(calendar.rounds):
    assert calendar.number[pair] == r


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_a_site_goes_on_so_that_it_sends_the_first_open_round(fields):
  calendar = make(**fields)
  steps = [t for t, _ in calendar.rounds]
  for r in range(len(steps) + 1):
    t = calendar.step_before(r)
    assert 0 <= t <= calendar.config.train.steps
    assert all(step > t for step in steps[r:])
    if r and t < calendar.config.train.steps:
      # It trains no step again that only closed rounds need.
      assert t == steps[r - 1] or t + 1 == steps[r] == steps[r - 1]
  for t in range(calendar.config.train.steps + 9):
    first = calendar.first_after(t)
    assert all(step <= t for step in steps[:first])
    assert all(step > t for step in steps[first:])


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_a_payload_weighs_the_steps_since_the_send_before(fields):
  calendar = make(**fields)
  trained, every = calendar.config.train.steps, calendar.config.sync_every
  last = dict.fromkeys(range(calendar.fragments), 0)
  for r, (t, p) in enumerate(calendar.rounds):
    steps = min(t, trained) - last[p]
    assert calendar.steps_behind(r, 0) == max(steps, 1)
    if last[p] > 0 and t <= trained:
      assert steps == every
    # A site that took over the group's step 2 steps ago has trained 2.
    assert calendar.steps_behind(r, min(t, trained) - 2) == max(min(steps, 2), 1)
    last[p] = t


@pytest.mark.parametrize("pace", [1.0, 0.5, 0.3, 0.25, 0.7])
def test_a_slow_site_trains_its_share_of_every_round(pace):
  calendar = make(sites__pace=pace, sync_every=4, train__steps=200)
  trained = [calendar.trained(t) for t in range(201)]
  assert {b - a for a, b in itertools.pairwise(trained)} <= {0, 1}
  assert (trained[1], trained[200]) == (1, round(200 * pace))
  last = dict.fromkeys(range(calendar.fragments), 0)
  for r, (t, p) in enumerate(calendar.rounds):
    steps = trained[t] - trained[max(last[p], 0)]
    assert calendar.steps_behind(r, 0) == steps
    assert steps - 1 < (t - last[p]) * pace < steps + 1
    last[p] = t


@pytest.mark.parametrize(("count", "batch"), [(2, 4), (4, 2)])
def test_a_site_with_a_batch_of_its_own_reads_the_same_text(count, batch):
  """Its sequences are those that it would read in smaller or larger batches."""
  calendar = make(sites__count=count, sites__batch_size=batch)
  seen, rows = as_all(calendar.config), []
  for c in (calendar.config, seen):
    own = config_of(c, 1)
    part = types.SimpleNamespace(config=c, first_replica=own.replicas)
    batches = Batches(own, make_mesh(own, jax.devices()[:1]), part)
    found = [np.asarray(next(batches)) for _ in range(6)]
    assert found[0].shape[:2] == (own.replicas, own.train.batch_size // own.replicas)
    rows.append(np.concatenate(found, axis=1))
    batches.close()
  assert own.train.batch_size == batch
  assert seen.tokens_per_step == batch * calendar.sites * seen.model.seq_len
  both = min(x.shape[1] for x in rows)
  assert np.array_equal(rows[0][:, :both], rows[1][:, :both])


@pytest.mark.parametrize(
  ("wire", "count"),
  [
    *[("e3m0", 4), ("e3m0", 2), ("fp32", 2), ("e4m3fn", 4)],
    *(
      pytest.param(*case, marks=pytest.mark.slow("more of the same"))
      for case in [("fp32", 4), ("e4m3fn", 2)]
    ),
  ],
)
def test_payload_bytes_are_those_of_an_encoded_payload(wire, count):
  calendar = make(wire__format=wire, sites__count=count)
  own = config_of(calendar.config, 1)
  assert own.replicas == 4 // count == calendar.replicas_per_site
  assert own.train.batch_size == 8 // count
  mesh = make_mesh(own)
  with jax.set_mesh(mesh):
    sync = make_streaming(own, mesh)

    def encode(key, p):
      params = registry.get(own.model).init(own.model, key)
      params_M = jax.tree.map(lambda x: jnp.stack([x] * own.replicas), params)
      delta_M = take(params_M, sync.shapes[p], sync.layers[p])
      state, keys = exchange.init_state(own.wire, delta_M), jnp.stack([key] * 4)
      return exchange.encode(own.wire, mesh, delta_M, state, keys[: own.replicas])[0]

    for r, (_, p) in enumerate(calendar.rounds):
      payload = jax.eval_shape(functools.partial(encode, p=p), jax.random.key(0))
      assert payload.dtype == jnp.uint8
      assert calendar.payload_bytes(r) == payload.size


@pytest.mark.parametrize("site", [-1, 4])
def test_an_unknown_site_is_one_sentence(site):
  with pytest.raises(ConfigError, match=f"--site is {site}, .* 0 to 3; give one of"):
    config_of(make().config, site)


def test_sites_of_several_replicas_get_their_own_part():
  calendar = make(overlap__taus=(0, 1, 2, 3), sites__count=2)
  assert [config_of(calendar.config, k).overlap.taus for k in (0, 1)] == [
    (0, 1),
    (2, 3),
  ]
  assert [calendar.shards_of(k) for k in (0, 1)] == [["0", "1"], ["2", "3"]]


def test_sites_read_the_shards_whose_positions_they_record():
  calendar = make(sites__count=2, data__shards=8)
  for site, own in enumerate((["0", "1", "2", "3"], ["4", "5", "6", "7"])):
    assert calendar.shards_of(site) == own
    c = config_of(calendar.config, site)
    assert (c.data.shards, c.replicas) == (4, 2)
    batches = Batches(
      c,
      make_mesh(c),
      types.SimpleNamespace(config=calendar.config, first_replica=2 * site),
    )
    assert [*batches.get_state()] == own
    batches.close()
