"""The ledger against sums over a list of syncs."""

import pytest
from conftest import update
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import resolve
from diloco.spec.shapes import num_params
from diloco.wire.ledger import Ledger, all_reduced_bytes

# Syncs (step, fragment, bytes) in the order of their steps.
SYNCS = st.lists(
  st.tuples(st.integers(1, 6), st.integers(0, 3), st.integers(0, 50)), max_size=12
).map(sorted)


def test_averages_count_as_bytes_but_not_as_syncs():
  ledger = Ledger()
  ledger.record_average("sparta", 1, 5)
  ledger.record_average("sparta", 2, 5)
  ledger.record(0, 2, 7)
  assert ledger.averages == {"sparta": [2, 10]}
  assert (ledger.total, ledger.syncs, ledger.peak) == (17, 1, 12)


@given(SYNCS)
def test_totals_and_the_peak_are_sums_over_fragments_and_steps(syncs):
  ledger = Ledger()
  for step, fragment, sent in syncs:
    ledger.record(fragment, step, sent)
  of_step = {t: sum(b for s, _, b in syncs if s == t) for t, _, _ in syncs}
  assert ledger.fragments == {
    str(p): [sum(q == p for _, q, _ in syncs), sum(b for _, q, b in syncs if q == p)]
    for p in {q for _, q, _ in syncs}
  }
  assert ledger.syncs == len(syncs)
  assert ledger.total == sum(of_step.values())
  assert ledger.peak == max(of_step.values(), default=0)
  if syncs:
    assert ledger.latest == [syncs[-1][0], of_step[syncs[-1][0]]]


@pytest.mark.parametrize(
  ("fields", "counted"),
  [
    ({}, [0, 0, 0, 0]),
    ({"warm_start.steps": 4}, [0, 3, 4, 4]),
    ({"algorithm": "data_parallel"}, [0, 3, 4, 9]),
  ],
)
def test_gradients_are_sent_in_joint_steps_only(tiny, fields, counted):
  update(tiny, fields)
  c = resolve(tiny)
  # A ring of two replicas sends every float32 value once.
  sent = [all_reduced_bytes(c, t) / (4 * num_params(c.model)) for t in (0, 3, 4, 9)]
  assert sent == counted
