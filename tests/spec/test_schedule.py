"""The partition into fragments and the schedule, against the paper's examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.spec.fragments import Fragment, make_fragments
from diloco.spec.plugins import NAMES
from diloco.spec.schedule import Schedule, reaches


def test_patterns_match_figure_2():
  strided = make_fragments(6, 2, "strided")
  assert [f.layers for f in strided] == [(0, 3), (1, 4), (2, 5), ()]
  sequential = make_fragments(6, 2, "sequential")
  assert [f.layers for f in sequential] == [(0, 1), (2, 3), (4, 5), ()]
  assert [f.rest for f in strided] == [(), (), (), ("embed",)]
  assert make_fragments(3, 1, embedding="first")[0] == Fragment((), ("embed",))
  assert make_fragments(2, 1, "whole") == (Fragment((0, 1), ("embed",)),)


def test_a_plug_in_adds_a_pattern_and_another_name_is_refused(monkeypatch):
  ends = lambda num_layers, size: [[0, num_layers - 1], list(range(1, num_layers - 1))]
  monkeypatch.setitem(NAMES["fragments.pattern"], "ends", ends)
  found = make_fragments(6, 2, "ends")
  assert [f.layers for f in found] == [(0, 5), (1, 2, 3, 4), ()]
  with pytest.raises(ConfigError, match=r"pattern is .end.; choose one of strided"):
    make_fragments(6, 2, "end")
  for layers in ([[0], [2]], [[0, 1], [1, 2]], [[0, 1, 2], []], [[0, 1, 2, 3]]):
    monkeypatch.setitem(NAMES["fragments.pattern"], "bad", lambda *_, x=layers: x)
    with pytest.raises(ConfigError, match="return each of the 3 layers once, and no"):
      make_fragments(3, 2, "bad")


@given(
  n=st.integers(1, 40),
  size=st.integers(1, 40),
  pattern=st.sampled_from([*NAMES["fragments.pattern"], "whole"]),
  embedding=st.sampled_from(["first", "last"]),
)
def test_every_layer_is_in_exactly_one_fragment(n, size, pattern, embedding):
  fragments = make_fragments(n, min(size, n), pattern, embedding)
  layers = [layer for f in fragments for layer in f.layers]
  assert sorted(layers) == list(range(n))
  assert sum(len(f.rest) for f in fragments) == 1
  if pattern != "whole":
    assert len(fragments) == -(-n // min(size, n)) + 1
    assert max(len(f.layers) for f in fragments) <= min(size, n)
    # At most two shapes of block fragment, whatever P: compiled programs do
    # not grow with it.
    assert len({len(f.layers) for f in fragments if f.layers}) <= 2


def test_a_fragment_takes_its_share_of_the_parameters_shapes():
  shapes = {
    "blocks": {"ff": {"up": (6, 8, 32)}, "norm": (6, 8)},
    "embed": {"tokens": (100, 8)},
  }
  blocks = {"ff": {"up": (2, 8, 32)}, "norm": (2, 8)}
  assert Fragment((1, 4)).shapes(shapes) == {"blocks": blocks}
  assert Fragment((), ("embed",)).shapes(shapes) == {"embed": shapes["embed"]}
  assert Fragment(tuple(range(6)), ("embed",)).shapes(shapes) == shapes


def test_the_schedule_matches_the_papers_example():
  schedule = Schedule(num_fragments=2, sync_every=100, taus=(0, 0))
  sends = {p: [t for t in range(1, 400) if schedule.is_sent(p, t)] for p in (0, 1)}
  assert sends == {0: [100, 200, 300], 1: [150, 250, 350]}


schedules = st.integers(1, 30).flatmap(
  lambda h: st.builds(
    Schedule,
    num_fragments=st.integers(1, 12),
    sync_every=st.just(h),
    taus=st.lists(st.integers(0, h - 1), min_size=1, max_size=3).map(tuple),
  )
)


@given(schedules, st.integers(1, 120), st.integers(0, 30))
def test_what_was_sent_arrives_once_and_nothing_after_the_last_step(
  schedule, last, after
):
  t = last + after
  expected = {}
  for sent in range(1, last + 1):
    for p in schedule.sends(sent):
      mask = tuple(sent + tau == t for tau in schedule.taus)
      if any(mask):
        expected[p] = mask
  assert dict(schedule.arrivals(t, last_send=last)) == expected


@given(schedules)
def test_the_earliest_arrival_does_the_outer_step(schedule):
  first = schedule.taus.index(min(schedule.taus))
  for t in range(1, 4 * schedule.sync_every):
    found = schedule.arrivals(t)
    assert found == schedule.arrivals(t, last_send=t)
    outer = [p for p in range(schedule.num_fragments) if schedule.is_outer_step(p, t)]
    assert outer == [p for p, mask in found if mask[first]]


@given(schedules, st.integers(1, 120))
def test_fragments_in_flight_are_sent_and_not_yet_updated(schedule, t):
  expected = {}
  for p in range(schedule.num_fragments):
    for s in range(1, t + 1):
      if schedule.is_sent(p, s) and s + min(schedule.taus) > t:
        expected[p] = s
  assert schedule.in_flight(t) == expected


@given(schedules, st.integers(0, 200))
def test_num_sends_equals_a_count_over_all_steps(schedule, steps):
  for p in range(schedule.num_fragments):
    walked = sum(schedule.is_sent(p, t) for t in range(1, steps + 1))
    assert schedule.num_sends(p, steps) == walked


@given(p=st.integers(1, 6), h=st.integers(1, 12), data=st.data())
def test_the_steps_that_hide_an_exchange_end_at_the_next_event(p, h, data):
  taus = tuple(data.draw(st.lists(st.integers(0, h - 1), min_size=1, max_size=3)))
  schedule = Schedule(p, h, taus)
  happens = lambda t: bool(schedule.sends(t) or schedule.arrivals(t))
  overlap = [schedule.overlap_steps(t) for t in range(1, 6 * h)]
  assert schedule.longest_overlap == max(overlap)
  for t, k in enumerate(overlap[: 4 * h], start=1):
    if not schedule.sends(t) or min(taus) == 0:
      assert k == 0
      continue
    assert 1 <= k <= min(taus)
    assert happens(t + k)
    assert not any(happens(s) for s in range(t + 1, t + k))


def test_what_was_drained_is_not_sent_or_received_again():
  """H=4, P=2, tau=3: at step 8 fragment 0 was sent, and the drain received it."""
  extended = Schedule(2, 4, (3, 3), drained=8)
  assert Schedule(2, 4, (3, 3)).sends(8) == [0]
  assert not extended.sends(8)
  assert not extended.in_flight(8)
  assert [t for t in range(8, 15) if extended.sends(t)] == [10, 12, 14]


@pytest.mark.parametrize(
  ("first", "last", "every", "due"),
  [
    *[(5, 5, 5, True), (6, 6, 5, False), (3, 5, 5, True), (5, 5, 0, False)],
    *[(4, 6, 5, True), (6, 9, 5, False), (6, 21, 5, True)],  # A site's step jumps,
    (7, 4, 5, False),  # or goes back.
  ],
)
def test_what_is_due_is_found_after_a_jump_over_it(first, last, every, due):
  assert reaches(first, last, every) == due
