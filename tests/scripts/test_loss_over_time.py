"""Whole runs over slow links: the clock without pauses, and what the plan expects."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "experiments"))

import loss_over_time  # noqa: E402


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


MEASURED = {"step_time": 0.01, "sync_time": 0.05, "latency": 0.0, "gbits": 4e-3}


def test_the_plan_waits_for_the_link():
  flags = loss_over_time.flags
  load = lambda name: loss_over_time.load_config(
    str(ROOT / "configs/wan.py"), flags(name)
  )
  plain = load(loss_over_time.PLAIN)
  sent = 32 * 141_920 / 4e6  # Seconds for the float32 gradients of a step.
  seconds = loss_over_time.predicted(plain, MEASURED)
  assert seconds == pytest.approx(450 * (sent + 0.01), rel=0.05)
  for name in loss_over_time.SETTINGS:
    fast = loss_over_time.predicted(load(name), MEASURED | {"gbits": 1e6})
    rounds = 0 if name == loss_over_time.PLAIN else 450 / load(name).sync_every
    assert fast == pytest.approx(450 * 0.01 + rounds * 0.05)
    assert loss_over_time.predicted(load(name), MEASURED) > fast


def test_the_probe_has_the_flags_of_the_run_but_no_folder():
  run = ["python", "-m", "diloco.main", "--config=c", "--process_id=1", "--workdir=w"]
  assert loss_over_time.as_probe(run) == [
    *("python", "-m", "diloco.contrib.simulate.plan", "--probe", "--json"),
    *("--config=c", "--process_id=1"),
  ]
