"""A site believes no wrong word of the coordinator."""

import types
import zlib

import grpc
import pytest

from diloco.contrib.sites import link as link_lib
from diloco.contrib.sites import messages
from diloco.contrib.sites.link import Block, Link
from diloco.contrib.sites.messages import BadMessage, Message
from diloco.errors import ConfigError

CLOSED = {
  "round": 0,
  "published": 1,
  "fragment": 0,
  "tokens": {"1": 5},
  "per_step": {"1": 2},
  "lent": {"2": [1, {"4": [3, 5]}, 7, 8]},
  "crc32": [7],
  "inside": 2,
}


def make_link(part: bytes | None = None) -> Link:
  link = Link(lambda: None, "here", {"site": 0}, print, room=4)
  if part is not None:
    link._receive(Message("chunk", {"round": 0, "site": 1, "offset": 0}, part))
  return link


@pytest.mark.parametrize(
  ("part", "message", "said"),
  [
    (None, Message("closed", {}), "a wrong 'closed'"),
    (
      b"ab",
      Message("chunk", {"round": 0, "site": 1, "offset": 7}, b"c"),
      "a chunk at 7 after 2 bytes",
    ),
    (b"ab", Message("closed", CLOSED | {"round": 1}), "round 1 after round -1"),
    (b"ab", Message("closed", CLOSED), "another payload of site 1 than round 0 has"),
    (None, Message("closed", CLOSED), "another payload of site 1 than round 0 has"),
  ],
)
def test_a_wrong_message_ends_the_connection(part, message, said):
  link = make_link(part)
  with pytest.raises(BadMessage, match=said):
    link._receive(message)
  assert link.newest()[0] == 0


def test_a_payload_with_the_right_sum_is_taken():
  link = make_link(b"ab")
  link._receive(Message("closed", CLOSED | {"crc32": [zlib.crc32(b"ab")]}))
  assert link.closed(0).payloads == {1: b"ab"}
  assert (link.closed(0).tokens, link.closed(0).per_step) == ({1: 5}, {1: 2})
  assert link.closed(0).lent == {2: Block(1, {"4": [3, 5]}, 7, 8)}


def closed(*sites: int) -> Message:
  """Says that the round has the same payload of each of these sites."""
  sums, tokens = [zlib.crc32(b"ab")] * len(sites), {str(site): 5 for site in sites}
  return Message("closed", CLOSED | {"tokens": tokens, "crc32": sums})


def test_the_coordinator_need_not_return_what_this_process_sent():
  link = make_link()
  link.send(0, b"ab", {})
  link._receive(closed(0))
  assert link.closed(0).payloads == {0: b"ab"}


def test_a_site_that_started_again_takes_back_what_it_sent_before():
  link = make_link()
  link._receive(Message("chunk", {"round": 0, "site": 0, "offset": 0}, b"ab"))
  link._receive(closed(0))
  assert link.closed(0).payloads == {0: b"ab"}


def test_the_own_payload_does_not_stand_for_that_of_another_site():
  link = make_link()
  link.send(0, b"ab", {})
  with pytest.raises(BadMessage, match="another payload of site 1 than round 0 has"):
    link._receive(closed(0, 1))


def test_a_connection_that_comes_back_repeats_what_is_open():
  fields = {"round": 2, "published": 2, "snapshot": 0, "data": {}, "skip": 3, "run": ""}
  welcome, link = Message("welcome", fields | {"started": True}), make_link()
  absent = welcome._replace(fields=welcome.fields | {"published": 7, "snapshot": 1})

  def told() -> list[tuple[str, int]]:
    found = []
    while not link._requests.empty():
      message = messages.unpack(link._requests.get())
      found.append((message.kind, message.fields["round"]))
    return found

  link._receive(welcome)
  assert link.welcome().round == 2
  link.ready(3)
  link.send(1, b"too late", {})
  link.send(4, b"ab", {})
  assert told() == [("ready", 3), ("chunk", 4)]
  link._entered = False  # As at the begin of a connection.
  link.ready(3)
  link.send(5, b"cd", {})
  assert told() == []
  link._receive(welcome)
  assert told() == [("chunk", 4), ("chunk", 5), ("ready", 3)]
  assert link.welcome() is None  # Its own state is still right.
  link._entered = False
  link._receive(absent)
  assert told() == []
  link._receive(Message("state", {}, b"x"))
  assert link.welcome().snapshot == b"x"
  assert told() == [("ready", 3)]  # What it sent is part of the snapshot, or lost.
  assert link.newest() == (2, 7)


@pytest.fixture
def connect(monkeypatch):
  """Runs sessions (seconds, rounds received, status) by a clock of its own."""
  pauses, lines = list[float](), list[str]()
  clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

  def sleep(seconds: float):
    pauses.append(seconds)
    clock.now += seconds

  def run(*sessions: tuple[float, int, grpc.StatusCode], reason="gone", known=False):
    link, script = Link(lambda: None, "here", {}, lines.append, room=4), iter(sessions)
    link._known = known

    def session():
      seconds, rounds, status = next(script, (0, 0, None))
      clock.now += seconds
      link._next, link._entered = link._next + rounds, seconds > 0
      link._leaving = status is None
      return status, reason

    link._session = session
    link._keep()
    return pauses, lines

  clock.sleep = sleep
  monkeypatch.setattr(link_lib, "time", clock)
  return run


def test_pauses_grow_until_a_round_comes_or_the_connection_lasts(connect):
  lost = (0, 0, grpc.StatusCode.UNAVAILABLE)
  a_round, a_while = (1, 1, lost[2]), (11, 0, lost[2])
  pauses, lines = connect(*[lost] * 7, a_round, *[lost] * 3, (9, 0, lost[2]), a_while)
  assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 0.2, 0.4, 0.8, 1.6, 3.2, 0.2]
  # Once for each loss of more than a second.
  assert lines == ["No coordinator at here (gone). This site tries again."] * 2


def test_a_second_process_of_a_site_is_refused_after_the_first_had_time_to_go(connect):
  doubled = (0, 0, grpc.StatusCode.ALREADY_EXISTS)
  connect(*[doubled] * 13)  # 41 s.
  with pytest.raises(ConfigError, match="the coordinator at here gone"):
    connect(*[doubled] * 14)  # 46 s.


def test_a_group_that_says_nothing_is_refused_before_the_first_welcome(connect):
  silent = [(0, 0, grpc.StatusCode.UNAVAILABLE)] * 3
  connect(*silent[:2], reason="Socket closed")
  connect(*silent, reason="Socket closed", known=True)
  with pytest.raises(ConfigError, match="here ends every connection at once; give --t"):
    connect(*silent, reason="Socket closed")
