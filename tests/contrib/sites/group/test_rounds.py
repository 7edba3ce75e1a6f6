"""Which round closes when, and with whom: all orders of events, and single stories."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from diloco.contrib.sites.group.rounds import (
  Closing,
  Measured,
  Outliers,
  Rounds,
  Window,
)

SITES = st.integers(0, 3)


class Machine(RuleBasedStateMachine):
  """Four sites do anything; a model of what must hold is checked at every closing."""

  @initialize(
    quorum=st.integers(1, 4),
    grace=st.sampled_from([0.0, 1.0, 5.0]),
    least=st.sampled_from([0.0, 0.5, 9.0]),
    tau=st.integers(0, 2),
    first=SITES,
  )
  def start(self, quorum, grace, least, tau, first):
    self.quorum, self.now = quorum, 100.0
    self.grace = min(grace, least) if tau else grace  # The shortest wait.
    window = Window(grace, least, tau, steps=range(1000))
    self.rounds = Rounds(4, quorum, window, closed=first)
    self.closings, self.missed = [], set()  # Sites that missed their last round.
    self.first = first
    self.sent = {}  # {round: {site: when}}
    self.waited_for = {}  # {site: rounds that closed without it since its `ready`}
    self.expected = dict.fromkeys(range(4), first)  # {site: its first round}
    if first:
      self.rounds.expect_return((0, 1))
      self.waited_for |= {0: 0, 1: 0}

  @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
  def time_goes_by(self, seconds):
    """Asks at the deadline, if it comes before."""
    end = self.now + seconds
    while self.rounds.deadline() <= end:
      self.now = max(self.now, self.rounds.deadline())
      closing = self.rounds.close(self.now)
      assert closing is not None, "not closed at its deadline"
      self.check(closing)
    self.now = end

  @rule(site=SITES)
  def join(self, site):
    self.rounds.join(site)

  @rule(site=SITES, ahead=st.integers(0, 2))
  def ready(self, site, ahead):
    self.rounds.ready(site, self.rounds.closed + ahead)
    if self.rounds.members[site].first < math.inf:
      self.waited_for[site], self.expected[site] = 0, self.rounds.closed + ahead

  @rule(site=SITES)
  def leave(self, site):
    self.rounds.leave(site)

  @rule(site=SITES, ahead=st.integers(0, 2))
  def send(self, site, ahead):
    number = self.rounds.closed + ahead
    self.rounds.sent(site, number, self.now)
    self.sent.setdefault(number, {}).setdefault(site, self.now)
    assert self.rounds.has(site, number)

  @rule()
  def close(self):
    closing = self.rounds.close(self.now)
    if closing:
      self.check(closing)

  def check(self, closing):
    sent = self.sent.pop(closing.round)
    assert closing.round == self.first + len(self.closings)
    assert closing.members == tuple(sorted(sent))
    assert len(closing.members) >= self.quorum
    # The quorum was complete when the site number `quorum` sent.
    quorum_at = sorted(sent.values())[self.quorum - 1]
    assert closing.waited_s == pytest.approx(self.now - quorum_at)
    assert not set(closing.late) & set(closing.members)
    # A site that is missing delays the others once until it says `ready` again.
    for site in closing.late:
      assert closing.round >= self.expected[site]
      self.waited_for[site] += 1
      assert self.waited_for[site] == 1
      # Sites that missed a round before are waited for in a part of the window.
      assert self.now >= quorum_at + self.grace / 4
    if any(site not in self.missed for site in closing.late):
      assert self.now >= quorum_at + self.grace
    self.missed |= set(closing.late)
    self.missed -= set(closing.members)
    self.closings.append(closing)

  @invariant()
  def a_closed_round_stays_closed(self):
    if self.closings:
      number = self.closings[-1].round
      assert self.rounds.closed == number + 1
      assert not any(self.rounds.has(site, number) for site in range(4))

  @invariant()
  def nothing_is_due_without_a_quorum(self):
    if hasattr(self, "sent") and len(self.sent.get(self.rounds.closed, ())) < (
      self.quorum
    ):
      assert self.rounds.deadline() == math.inf
      assert self.rounds.close(self.now) is None


Machine.TestCase.settings = settings(
  max_examples=150, stateful_step_count=40, deadline=None
)
TestRounds = Machine.TestCase


def rounds_of(sites: int, quorum: int = 1, grace_s: float = 10) -> Rounds:
  rounds = Rounds(sites, quorum, Window(grace_s))
  for site in range(sites):
    rounds.join(site)
    rounds.ready(site, 0)
  return rounds


def test_a_missing_site_delays_the_others_once():
  rounds = rounds_of(2)
  rounds.sent(0, 0, now=0)
  assert rounds.close(now=9.9) is None
  assert rounds.close(now=10) == Closing(0, (0,), (1,), 10)
  assert rounds.members[1].first == math.inf
  rounds.sent(0, 1, now=11)
  assert rounds.close(now=11) == Closing(1, (0,), (), 0)
  # A payload of a late site counts if it comes in time.
  rounds.sent(1, 2, now=12)
  rounds.sent(0, 2, now=12)
  assert rounds.close(now=12) == Closing(2, (0, 1), (), 0)
  rounds.ready(1, 3)
  rounds.sent(0, 3, now=13)
  assert rounds.close(now=22.9) is None


def test_a_site_that_misses_round_after_round_is_waited_for_less():
  rounds = rounds_of(2, grace_s=8)
  waits = []
  for number in range(4):
    rounds.ready(1, number)
    rounds.sent(0, number, now=100 * number)
    waits.append(rounds.deadline() - 100 * number)
    assert rounds.close(now=rounds.deadline()).late == (1,)
  assert waits == [8, 4, 2, 2]
  rounds.ready(1, 4)
  rounds.sent(1, 4, now=500)
  rounds.sent(0, 4, now=500)
  rounds.close(now=500)
  rounds.sent(0, 5, now=600)
  assert rounds.deadline() == 608


def paced(tau=3, least_s=0.5, first=0):
  """Two sites that send every 4 steps, of 2 s each: the round of step 4 r at 8 r."""
  window = Window(10, least_s, tau, steps=[4 * r for r in range(first + 40)])
  rounds = Rounds(2, 1, window, closed=first)
  for site in (0, 1):
    rounds.join(site)
    rounds.ready(site, first)
  for number in range(first, first + 5):
    for site in (0, 1):
      rounds.sent(site, number, now=8 * number)
    assert rounds.close(now=8 * number).waited_s == 0
  return rounds


@pytest.mark.parametrize(
  ("fields", "window"),
  [
    ({}, 6),  # Three steps of 2 s.
    ({"first": 7}, 6),  # After a restart.
    ({"tau": 1}, 2),
    ({"tau": 1, "least_s": 3.0}, 3),
    ({"tau": 7}, 10),  # Not more than the longest wait.
    ({"tau": 0}, 10),  # Nothing hides a wait.
    ({"tau": 1, "least_s": 12.0}, 10),
  ],
)
def test_a_round_waits_for_what_is_left_of_tau_steps(fields, window):
  rounds, number = paced(**fields), fields.get("first", 0) + 5
  rounds.sent(0, number, now=8 * number)
  assert rounds.deadline() == 8 * number + window
  assert rounds.close(now=8 * number + window).late == (1,)


def test_what_the_quorum_took_is_gone():
  window = Window(10, 0.5, 3, steps=[4 * r for r in range(9)])
  rounds = Rounds(3, 2, window)
  for site in range(3):
    rounds.join(site)
    rounds.ready(site, 0)
  for number in range(3):
    for site in range(3):
      rounds.sent(site, number, now=8 * number)
    rounds.close(now=8 * number)
  rounds.sent(0, 3, now=24)  # It merges at 30.
  assert rounds.deadline() == math.inf
  rounds.sent(1, 3, now=28)
  assert rounds.deadline() == 30
  assert rounds.close(now=30) == Closing(3, (0, 1), (2,), 2)
  rounds.sent(0, 4, now=32)
  rounds.sent(1, 4, now=40)  # The first site waits already.
  assert rounds.close(now=40) == Closing(4, (0, 1), (), 0)
  rounds.ready(2, 5)
  rounds.sent(0, 5, now=40)
  rounds.sent(1, 5, now=48)
  assert rounds.deadline() == 48.25  # Half of the least wait, as it was late before.


def test_one_long_pause_does_not_change_the_time_of_a_step():
  rounds = paced()
  for number in (5, 6):
    for site in (0, 1):
      rounds.sent(site, number, now=8 * number + 1000)
    rounds.close(now=8 * number + 1000)
  rounds.sent(0, 7, now=1056)
  assert rounds.deadline() == 1056 + 6


def test_the_first_rounds_and_the_final_sync_wait_longest():
  window = Window(10, 0.5, 3, steps=[0, 4])
  assert window.seconds(0, quorum_at=0) == 10
  for number in range(3):
    window.sent(number, now=8 * number)
  assert [window.seconds(number, 8 * number) for number in range(3)] == [6, 6, 10]


def found(*norms):
  return {k: Measured(norm) for k, norm in enumerate(norms)}


def outliers(*known, fragment=0):
  """Knows rounds with these norms of two sites."""
  made = Outliers(most_norm=10, least_cosine=-0.05)
  for norm in known:
    made.counted(fragment, [norm, norm])
  return made


EQUAL = {0: 100, 1: 100, 2: 100}


@pytest.mark.parametrize(
  ("norms", "refused"),
  [
    ((1.0, 10.0), []),  # Ten times the usual is allowed,
    ((1.0, 10.1), [1]),  # and more is not.
    ((0.0, 1e-9), []),  # Small payloads harm nobody.
    ((None, 1.0), [0]),
    ((None, None), [0, 1]),
    ((20.0, 20.0), []),  # The whole group changes.
    ((20.0,), [0]),  # Nobody else says so.
    ((20.0, None), [0, 1]),
    ((1e9, 1.0, 1e9), [0, 2]),
  ],
)
def test_a_payload_far_above_the_usual_norm_is_refused(norms, refused):
  assert list(outliers(1.0, 1.0).refused(0, found(*norms), EQUAL)) == refused


def test_the_reasons_name_the_numbers():
  measured = {0: Measured(1.0, -0.2), 1: Measured(None), 2: Measured(2e7, 0.3)}
  assert outliers(1.0).refused(0, measured, EQUAL) == {
    0: "its mean cosine with the others is -0.20",
    1: "not all values are finite",
    2: "its norm is 2e+07, but 1 is usual",
  }


def test_a_payload_that_points_away_from_the_others_is_refused():
  measured = {0: Measured(1.0, 0.1), 1: Measured(1.0, -0.04), 2: Measured(1.0, -0.06)}
  assert list(outliers(1.0).refused(0, measured, EQUAL)) == [2]
  assert not Outliers(10, -1).refused(0, {0: Measured(1.0, -1.0)}, EQUAL)


def test_the_usual_norm_is_that_of_the_fragment_and_of_the_last_rounds():
  made = outliers(*[1.0] * 8, *[30.0] * 5)
  assert not made.refused(0, found(100.0), EQUAL)
  assert made.refused(0, found(301.0), EQUAL)
  assert not made.refused(1, found(1e9), EQUAL)  # Nothing is known of this fragment,
  assert not made.refused(1, found(9.0, 1.0), EQUAL)  # except in the same round.
  assert list(made.refused(1, found(11.0, 1.0), EQUAL)) == [0]
  # A site that joined late has a tenth of the steps, and so of the norm.
  assert not made.refused(1, found(11.0, 1.0), {0: 100, 1: 10})
  assert not Outliers(0, -1).refused(0, found(1e30, 1.0), EQUAL)
