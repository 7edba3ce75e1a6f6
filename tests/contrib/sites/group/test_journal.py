"""Closed rounds are written once, and their files alone say which are closed."""

from sites import Brisk, closed_round, make_calendar, payload

from diloco.contrib.sites.group.journal import Closed, Journal, head_of, history
from diloco.contrib.sites.group.records import pack
from diloco.contrib.sites.group.rounds import Measured

CALENDAR = make_calendar(2)


def closed(number: int) -> Closed:
  payloads = {site: payload(CALENDAR, site, number) for site in (0, 1)}
  return closed_round(CALENDAR, number, payloads)


class Dropped(dict):
  """Rounds that another thread drops after a look at the keys."""

  __contains__ = lambda self, number: True


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
  # As in the heads of snapshots, so that an audit finds a site in all of them.
  assert first.headers[0]["tokens"].keys() == {"0", "1"}
  assert second.data == entry.data
  second._recent = Dropped()
  assert second.find(0) == entry
  # An answer that was lost is asked for again.
  assert first.write(entry)


def test_the_heads_of_snapshots_keep_the_headers_of_deleted_rounds(tmp_path):
  storage = Brisk(tmp_path)
  journal = Journal(storage)
  for number in range(3):
    journal.write(closed(number))
  storage.put(head_of(2), pack(journal.head([5], 0, 2)))
  storage.put(head_of(3), pack(journal.head([6], 2, 3)))
  storage.put(head_of(4), b"half of a fi")
  found = history(storage)
  assert [found[r]["step"] for r in range(3)] == [closed(r).step for r in range(3)]
  # A new process that knows the snapshot alone goes on after it.
  journal = Journal(storage)
  journal.begin(3, {"digests": [6], "data": {}, "rounds": []})
  journal.forget(3)
  journal.write(closed(3))
  assert (journal.closed, [*journal.headers]) == (4, [3])
