"""A site believes no wrong word of the coordinator."""

import zlib

import pytest

from diloco.sites.link import Link
from diloco.sites.messages import BadMessage, Message

CLOSED = {
  "round": 0,
  "published": 1,
  "fragment": 0,
  "tokens": {"1": 5},
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
