"""The files that a site writes: its record and its payloads. No JAX.

A file is a JSON line, bytes, and the CRC-32 of both. A file that is cut short or
damaged counts as missing, and is read again later.
"""

import contextlib
import json
import zlib
from typing import NamedTuple, TypedDict, cast

from diloco.contrib.sites.calendar import Calendar
from diloco.util.storage import Storage
from diloco.util.types import Json


def pack(head: Json, *bodies: bytes | memoryview) -> bytes:
  """Joins a JSON object and bytes, with a checksum."""
  data = b"".join((json.dumps(head).encode(), b"\n", *bodies))
  return data + zlib.crc32(data).to_bytes(4)


def unpack(content: bytes) -> tuple[Json, memoryview] | None:
  """Returns what `pack` has joined; None for any other bytes."""
  whole, end = memoryview(content), content.find(b"\n")
  if zlib.crc32(whole[:-4]).to_bytes(4) != whole[-4:]:
    return None
  with contextlib.suppress(RecursionError, ValueError):
    head = json.loads(content[:end])
    return (head, whole[end + 1 : -4]) if isinstance(head, dict) else None
  return None


def read(storage: Storage, name: str) -> tuple[Json, memoryview] | None:
  """Reads a file that `pack` has made; None if it is missing or incomplete."""
  return unpack(storage.get(name) or b"")


class Record(TypedDict):
  """What a site reports about itself; a site without a new record counts as gone.

  Attributes:
    session: random name of the site's process.
    beat: counts the records of this process.
    ready: the first round that the site will send; None before its first inner step.
    sent: open rounds whose payload is in the storage.
    digests: {number of applied rounds: a CRC-32 of each fragment's outer state}.
    reason: why the site leaves; "": it does not leave.
  """

  session: str
  beat: int
  ready: int | None
  sent: list[int]
  digests: dict[str, list[int]]
  reason: str


def record_of(site: int) -> str:
  """Names the file with the record of a site."""
  return f"sites/{site}"


def payload_of(number: int, site: int) -> str:
  """Names the file with the payload of a site in a round."""
  return f"payloads/{number:09d}.site-{site}"


def read_record(storage: Storage, calendar: Calendar, site: int) -> Record | None:
  """Returns the record of a site; None if it is missing or invalid."""
  unpacked = read(storage, record_of(site))
  return as_record(unpacked[0], calendar) if unpacked else None


def as_record(head: Json, calendar: Calendar) -> Record | None:
  """Returns these values as a record; None if they are invalid."""
  is_round = lambda x: is_whole(x, 0, len(calendar.rounds))
  sent, digests, ready = (head.get(name) for name in ("sent", "digests", "ready"))
  if not (isinstance(sent, list) and isinstance(digests, dict)):
    return None
  sound = (
    all(isinstance(head.get(name), str) for name in ("session", "reason"))
    and is_whole(head.get("beat"), 0)
    and (ready is None or is_round(ready))
    and all(map(is_round, sent))
    and all(r.isdigit() and isinstance(x, list) for r, x in digests.items())
  )
  return cast(Record, head) if sound else None


def is_whole(value: object, least: int, most: float = float("inf")) -> bool:
  """Returns whether a value is a whole number in a range."""
  return type(value) is int and least <= value <= most


class Payload(NamedTuple):
  """A payload of one site.

  Attributes:
    tokens: number of tokens on which each replica trained for this payload.
    per_step: tokens of one inner step of a replica.
    data: {shard: [step, position in its text]} of all shards of the site.
    body: uint8 [replicas of the site, 1, bytes].
  """

  tokens: int
  per_step: int
  data: Json
  body: bytes | memoryview


def check_payload(
  calendar: Calendar, number: int, site: int, head: Json, body: memoryview
) -> Payload:
  """Checks and reads a payload's header.

  The number of tokens sets the weight of the payload. So it must fit the inner steps
  that the site can have trained since the fragment's previous send, with a batch that
  the config allows.

  Args:
    calendar: of the whole group, without one site's own fields.

  Raises:
    ValueError: this cannot be a payload of the round.
  """
  c, step = calendar.config, calendar.rounds[number][0]
  said = f"its payload of round {number} has"
  if len(body) != calendar.payload_bytes(number):
    wanted = calendar.payload_bytes(number)
    raise ValueError(f"{said} {len(body)} bytes, not {wanted}")
  length, steps = c.model.seq_len, calendar.steps_behind(number, 0)
  tokens, per_step = cast(int, head.get("tokens")), cast(int, head.get("per_step"))
  most = c.tokens_per_step // calendar.replicas_per_site
  if not is_whole(per_step, length, most) or per_step % length:
    raise ValueError(
      f"{said} {str(per_step)[:30]} tokens per step, not those of 1 to"
      f" {most // length} sequences of {length}"
    )
  if not is_whole(tokens, per_step, per_step * steps) or tokens % per_step:
    raise ValueError(
      f"{said} {str(tokens)[:30]} tokens, not those of 1 to {steps} steps of {per_step}"
    )
  data, shards = head.get("data"), calendar.shards_of(site)
  if not isinstance(data, dict) or sorted(data) != sorted(shards):
    raise ValueError(f"{said} no positions of exactly the shards {', '.join(shards)}")
  for at in data.values():
    place = at[1] if isinstance(at, list) and len(at) == 2 and at[0] == step else None
    if not isinstance(place, dict) or not {"documents", "position"} <= place.keys():
      raise ValueError(f"{said} a position in the text that is none: {str(at)[:60]}")
  return Payload(tokens, per_step, data, bytes(body))
