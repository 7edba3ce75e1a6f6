"""Messages between sites and the coordinator (docs/sites.md). No JAX.

A message is a JSON header and bytes:

  4 bytes   length of the header, big-endian
  header    a JSON object; `kind` says which message this is
  the rest  a part of a payload or of a snapshot; often nothing
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

VERSION = 2
CHUNK = 1 << 14  # Bytes of a payload in one message: 8 ms of a link of 16 Mbit/s.
LARGEST_HEADER = 1 << 18  # Bytes; the largest header holds a config.
LARGEST = 4 + LARGEST_HEADER + CHUNK
METHOD = "/diloco.Coordinator/Session"  # The only call, a stream in both directions.


class BadMessage(ValueError):
  """Bytes that are no message of this protocol."""


class Message(NamedTuple):
  """A message: its kind, the other fields of its header, and its bytes."""

  kind: str
  fields: dict[str, Any]
  body: bytes | memoryview = b""


def pack(message: Message) -> bytes:
  """Writes a message."""
  header = json.dumps({"kind": message.kind, **message.fields}).encode()
  return b"".join((len(header).to_bytes(4), header, message.body))


def unpack(data: bytes) -> Message:
  """Reads a message.

  Raises:
    BadMessage: the bytes are no message.
  """
  size = int.from_bytes(data[:4])
  if size > LARGEST_HEADER or len(data) > LARGEST:
    raise BadMessage(f"a message of {len(data)} bytes is too large")
  try:
    fields = json.loads(data[4 : 4 + size])
    return Message(str(fields.pop("kind")), fields, memoryview(data)[4 + size :])
  except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
    raise BadMessage(f"{len(data)} bytes are no message ({error})") from error


def number(message: Message, field: str, low: int, high: int) -> int:
  """Reads a whole number of a header.

  Raises:
    BadMessage: the field is missing, or not a number from low to high.
  """
  value = message.fields.get(field)
  if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
    raise BadMessage(
      f"{message.kind}.{field} is {value!r}; it must be a whole number from {low} to"
      f" {high}"
    )
  return value


def chunks(
  data: bytes | bytearray | memoryview, start: int = 0
) -> Iterator[tuple[int, memoryview]]:
  """Cuts bytes into pairs (offset, part); empty bytes are one empty part."""
  view = memoryview(data)
  for offset in range(start, max(len(view), start + 1), CHUNK):
    yield offset, view[offset : offset + CHUNK]
