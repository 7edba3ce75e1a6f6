"""How a run is cut into the ranges of inner steps that are launched together."""

import functools
import itertools
import types

import pytest
from conftest import spans
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm.method import Method
from diloco.algorithm.streaming import Streaming
from diloco.spec.schedule import Schedule


def make(schedule: Schedule, overlaps: bool = True) -> Method:
  transport = types.SimpleNamespace(overlaps=overlaps)
  sync = types.SimpleNamespace(schedule=schedule, transport=transport)
  sync.overlap_steps = functools.partial(Streaming.overlap_steps, sync)
  return Method(None, sync)


@st.composite
def runs(draw):
  h = draw(st.integers(1, 12))
  taus = draw(st.lists(st.integers(0, h - 1), min_size=1, max_size=3))
  start = draw(st.integers(0, 30))
  last = start + draw(st.integers(0, 40))
  periods = draw(st.lists(st.integers(0, 15), max_size=2))
  return Schedule(draw(st.integers(1, 6)), h, tuple(taus)), start, last, periods


@given(runs())
def test_ranges_end_where_something_happens_and_leave_no_step_out(run):
  schedule, start, last, periods = run
  found = spans(make(schedule), start, last, periods)
  ranges = list(itertools.islice(found, last - start + 1))  # Even if they never end.
  assert [t for steps in ranges for t in steps] == list(range(start + 1, last + 1))
  event = lambda t: bool(schedule.sends(t) or schedule.arrivals(t))
  stops = lambda t: t == last or any(p and t % p == 0 for p in periods)
  for steps in ranges:
    assert not any(event(t) or stops(t) for t in steps[:-1])
    if schedule.sends(steps[0] - 1) and min(schedule.taus) > 0:
      assert event(steps[-1]) or stops(steps[-1])
    else:
      assert len(steps) == 1


NOTHING_SENT = make(Schedule(0, 4, (2,)))  # As in data-parallel.
NOT_ON_DEVICES = make(Schedule(1, 4, (2,)), overlaps=False)


@pytest.mark.parametrize("method", [NOTHING_SENT, NOT_ON_DEVICES])
def test_steps_that_hide_nothing_are_launched_one_by_one(method):
  ranges = list(spans(method, 3, 7, (5, 0)))
  assert ranges == [range(t, t + 1) for t in range(4, 8)]
