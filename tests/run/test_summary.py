"""What the summary says about rarely synchronised fragments."""

import pytest

from diloco.config import resolve
from diloco.run import summary


@pytest.mark.parametrize(
  ("steps", "said"),
  [(7, "only 1 time in 7"), (12, "only 2 times in 12"), (14, "only 2"), (15, "")],
)
def test_fewer_than_three_syncs_of_a_fragment_are_told(tiny, steps, said):
  # 4 fragments with sync_every=4: the last is sent at steps 7, 11, 15.
  tiny.train.steps = steps
  note = summary.note(resolve(tiny))
  assert said in note
  assert bool(note) == bool(said)


def test_data_parallel_has_no_such_note(tiny):
  tiny.algorithm, tiny.train.steps = "data_parallel", 1
  assert summary.note(resolve(tiny)) == ""
