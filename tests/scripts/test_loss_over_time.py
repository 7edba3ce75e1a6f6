"""Whole runs over slow links: the clock without pauses, and what the plan expects."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "experiments"))

import loss_over_time  # noqa: E402


def records(pause):
  """A step takes 2 s and is logged every 5 steps; an evaluation takes `pause`.

  Something compiles for 17 s before step 10.
  """
  found, clock = [], 100.0
  for step in range(5, 61, 5):
    found.append({"kind": "step", "step": step, "time": clock})
    if step % 20 == 0:
      found.append({"kind": "eval", "step": step, "loss_outer": 5.0 - step / 100})
    clock += 10.0 + (pause if step % 20 == 0 else 0.0) + 17.0 * (step == 5)
  return found


@pytest.mark.parametrize("pause", [0.0, 33.0])
def test_pauses_do_not_count(pause):
  curve = loss_over_time.curve(records(pause))
  assert curve == [(20, 40.0, 4.8), (40, 80.0, 4.6), (60, 120.0, 4.4)]
  assert loss_over_time.compute_seconds(records(pause)) == pytest.approx(2.0)


def test_the_plan_waits_for_the_link():
  options = loss_over_time.parse(["--out=/nowhere", "--steps=600"])
  plain = loss_over_time.resolved(options, loss_over_time.PLAIN)
  sent = 32 * 141_920 / 4e6  # Seconds for the float32 gradients of a step.
  seconds = loss_over_time.predicted(plain, 0.01, 4e6)
  assert seconds == pytest.approx(600 * (sent + 0.01), rel=0.05)
  for name in loss_over_time.SETTINGS:
    c = loss_over_time.resolved(options, name)
    fast = loss_over_time.predicted(c, 0.01, 1e15)
    assert fast == pytest.approx(600 * 0.01, rel=0.15)
    assert loss_over_time.predicted(c, 0.01, 1e6) > fast
