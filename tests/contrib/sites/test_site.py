"""A site's part of Algorithm 2 with a link that does as it is told."""

import dataclasses
import threading
import time
import types

import jax
import numpy as np
import optax
import pytest
from conftest import FEEDBACK, update
from process_config import get_config

from diloco import train
from diloco.algorithm.method import make_method
from diloco.config import resolve
from diloco.contrib.sites import SitesConfig, outer_state
from diloco.contrib.sites.calendar import Calendar, as_all, config_of
from diloco.contrib.sites.group.journal import Closed
from diloco.contrib.sites.group.link import Welcome
from diloco.contrib.sites.site import SitePart
from diloco.errors import ConfigError
from diloco.mesh.devices import make_mesh

EVERY, TAU = 3, 2  # As in process_config.


class Link:
  """Has the methods of a real link; the tests say which rounds are closed."""

  def __init__(self, calendar):
    self.calendar = calendar
    self.rounds = list[Closed]()
    self.published = list[Closed]()  # These are received when the site waits for them.
    self.sent, self.firsts, self.missing, self.left, self.hello = {}, [], [], [], None
    self.answer = Welcome(0, {}, b"")
    self.news = None
    self.base = 0  # Rounds below this number were never received.
    self.forgotten = 0  # Rounds below this number need no room.
    self.offered = []
    self.ready, self.leave = self.firsts.append, self.left.append
    self.absent = lambda: self.missing
    self.wait_for_start = lambda stopping: not stopping()

  def join(self, applied, digests, stopping):
    self.hello, self.base = applied, self.answer.round
    return None if stopping() else self.answer

  def send(self, number, data, fields):
    self.sent[number] = data, fields

  def wait_until(self, number, stopping):
    forgotten = max(self.forgotten, self.base)
    assert number < forgotten + self.calendar.room, "a link waits for room"
    while self.published and number >= self.newest()[0]:
      self.rounds.append(self.published.pop(0))
    in_thread = threading.current_thread() is not threading.main_thread()
    for _ in range(1000 if in_thread else 0):  # The main thread closes the round.
      if number < self.newest()[0]:
        break
      time.sleep(0.01)
    assert stopping() or number < self.newest()[0], f"round {number} never closes"
    return number < self.newest()[0]

  def closed(self, number):
    assert number >= self.forgotten
    return self.rounds[number - self.base]

  def welcome(self):
    found, self.news = self.news, None
    return found

  def newest(self):
    received = self.base + len(self.rounds)
    return received, received + len(self.published)

  def applied(self, number, digest):
    assert number == max(self.forgotten, self.base), "the order of the rounds"
    self.noted, self.forgotten = (number, digest), number + 1

  def offer(self, applied, make):
    self.offered.append((applied, make()[0]))

  def close(self, payloads, tokens=None, refused=()):
    """Closes the next round with these payloads {site: bytes}."""
    number = self.newest()[0]
    step, p = self.calendar.rounds[number]
    tokens = tokens or dict.fromkeys(payloads, 192)
    self.rounds.append(Closed(number, p, step, tokens, payloads, refused=refused))


class Batches:
  def __init__(self):
    self.state = {"0": {"position": 0}}

  def get_state(self):
    return self.state

  def set_state(self, state):
    if state["0"] == {"documents": 1, "position": "bad"}:
      raise TypeError("string indices must be integers")
    self.state = state


class Player:
  """Site 0 of two, whose inner steps make all parameters a little larger."""

  def __init__(self, processes=2, **fields):
    c = get_config()
    c.overlap.transport = "sites"
    update(c, fields)
    self.calendar = Calendar(resolve(c))
    own = config_of(as_all(self.calendar.config), 0)
    method = make_method(own, make_mesh(own))
    self.state = method.init()
    self.link, self.batches, self.ending = Link(self.calendar), Batches(), False
    # With other processes, a site waits for a round when it is due, in no thread.
    peers = types.SimpleNamespace(
      index=0, count=processes, all_gather=lambda value: [value]
    )
    part = SitePart(as_all(self.calendar.config), 0, self.link, peers)
    stop = types.SimpleNamespace(received=lambda: self.ending)
    self.site = part.method(method, self.batches, stop, {})
    self.t, self.events = 0, []

  def enter(self, start=0, steps=0):
    self.t, self.state = self.site.enter(start, self.state)
    self.steps(steps)
    return self

  def steps(self, count, factor=1.01):
    for _ in range(count):
      larger = jax.tree.map(lambda x: x * factor, self.state.params)
      self.state = dataclasses.replace(self.state, params=larger)
      self.t, self.state, events = self.site.outer(self.t + 1, self.state)
      self.events += events

  def step(self, ending=False):
    self.ending = ending
    self.steps(1)

  def account(self, *names):
    found = self.site.account({"bytes_sent_per_replica": 1, "params": 1})["site"]
    return tuple(found[name] for name in names)

  def other(self):
    """Returns a payload of the other site for the next round."""
    size = self.calendar.payload_bytes(self.link.newest()[0])
    return np.zeros(size, np.uint8).tobytes()

  def count(self, number, **tokens):
    """Closes a round with what this site has sent, and the other."""
    payloads = {0: self.link.sent[number][0], 1: self.other()}
    self.link.close(payloads, **tokens)

  def miss(self, rounds=1):
    """Closes rounds with the other site alone."""
    for _ in range(rounds):
      self.link.close({1: self.other()})

  def learning_rate_count(self):
    is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)
    leaves = jax.tree.leaves(self.state.opt_state, is_leaf=is_schedule)
    [found] = [x for x in leaves if is_schedule(x)]
    return set(np.ravel(found.count).tolist())

  def assert_params_are_theta(self):
    params = jax.tree.map(lambda x: np.asarray(x[0]), self.state.params)
    [theta] = self.state.outer.theta
    theta = jax.tree.map(lambda t, x: np.asarray(t.astype(x.dtype)), theta, params)
    jax.tree.map(np.testing.assert_array_equal, params, theta)

  def received(self):
    return [
      tuple(int(e.metrics[name]) for name in ("round", "sites", "counted"))
      for e in self.events
      if e.kind == "receive"
    ]


@pytest.fixture(scope="module", autouse=True)
def compiled():
  """Compiles the programs once, which takes longer than all tests."""
  with jax.set_mesh(make_mesh(resolve(get_config()))):
    player = Player().enter(steps=EVERY)
    player.miss()
    player.steps(TAU)
    yield


def test_a_site_on_time_sends_and_merges_by_the_schedule():
  player = Player(**{"checkpoint.every": EVERY + TAU})
  first = outer_state.digests(player.state.outer)
  player.enter()
  for t in range(1, EVERY + TAU):
    player.step()
    assert list(player.link.sent) == ([0] if t >= EVERY else [])
    assert player.received() == []
  data, fields = player.link.sent[0]
  assert len(data) == player.calendar.payload_bytes(0)
  position = {"0": [3, {"position": 0}]}
  tokens = {"tokens": 3 * 4 * 16, "per_step": 4 * 16}
  assert fields == {**tokens, "data": position}
  player.count(0)
  player.step()
  assert player.t == EVERY + TAU
  assert player.received() == [(0, 2, 1)]
  [own] = outer_state.digests(player.state.outer)
  assert player.link.noted == (0, own)
  # For newcomers, at first and with every checkpoint.
  assert player.link.offered == [(0, first), (1, [own])]
  assert first != [own]
  player.assert_params_are_theta()
  assert player.link.firsts == [0]
  assert player.account("contributed") == (1,)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_site_sends_after_its_first_step_if_the_group_has_begun(is_told):
  player = Player().enter(start=EVERY - 1)
  player.step(is_told)
  assert player.t == EVERY
  assert list(player.link.sent) == ([] if is_told else [0])


def test_an_outer_step_of_a_plugin_is_refused(monkeypatch):
  wrap = lambda self, c, step: dataclasses.replace(step, run=print)
  monkeypatch.setattr(SitesConfig, "wrap", wrap)
  with pytest.raises(ConfigError, match=r"one of plugins=\('sites',\) has a `wrap` or"):
    Player()


def test_a_slow_site_of_a_small_batch_sends_and_merges_by_the_schedule_of_the_group():
  player = Player(**{"sites.pace": 0.5, "sites.batch_size": 2}).enter()
  trained = []
  while player.t < 12:
    trained.append(player.t + 1)
    player.step()
    if player.t == 4:
      assert list(player.link.sent) == [0]  # After step 3.
    number = (player.t + 1) // EVERY  # Closes what is due in the next steps.
    if number > len(player.link.rounds) and number - 1 in player.link.sent:
      player.count(number - 1, tokens={0: 64, 1: 192})
  assert trained == [1, 3, 5, 7, 9, 11]
  assert player.learning_rate_count() == {12}
  fields = [player.link.sent[r][1] for r in range(4)]
  # Steps 1 and 3; 5; 7 and 9; 11. A batch of two sequences.
  assert [x["tokens"] for x in fields] == [n * 2 * 16 for n in (2, 1, 2, 1)]
  assert {x["per_step"] for x in fields} == {2 * 16}
  merges = [(int(e.metrics["round"]), e.step) for e in player.events[1:] if e.sent == 0]
  assert merges == [(0, 5), (1, 8), (2, 11)]
  assert player.account("lost", "skipped_steps") == (0, 0)


def test_a_late_site_merges_all_rounds_and_takes_the_step_of_the_group():
  player = Player().enter(steps=EVERY)
  player.miss(6)  # Up to step 18, while the site is at step 3.
  # The link has room for four of them until the site merges the first ones.
  player.link.published = player.link.rounds[1:]
  del player.link.rounds[1:]
  player.step()
  # The group's step 18, and one more, because news from the group take some time.
  assert player.t == 19
  assert player.learning_rate_count() == {19}
  assert player.received() == [(r, 1, 0) for r in range(6)]
  player.assert_params_are_theta()
  assert player.account("lost", "skipped_steps") == (1, 15)
  assert player.link.firsts[-1] == 6
  # Its next payload weighs the steps that it trains from now on.
  player.steps(2)
  assert list(player.link.sent) == [0, 6]
  assert player.link.sent[6][1]["tokens"] == 2 * 4 * 16


def test_a_site_that_missed_a_round_sends_nothing_and_leaves_out_one_step():
  player = Player().enter(steps=2)
  player.link.close({1: player.other()})  # The round of step 3.
  player.step()
  # Without step 4 it is in time for the next round.
  assert player.t == 4
  assert player.learning_rate_count() == {4}
  assert not player.link.sent
  assert player.account("lost", "skipped_steps") == (1, 1)
  assert player.link.firsts == [0, 1]
  player.step()
  assert player.received() == [(0, 1, 0)]
  player.step()
  assert list(player.link.sent) == [1]
  assert player.link.sent[1][1]["tokens"] == 2 * 4 * 16


def test_a_missed_round_does_not_wait_for_a_later_one_that_is_in_flight():
  fields = {"fragments.pattern": "strided", "fragments.size": 1}
  fields |= {"sync_every": 6, "overlap.tau": 5}
  player = Player(processes=1, **fields).enter()
  sends = [t for t, _ in player.calendar.rounds]
  player.steps(sends[1] - 1)
  player.count(0)
  player.miss()
  player.steps(sends[2] - player.t)
  assert list(player.link.sent) == [0, 2]
  player.steps(sends[1] + 5 - player.t)  # Round 2 is still open.
  assert player.received() == [(0, 2, 1), (1, 1, 0)]
  player.count(2)
  player.steps(sends[2] + 5 - player.t)
  assert player.received()[2:] == [(2, 2, 1)]


def test_error_feedback_takes_back_a_payload_that_counts_nowhere():
  player, errors = Player(**FEEDBACK), []

  def error():
    leaves = jax.tree.leaves(player.state.outer.codec_state[0])
    errors.append(np.concatenate([np.ravel(x) for x in leaves]))

  player.enter(steps=EVERY)
  error()  # After the send.
  player.miss()
  player.steps(TAU)
  error()  # After the merge. Step 6 is left out, so the next payload is zero.
  player.count(1)
  player.steps(EVERY)
  error()
  player.count(2)
  player.steps(TAU)
  error()
  assert player.received() == [(0, 1, 0), (1, 2, 1), (2, 2, 1)]
  sent, lost, again, counted = errors
  assert sent.any()
  assert not lost.any()
  assert again.any()
  np.testing.assert_array_equal(counted, again)


@pytest.mark.parametrize("factor", [np.nan, 1.01])
def test_a_site_whose_payload_was_refused_goes_on_with_the_parameters_of_the_group(
  factor,
):
  player = Player(**FEEDBACK, **{"model.param_dtype": "bfloat16"}).enter(steps=2)
  types = jax.tree.map(lambda x: x.dtype, player.state)
  player.steps(1, factor)
  assert 0 in player.link.sent  # Otherwise the round would stay open.
  player.link.close({}, refused=(0, 1))
  theta = outer_state.digests(player.state.outer)
  assert player.site.recovers(EVERY + TAU + 1)
  player.steps(TAU)
  assert player.received() == [(0, 0, 0)]
  # No payload counted, so the outer state is what it was.
  assert outer_state.digests(player.state.outer) == theta
  player.assert_params_are_theta()
  assert player.account("restored", "lost") == (1, 0)
  assert player.learning_rate_count() == {EVERY + TAU}
  assert jax.tree.map(lambda x: x.dtype, player.state) == types
  errors = jax.tree.leaves(player.state.outer.codec_state)
  assert errors
  assert not any(np.any(x) for x in errors)
  # The log sees the losses later.
  assert player.site.recovers(EVERY + TAU)
  assert not player.site.recovers(EVERY + TAU + 1)
  player.step()
  assert player.link.sent[1][1]["tokens"] == 4 * 16  # One step since then.
  player.count(1)
  player.steps(TAU)
  assert player.account("lost", "contributed") == (0, 1)
  assert player.site.recovers(EVERY + TAU + 1)  # A payload has counted since.


def test_a_site_that_diverges_again_at_once_ends():
  player = Player().enter()
  player.steps(EVERY, factor=np.nan)
  player.link.close({1: player.other()}, refused=(0,))
  player.steps(EVERY, factor=np.nan)
  assert player.account("restored") == (1,)
  assert not player.site.recovers(2 * EVERY)  # So the log raises TrainingDiverged.
  norms = [e.metrics["outer_grad_norm"] for e in player.events if e.kind == "send"]
  assert np.isnan(norms).all()


def test_a_newcomer_starts_from_the_snapshot():
  donor, player = Player().enter(), Player()
  donor.miss(4)
  donor.step()
  snapshot = outer_state.to_bytes(donor.state.outer)
  player.link.answer = Welcome(4, {"0": [12, {"position": 7}]}, snapshot)
  player.enter()
  assert player.t == 12
  assert player.batches.state == {"0": {"position": 7}}
  digests = [outer_state.digests(x.state.outer) for x in (donor, player)]
  assert digests[0] == digests[1]
  assert player.learning_rate_count() == {12}
  player.assert_params_are_theta()
  player.steps(EVERY)
  assert list(player.link.sent) == [4]
  # A second snapshot, after a long absence.
  player.link.base, player.link.rounds = 9, []
  player.link.news = Welcome(9, {}, snapshot)
  player.step()
  assert player.t == 28
  assert player.account("skipped_steps") == (12 + (28 - 16),)


def test_a_restarted_site_repeats_no_step_that_the_group_has():
  player = Player()
  player.link.answer = Welcome(6, {"0": [24, {"position": 9}]}, b"")
  player.enter(start=21)  # Has merged the rounds up to step 18.
  assert player.link.hello == 6
  assert player.t == 20  # Round 6 of step 21 is open: the site sends it again.
  assert player.batches.state == {"0": {"position": 9}}
  player = Player()
  player.link.answer = Welcome(6, {"0": [21, {"position": 9}]}, b"")
  player.link.rounds = [Closed(6, 0, 21, {0: 192}, {0: player.other()})]
  player.enter(start=21)
  assert player.t == 21
  assert player.batches.state == {"0": {"position": 0}}


def test_a_restarted_site_merges_a_round_in_the_replicas_that_have_not():
  taus = {"replicas": 4, "sites.count": 2, "overlap.taus": (1, 2, 1, 2)}
  player = Player(**taus)
  player.link.answer = Welcome(1, {}, b"")
  player.enter(start=EVERY + 1)  # Replica 0 has merged round 0.
  player.steps(1)
  [theta], x_M = player.state.outer.theta, player.state.params
  same = jax.tree.map(lambda x_M, x: np.array_equal(x_M[1], x), x_M, theta)
  assert jax.tree.all(same)


@pytest.mark.parametrize(
  "recorded", [{"0": 5}, {"0": [9, {"documents": 1, "position": "bad"}]}, {"0": "xy"}]
)
def test_a_bad_position_in_the_text_ends_no_site(recorded, capsys):
  player = Player()
  player.link.answer = Welcome(0, recorded, b"")
  player.enter()
  assert player.batches.state == {"0": {"position": 0}}
  assert "Site 0 cannot use the recorded position" in capsys.readouterr().err


def test_a_run_of_which_a_site_took_no_part_is_no_success():
  player = Player(**{"train.steps": EVERY + TAU}).enter(steps=EVERY)
  player.miss()
  player.steps(TAU)
  player.link.missing = [1]
  player.site.drain(player.t, player.state)
  assert player.account("absent") == ([1],)
  with pytest.raises(ConfigError, match="but site 1 of 2 sent no payload in any round"):
    player.site.close("finished")
  assert player.link.left == ["finished"]
  player.site.close("ended")


def test_a_signal_ends_every_wait():
  player = Player()
  player.ending = True
  start, left = lambda: player.site.enter(0, player.state), []
  session = types.SimpleNamespace(method=None, start=start, leave=left.append)
  assert train.loop(session) == {}
  assert len(left) == 1
  player.ending = False
  player.enter()
  player.step(ending=True)
  assert player.t == 1
  player.steps(2)
  assert 0 in player.link.sent
  player.step()
  player.step(ending=True)
  assert player.t == EVERY + TAU - 1  # The step before the merge.
  assert player.learning_rate_count() == {player.t}
  assert player.received() == []
  again = Player()
  again.state = player.state
  again.enter(start=player.t)
  assert again.link.hello == 0  # It has merged no round.
  # A merge after a step that the site does not train.
  slow = Player(**{"sites.pace": 0.5, "overlap.tau": 1}).enter(steps=1)
  slow.step(ending=True)
  assert slow.t == EVERY
