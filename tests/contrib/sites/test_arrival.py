"""Where the time of a site's start goes."""

import math
import subprocess
import sys
import time

import pytest
from sites import ARRIVAL

from diloco.contrib.sites import arrival
from diloco.contrib.sites.arrival import Arrival


def test_the_phases_follow_each_other_from_the_beginning():
  began = time.monotonic() - 100
  found = Arrival(began)
  for phase in arrival.PHASES:
    found.ends(phase)
  ended = time.monotonic()
  times = [found.seconds[phase] for phase in arrival.PHASES]
  assert found.seconds["start"] >= 100
  assert min(times) >= 0
  assert 100 <= sum(times) <= ended - began


def test_only_compilations_count_as_compiling():
  found = Arrival(0.0)
  found.listen("/jax/core/compile/backend_compile_duration", 2.0, fun_name="f")
  found.listen("/jax/core/compile/jaxpr_trace_duration", 4.0, fun_name="f")
  assert found.seconds == {"compiling": 2.0}


def test_a_process_began_before_it_asks_and_after_its_parent():
  ask = "from diloco.contrib.sites.arrival import process_began as b; print(b())"
  before = time.monotonic()
  began = float(subprocess.check_output([sys.executable, "-c", ask]))
  tick = 0.02  # Linux counts in hundredths of a second.
  assert before - tick <= began <= time.monotonic()
  assert arrival.process_began() < before


def test_an_arrival_is_one_sentence():
  assert arrival.text(ARRIVAL) == (
    "9.1 s: 5.0 s to start, 0.5 s for the answer of the group, 3.0 s for the first"
    " step, 0.6 s to receive rounds; compiling took 3.0 s of these"
  )


@pytest.mark.parametrize(
  "said",
  [
    *(None, 7, [], {}, {"start": 1.0}),
    *(ARRIVAL | {"rounds": x} for x in ("1", None, -1.0, math.nan, math.inf, [1])),
  ],
)
def test_what_is_no_arrival_counts_as_none(said):
  assert arrival.checked(said) == {}
  assert arrival.checked(ARRIVAL | {"more": "x" * 99}) == ARRIVAL
