"""Closed rounds are written once, and their files alone say which are closed."""

import json

import pytest
from sites import Brisk, closed_round, make_calendar, payload

from diloco.contrib.sites.group.journal import Closed, Journal, head_of
from diloco.contrib.sites.group.records import pack
from diloco.contrib.sites.group.rounds import Measured

CALENDAR = make_calendar(2)


def closed(number: int) -> Closed:
  payloads = {site: payload(CALENDAR, site, number) for site in (0, 1)}
  return closed_round(CALENDAR, number, payloads)


def test_a_round_is_read_as_it_was_written_and_written_once(tmp_path):
  first, second = Journal(Brisk(tmp_path)), Journal(Brisk(tmp_path))
  measured = {0: Measured(1.0), 1: Measured(None)}
  more = {"late": (2,), "refused": (2,), "waited_s": 0.5, "measured": measured}
  entry = closed(0)._replace(**more)
  assert first.write(entry)
  assert not second.write(closed(0))
  second.advance()
  assert (second.closed, second.find(0)) == (1, entry)
  assert second.headers == first.headers
  assert second.data == entry.data
  # An answer that was lost is asked for again.
  assert first.write(entry)


@pytest.mark.parametrize(
  "lines", [None, b"", b'{"round": 99}\nx\n', b"\xff\xfe\n[]\n", b"as it was"]
)
def test_lines_for_people_decide_nothing_and_come_back_in_full(tmp_path, lines):
  storage = Brisk(tmp_path)
  journal = Journal(storage)
  for number in range(3):
    journal.write(closed(number))
  storage.put(head_of(3), pack(journal.head([5], 0, 3)))
  journal.write_lines()
  path = tmp_path / "rounds.jsonl"
  before = path.read_bytes()
  assert [json.loads(x)["round"] for x in before.splitlines()] == [0, 1, 2]
  assert b"documents" not in before
  if lines is None:
    path.unlink()
  elif lines != b"as it was":
    path.write_bytes(before[:40] + lines + before[100:])
  # A new process that knows the snapshot alone.
  journal = Journal(storage)
  journal.forget(3)
  journal.begin(3, {"digests": [5], "data": {}, "rounds": []})
  journal.write(closed(3))
  assert journal.closed == 4
  journal.write_lines()
  assert path.read_bytes().startswith(before)
  assert [json.loads(x)["round"] for x in path.read_bytes().splitlines()][-1] == 3
