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

  @rule(site=SITES, ahead=st.integers(0, 2))
  def ready(self, site, ahead):
    self.rounds.ready(site, self.rounds.closed + ahead)
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


def rounds_of(sites: int, quorum: int = 1, first: int = 0, **window) -> Rounds:
  """Sites that send every 4 steps, of 2 s each: the round of step 4 r at 8 r."""
  steps = [4 * r for r in range(first + 40)]
  window = {"most_s": 10, "least_s": 0.5, "tau": 3, "steps": steps} | window
  rounds = Rounds(sites, quorum, Window(**window), closed=first)
  for site in range(sites):
    rounds.ready(site, first)
  for number in range(first, first + 5):
    send(rounds, range(sites), number, now=8 * number)
    assert rounds.close(now=8 * number) == Closing(number, (*range(sites),), (), 0)
  return rounds


def send(rounds: Rounds, sites, number: int, now: float) -> None:
  for site in sites:
    rounds.sent(site, number, now)


def test_a_site_that_misses_round_after_round_is_waited_for_less():
  rounds, waits = rounds_of(2, most_s=8, tau=0), []
  for number in range(5, 9):
    rounds.ready(1, number)
    rounds.sent(0, number, now=100 * number)
    waits.append(rounds.deadline() - 100 * number)
    assert rounds.close(now=rounds.deadline() - 0.1) is None
    assert rounds.close(now=rounds.deadline()).late == (1,)
  assert waits == [8, 4, 2, 2]
  rounds.sent(0, 9, now=1000)
  assert rounds.close(now=1000) == Closing(9, (0,), (), 0)
  send(rounds, (0, 1), 10, now=1100)
  assert rounds.close(now=1100) == Closing(10, (0, 1), (), 0)
  rounds.ready(1, 11)
  rounds.sent(0, 11, now=1200)
  assert rounds.deadline() == 1208


@pytest.mark.parametrize(
  ("fields", "wait"),
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
def test_a_round_waits_for_what_is_left_of_tau_steps(fields, wait):
  rounds = rounds_of(2, **fields)
  number, now = rounds.closed, 8 * rounds.closed
  rounds.sent(0, number, now)
  assert rounds.deadline() == now + wait
  assert rounds.close(now + wait).late == (1,)


def test_what_the_quorum_took_is_gone():
  rounds = rounds_of(3, quorum=2)
  rounds.sent(0, 5, now=40)  # It merges at 46.
  assert rounds.deadline() == math.inf
  rounds.sent(1, 5, now=44)
  assert rounds.deadline() == 46
  assert rounds.close(now=46) == Closing(5, (0, 1), (2,), 2)
  rounds.sent(0, 6, now=48)
  rounds.sent(1, 6, now=56)  # The first site waits already.
  assert rounds.close(now=56) == Closing(6, (0, 1), (), 0)
  rounds.ready(2, 7)
  rounds.sent(0, 7, now=56)
  rounds.sent(1, 7, now=64)
  assert rounds.deadline() == 64.25  # Half of the least wait, as it was late before.


def test_one_long_pause_does_not_change_the_time_of_a_step():
  rounds = rounds_of(2)
  for number in (5, 6):
    send(rounds, (0, 1), number, now=8 * number + 1000)
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


def outliers(*known):
  """Knows rounds with these norms of two sites."""
  made = Outliers(most_norm=10, least_cosine=-0.05)
  for norm in known:
    made.counted(0, [norm, norm])
  return made


EQUAL = dict.fromkeys(range(4), 100)


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


def test_each_reason_for_which_a_payload_is_refused_is_named():
  numbers = [(1.0, -0.06), (None, None), (2e7, 0.3), (1.0, -0.04)]
  measured = {site: Measured(*x) for site, x in enumerate(numbers)}
  assert outliers(1.0).refused(0, measured, EQUAL) == {
    0: "its mean cosine with the others is -0.06",
    1: "not all values are finite",
    2: "its norm is 2e+07, but 1 is usual",
  }
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
