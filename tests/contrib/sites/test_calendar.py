"""The rounds of a run, beside the trainer's schedule and real payloads."""

import fractions
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config, update

from diloco.algorithm.method import make_method
from diloco.config import resolve
from diloco.contrib.sites.calendar import Calendar, as_all, config_of
from diloco.data.batches import Batches
from diloco.mesh.devices import make_mesh


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


PACES = [
  {"sites__pace": pace, "sync_every": 4, "train__steps": 200}
  for pace in (0.5, 0.3, 0.25, 0.55)
]


@pytest.mark.parametrize("fields", [*CASES, *PACES], ids=str)
def test_a_payload_weighs_the_steps_trained_since_the_send_before(fields):
  """A slow site trains its share of every round."""
  calendar, pace = make(**fields), fields.get("sites__pace", 1.0)
  every, last = calendar.config.sync_every, calendar.config.train.steps
  trained = [calendar.trained(t) for t in range(last + 1)]
  exact = fractions.Fraction(str(pace))
  assert trained == [math.ceil(t * exact) for t in range(last + 1)]
  sent = dict.fromkeys(range(calendar.fragments), 0)
  for r, (t, p) in enumerate(calendar.rounds):
    begin, end = min(sent[p], last), min(t, last)
    steps = trained[end] - trained[begin]
    assert calendar.steps_behind(r, 0) == max(steps, 1)
    assert steps - 1 < (end - begin) * pace < steps + 1
    if begin > 0 and t <= last:
      assert end - begin == every
    # A site that took over the group's step 2 steps ago has trained at most 2.
    taken_over = trained[end] - trained[max(begin, end - 2)]
    assert calendar.steps_behind(r, end - 2) == max(taken_over, 1)
    sent[p] = t


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
  ("wire", "count"), [("e3m0", 4), ("e3m0", 2), ("fp32", 2), ("e4m3fn", 4)]
)
def test_payload_bytes_are_those_of_an_encoded_payload(wire, count):
  calendar = make(wire__format=wire, sites__count=count)
  own = config_of(calendar.config, 1)
  assert own.replicas == 4 // count == calendar.replicas_per_site
  assert own.train.batch_size == 8 // count
  mesh, sizes = make_mesh(own), {}
  with jax.set_mesh(mesh):
    method = make_method(own, mesh)
    state = method.abstract()
    for p, parts in enumerate(zip(state.outer.theta, state.outer.codec_state)):
      send = functools.partial(method.sync.encode, 1, p)
      payload, _, _ = jax.eval_shape(send, state.params, *parts, 0)
      assert payload.dtype == jnp.uint8
      sizes[p] = payload.size
  for r, (_, p) in enumerate(calendar.rounds):
    assert calendar.payload_bytes(r) == sizes[p]


@pytest.mark.parametrize(
  ("shards", "first", "second"), [(0, "01", "23"), (8, "0123", "4567")]
)
def test_sites_of_several_replicas_train_and_record_their_own_part(
  shards, first, second
):
  calendar = make(overlap__taus=(0, 1, 2, 3), sites__count=2, data__shards=shards)
  for site, (own, taus) in enumerate([(first, (0, 1)), (second, (2, 3))]):
    c = config_of(calendar.config, site)
    assert (c.overlap.taus, c.replicas, c.data.shards) == (taus, 2, shards // 2)
    part = types.SimpleNamespace(config=calendar.config, first_replica=2 * site)
    batches = Batches(c, make_mesh(c), part)
    assert [*batches.get_state()] == calendar.shards_of(site) == [*own]
    batches.close()
