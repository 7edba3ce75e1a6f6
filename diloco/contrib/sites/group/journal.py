"""The closed rounds of a group: one file per round, written once. No JAX.

These files decide which rounds are closed. If a holder of the lease finds the file of a
round, it takes that round as it is. After a snapshot of the outer state, old rounds
are deleted; the file `.head` of the snapshot keeps their headers for ever.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diloco.contrib.sites.group.records import pack, read
from diloco.contrib.sites.group.rounds import Measured
from diloco.util.storage import Storage
from diloco.util.types import Json

FOLDER = "journal"
# Exceptions that values of an unexpected kind cause.
_DAMAGE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
_RECENT = 2  # Number of rounds that stay in memory with their payloads.


class Closed(NamedTuple):
  """A closed round.

  Attributes:
    round: its number.
    fragment: the fragment p.
    step: the inner step t after which the fragment was sent.
    tokens: {site: tokens on which each of its replicas trained for the payload}, in
      ascending order; the keys are the members.
    payloads: {site: bytes of uint8 [replicas of the site, 1, bytes]}.
    per_step: {site: tokens of one of its replicas' inner steps}; {}: all are equal.
    late: the sites that were expected and did not send.
    refused: the sites whose payloads came in time, but had bad numbers.
    measured: norm and cosine of all payloads that came in time, also if refused.
    waited_s: seconds between the quorum and the closing.
    data: {shard: [step, position in its text]} that the members sent along.
  """

  round: int
  fragment: int
  step: int
  tokens: Mapping[int, int]
  payloads: Mapping[int, bytes]
  per_step: Mapping[int, int] = {}
  late: Sequence[int] = ()
  refused: Sequence[int] = ()
  measured: Mapping[int, Measured] = {}
  waited_s: float = 0.0
  data: Mapping[str, Any] = {}


def header_of(closed: Closed) -> Json:
  """Returns a round as JSON values, with sizes in place of its payloads."""
  sizes = {site: len(data) for site, data in closed.payloads.items()}
  return closed._asdict() | {"payloads": sizes}


def closed_of(header: Json, body: bytes | memoryview) -> Closed:
  """Makes a round from its header and its concatenated payloads."""
  by_site = lambda name: {int(site): x for site, x in header[name].items()}
  payloads, start = dict[int, bytes](), 0
  for site, size in by_site("payloads").items():
    payloads[site] = bytes(body[start : start + size])
    start += size
  numbers = {name: by_site(name) for name in ("tokens", "per_step")}
  measured = {site: Measured(*x) for site, x in by_site("measured").items()}
  lists = {name: tuple(header[name]) for name in ("late", "refused")}
  return Closed(
    **{**header, **numbers, **lists, "payloads": payloads, "measured": measured}
  )


class Journal:
  """The closed rounds, as one site sees them.

  Attributes:
    first: rounds below this number may be deleted.
    closed: rounds below this number are closed.
    data: {shard: [step, position in its text]} from the closed rounds.
    headers: {round: its header}, of the rounds from `first` on that this site has seen.
  """

  def __init__(self, storage: Storage):
    self._storage, self.first, self.closed = storage, 0, 0
    self.data, self.headers = Json(), dict[int, Json]()
    self._recent = dict[int, Closed]()

  def begin(self, number: int, head: Json) -> None:
    """Takes the head of a snapshot after `number` rounds, unless more are known."""
    if number > self.closed:
      self.closed, self.data = number, dict(head["data"])
      self.headers |= {header["round"]: header for header in head["rounds"]}

  def head(self, digests: list[int], since: int, until: int) -> Json:
    """Returns the head of a snapshot: digests, text positions, headers of new rounds.

    Args:
      digests: of the outer state; see `records.Record`.
      since: number of closed rounds at the previous snapshot.
      until: number of closed rounds at this snapshot.
    """
    rounds = [self.headers[r] for r in range(since, until) if r in self.headers]
    return {"digests": digests, "data": self.data, "rounds": rounds}

  def advance(self) -> None:
    """Reads the rounds that have closed since the last call."""
    while closed := self.find(self.closed):
      self._note(closed)

  def find(self, number: int) -> Closed | None:
    """Returns a round; None if its file is missing or damaged."""
    if closed := self._recent.get(number):  # Another thread may drop it.
      return closed
    unpacked = read(self._storage, path_of(number))
    with contextlib.suppress(*_DAMAGE):
      return closed_of(*unpacked) if unpacked else None
    return None

  def write(self, closed: Closed) -> bool:
    """Closes a round; False: it was closed already, perhaps with other payloads."""
    data = pack(header_of(closed), *closed.payloads.values())
    if not self._storage.create(path_of(closed.round), data):
      return False
    self._note(closed)
    return True

  def forget(self, first: int) -> None:
    """Forgets the headers of rounds below `first`, whose files may be deleted."""
    self.first = max(self.first, first)
    for number in [r for r in [*self.headers] if r < self.first]:
      self.headers.pop(number, None)

  def _note(self, closed: Closed) -> None:
    # As if read from a file: in all headers, the keys of sites are strings.
    self.headers[closed.round] = json.loads(json.dumps(header_of(closed)))
    self._recent[closed.round] = closed
    self._recent.pop(closed.round - _RECENT, None)
    self.data |= closed.data
    self.closed = max(self.closed, closed.round + 1)


def history(storage: Storage) -> dict[int, Json]:
  """Returns the headers of all rounds before the newest snapshot."""
  headers = dict[int, Json]()
  for name in storage.names("snapshots"):
    if name.endswith(".head") and (head := read(storage, f"snapshots/{name}")):
      headers |= {header["round"]: header for header in head[0]["rounds"]}
  return headers


def number_of(name: str) -> int:
  """Returns the round in the name of a file; -1 for other files."""
  match = re.match(r"(\d{9})\.", name)
  return int(match[1]) if match else -1


def path_of(number: int) -> str:
  return f"{FOLDER}/{number:09d}.round"


def head_of(number: int) -> str:
  """Names the head of the snapshot after `number` rounds."""
  return f"snapshots/{number:09d}.head"


def state_of(number: int) -> str:
  """Names the outer state of the snapshot after `number` rounds."""
  return f"snapshots/{number:09d}.state"
