"""Messages survive the trip; other bytes raise only `BadMessage`."""

import json
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diloco.contrib.sites import messages
from diloco.contrib.sites.messages import BadMessage, Message

VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
  max_leaves=10,
)
FIELDS = st.dictionaries(st.text().filter(lambda name: name != "kind"), VALUES)


@given(kind=st.text(), fields=FIELDS, body=st.binary(max_size=messages.CHUNK))
def test_a_message_survives_the_trip(kind, fields, body):
  found = messages.unpack(messages.pack(Message(kind, fields, body)))
  assert (found.kind, found.fields, bytes(found.body)) == (kind, fields, body)


def framed(header: bytes, body: bytes = b"") -> bytes:
  return struct.pack(">I", len(header)) + header + body


@given(st.binary())
@example(b"")
@example(b"\0\0\0")
@example(framed(b"[" * 100_000))  # Deeper than Python's stack.
@example(framed(b"[]"))
@example(framed(b"7"))
@example(framed(b'"kind"'))
@example(framed(b"{}"))
@example(framed(b'{"kind": 1'))
@example(framed(b'{"kind": "\xff"}'))
@example(framed(b'{"kind": ' + b"9" * 5000 + b"}"))  # More digits than Python reads.
@example(struct.pack(">I", 1 << 31) + b"{}")
@example(framed(b'{"kind": "a"}', bytes(messages.LARGEST)))
@example(framed(b" " * (messages.LARGEST_HEADER + 1)))
def test_garbage_raises_only_bad_message(data):
  for garbage in (data, framed(data)):
    try:
      found = messages.unpack(garbage)
    except BadMessage:
      continue
    assert isinstance(json.loads(garbage[4 : len(garbage) - len(found.body)]), dict)


@pytest.mark.parametrize("value", [None, True, "3", 3.0, -1, 11, [], {}, 1 << 70])
def test_a_field_must_be_a_whole_number_in_its_range(value):
  with pytest.raises(BadMessage, match=r"chunk\.round is .* from 0 to 10"):
    messages.number(Message("chunk", {"round": value}), "round", 0, 10)
  assert messages.number(Message("chunk", {"round": 10}), "round", 0, 10) == 10


@given(st.binary(max_size=3 * messages.CHUNK), st.integers(0, 3 * messages.CHUNK))
@example(b"", 0)
@example(bytes(messages.CHUNK), 0)
@example(bytes(messages.CHUNK), messages.CHUNK)
def test_chunks_are_all_bytes_once_in_order(data, start):
  start = min(start, len(data))
  found = bytearray(data[:start])
  for offset, part in messages.chunks(data, start):
    assert offset == len(found)
    assert len(part) <= messages.CHUNK
    assert len(messages.pack(Message("chunk", {}, part))) < messages.LARGEST
    found += part
  assert found == data
