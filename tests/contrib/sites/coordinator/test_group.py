"""The coordinator's outer state goes on from checkpoint and journal."""

import numpy as np
import pytest
from sites import make_calendar

from diloco.config import changed
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator.group import OuterGroup
from diloco.contrib.sites.coordinator.journal import Entry, Journal
from diloco.errors import ConfigError


def entry_of(calendar, number: int) -> Entry:
  """A closed round with random codes and scales, which are all finite."""
  rng, (step, fragment) = np.random.default_rng(number), calendar.rounds[number]
  draw = lambda: rng.integers(0, 120, calendar.payload_bytes(number), np.uint8)
  payloads = {site: draw().tobytes() for site in (0, 2)}
  tokens, data = {0: 10, 2: 20}, {"0": [step, {"at": number}]}
  return Entry(number, fragment, step, tokens, payloads, (1,), data, 0.5)


@pytest.mark.parametrize("every", [0, 10])
def test_a_killed_coordinator_has_the_same_outer_state_again(tmp_path, every):
  calendar = make_calendar(3, steps=30)
  calendar = Calendar(changed(calendar.config, {"checkpoint.every": every}))
  journal = Journal(tmp_path)
  group = OuterGroup(calendar, tmp_path, journal)
  first = group.snapshot()
  for number in range(len(calendar.rounds) - 1):
    entry = entry_of(calendar, number)
    journal.write(entry)
    group.apply(entry)
  expected = group.snapshot()
  assert expected[1] != first[1]
  assert bool(group._checkpoints.latest) == bool(every)
  group.close()  # Without a checkpoint of the newest rounds.
  again = OuterGroup(calendar, tmp_path, Journal(tmp_path))
  assert again.snapshot() == expected
  assert again.data == group.data
  again.close()


def test_the_last_checkpoint_has_the_final_sync(tmp_path):
  calendar = make_calendar(3, steps=32)
  fields = {"outer.final_sync": True, "checkpoint.every": 4}
  calendar = Calendar(changed(calendar.config, fields))
  assert [step for step, _ in calendar.rounds].count(32) == 1  # A checkpoint is due.
  group = OuterGroup(calendar, tmp_path, Journal(tmp_path))
  for number in range(len(calendar.rounds)):
    group.apply(entry_of(calendar, number))
  expected = group.snapshot()
  group.finish()
  group.close()
  again = OuterGroup(calendar, tmp_path, Journal(tmp_path))
  assert again.snapshot() == expected
  assert again.data == group.data != {}
  again.close()


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ({"round": 1}, r"has round 1 in its journal, but lacks round 0; restore journal/"),
    ({"step": 99}, "round 0 of another schedule in its journal"),
  ],
)
def test_a_round_that_does_not_follow_is_refused(tmp_path, change, said):
  calendar = make_calendar(3)
  group = OuterGroup(calendar, tmp_path, Journal(tmp_path))
  with pytest.raises(ConfigError, match=said):
    group.apply(entry_of(calendar, 0)._replace(**change))
  assert group.applied == 0
  group.close()
