"""Whole runs over slow links: the clock without pauses."""

import loss_over_time
import pytest


def records(pause):
  """A step takes 2 s, and from 5 steps before a round's end on 4 s; logged every 5.

  An evaluation takes `pause`, and something compiles for 17 s before step 10.
  """
  found, clock = [], 100.0
  for step in range(5, 121, 5):
    found.append({"kind": "step", "step": step, "time": clock})
    if step % 35 == 0 or step == 120:
      found.append({"kind": "eval", "step": step, "loss_outer": 5.0 - step / 100})
    clock += 10.0 + 10.0 * (step % 20 == 15) + pause * (step % 35 == 0)
    clock += 17.0 * (step == 5)
  return found


@pytest.mark.parametrize("pause", [0.0, 33.0])
def test_pauses_do_not_count(pause):
  curve = loss_over_time.curve(records(pause), sync_every=20)
  steps, seconds, losses = zip(*curve)
  assert (steps, losses) == ((35, 70, 105, 120), (4.65, 4.3, 3.95, 3.8))
  # The measured part, from step 30 on, has 5 of 18 intervals of 20 s.
  begin = 30 * (13 * 10 + 5 * 20) / 90
  assert seconds == pytest.approx([begin + x for x in (10, 100, 190, 230)])
