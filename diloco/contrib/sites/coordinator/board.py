"""What the coordinator holds in memory: payloads that arrive, and rounds that closed.

One event loop runs all of this. The disk and the outer step work in threads, one at a
time. Memory is bounded: a site may send the open rounds of P fragments, and a few
closed rounds are kept.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from diloco.contrib.sites import SitesConfig, arrival
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator.journal import Entry
from diloco.contrib.sites.coordinator.lending import Lending
from diloco.contrib.sites.coordinator.rounds import (
  Closing,
  Measured,
  Outliers,
  Presence,
  Rounds,
  Window,
)
from diloco.contrib.sites.link import Block
from diloco.contrib.sites.messages import BadMessage, Message, number
from diloco.errors import ConfigError

if TYPE_CHECKING:  # It imports JAX, which would make sites wait.
  from diloco.contrib.sites.coordinator.group import OuterGroup

# Measures the payloads {site: bytes} of a round.
Measure: TypeAlias = Callable[[int, dict[int, bytes]], dict[int, Measured]]

_LARGEST = (1 << 63) - 1
_RECENT = 2  # Closed rounds in memory.
# After the last round, the coordinator waits this many seconds for further events, then
# it ends. Until then, a site that lost its connection may come back.
_LINGER_S = 30.0


@dataclasses.dataclass(eq=False)
class Session:
  """One connection of a site that has joined.

  Attributes:
    site: its number.
    name: chosen by the site's process, the same after the process lost a connection.
    fields: those of the message with which the site joined.
    offsets: {open round: bytes that came through this connection}.
  """

  site: int
  name: str
  fields: dict[str, Any]
  offsets: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Upload:
  """A payload that arrives, or has arrived.

  Attributes:
    tokens: inner tokens behind each replica's payload.
    per_step: tokens of one of its inner steps.
    data: {shard: [step, position in its text]}.
    finished: the last blocks of other texts that the site has finished.
    total: size of the payload.
    crc32: its checksum; -1 if other bytes came.
    received: its first bytes.
  """

  tokens: int
  per_step: int
  data: dict[str, Any]
  finished: list[list[int]]
  total: int
  crc32: int
  received: bytearray = dataclasses.field(default_factory=bytearray)


class ClosedRounds(Protocol):
  """What a board needs of a `Journal`."""

  @property
  def rounds(self) -> Sequence[int]: ...
  @property
  def closed(self) -> int: ...
  @property
  def run(self) -> str: ...
  def lines(self) -> list[dict[str, Any]]: ...
  def read(self, number: int) -> Entry: ...
  def write(self, entry: Entry) -> None: ...


class Board:
  """Payloads and rounds of one run.

  Attributes:
    calendar: all rounds.
    run: name of the run.
    rounds: who is in, and which rounds may close.
    lending: who trains the texts of sites that are away.
    published: rounds below this number are on the disk, and are sent to the sites.
    started: whether the group has begun.
    uploads: {(open round, site): payload}.
    changed: replaced and set when there is news.
    on_closed: each is called with every round that closes.
    on_arrival: each is called with every site that arrives, and its `Arrival.seconds`.
  """

  def __init__(
    self, calendar: Calendar, journal: ClosedRounds, show: Callable[[str], None]
  ):
    """Starts before the first round, or goes on from the journal; `show` prints."""
    self._sites = sites = calendar.config.of(SitesConfig)
    self.calendar, self.published, self.run = calendar, journal.closed, journal.run
    steps = [t for t, _ in calendar.rounds if t <= calendar.config.train.steps]
    tau = min(calendar.config.overlap.taus)
    window = Window(sites.grace_s, sites.least_grace_s, tau, steps)
    self.rounds = Rounds(calendar.sites, sites.quorum, window, self.published)
    lines = journal.lines()
    self.lending = Lending(calendar, lines)
    self._outliers = Outliers(sites.most_norm, sites.least_cosine)
    for line in lines:
      norms = [line.get("measured", {}).get(k, [None])[0] for k in line["tokens"]]
      self._outliers.counted(line["fragment"], norms)
    self._members = self.rounds.members
    self.uploads: dict[tuple[int, int], Upload] = {}
    self.changed = asyncio.Event()
    self.started = self.published > 0
    self._journal, self._show = journal, show
    self._group: OuterGroup | None = None
    self._loaded = asyncio.Event()
    self.on_closed: list[Callable[[Entry], None]] = []
    self.on_arrival: list[Callable[[int, dict[str, float]], None]] = []
    self._first_ready = math.inf
    self._linger_s = max(2 * sites.grace_s, _LINGER_S)
    self._recent: dict[int, Entry] = {}
    self._owners: dict[tuple[int, int], str] = {}
    self._done = set[int]()  # Sites that finished the run.
    self._farewells = dict[int, str]()  # {site: why it leaves}
    self._stopped = False
    self._last_news = time.monotonic()
    self._applying = asyncio.Lock()
    if lines:
      self.rounds.expect_return(tuple(map(int, lines[-1]["tokens"])))

  # Sites.

  def inside(self) -> int:
    """Counts the connected sites."""
    return sum(m.presence is not Presence.AWAY for m in self._members.values())

  def applied(self) -> int:
    """Counts the rounds in the outer state; 0 before it is read."""
    return self._group.applied if self._group else 0

  def joined(self, site: int, is_new: bool = True) -> None:
    """A site connects; whether by another process than before."""
    self.rounds.join(site)
    if is_new:
      self.lending.started_again(site)
    self.notify()
    self._show(f"Site {site} is in: {self.inside()} of {self.calendar.sites}.")

  def gone(self, site: int) -> None:
    """The connection of a site ends; the payloads that came in part are dropped."""
    self.rounds.leave(site)
    for key in [k for k in self.uploads if k[1] == site and k[0] >= self.published]:
      if not self.rounds.has(site, key[0]):
        del self.uploads[key]
    self.notify()
    reason = self._farewells.pop(site, "is gone")
    self._show(f"Site {site} {reason}: {self.inside()} of {self.calendar.sites}.")

  def receive(self, session: Session, message: Message) -> bool:
    """Takes a message of a site that has joined; returns False for its farewell.

    Raises:
      BadMessage: the message cannot come from this version of diloco.
    """
    if message.kind == "chunk":
      self._chunk(session, message)
    elif message.kind == "ready":
      last = len(self.calendar.rounds)
      self.rounds.ready(session.site, number(message, "round", 0, last))
      self._first_ready = min(self._first_ready, time.monotonic())
      if seconds := arrival.checked(message.fields.get("arrival")):
        self._show(f"Site {session.site} takes part after {arrival.text(seconds)}.")
        for tell in self.on_arrival:
          tell(session.site, seconds)
      self.notify()
    elif message.kind == "leave":
      reason = message.fields.get("reason")
      if reason == "finished":
        self._done.add(session.site)
      if reason in ("finished", "stopped"):
        self._farewells[session.site] = f"has {reason}"
      return False
    else:
      raise BadMessage(f"it sent the unknown message {message.kind[:50]!r}")
    return True

  async def lacks(
    self, site: int, applied: int, digests: Any
  ) -> tuple[int, bytes, dict[str, Any]]:
    """Finds out what a new process of a site lacks.

    Args:
      site: its number.
      applied: rounds below this number are in the outer state of the site.
      digests: of that outer state.

    Returns:
      The first round that the site lacks; the outer state before it as bytes, empty if
      that of the site is right; {shard: [step, position in its text]} of the site.
    """
    await self._loaded.wait()
    group = self._group
    assert group is not None
    while group.applied < min(applied, self.published):
      await self.changed.wait()
    snapshot = b""
    async with self._applying:
      if not (self.is_kept(applied) and group.agrees(applied, digests)):
        applied, snapshot = await asyncio.to_thread(group.snapshot)
    own = self.calendar.shards_of(site)
    return applied, snapshot, {s: group.data[s] for s in own if s in group.data}

  def is_kept(self, number: int) -> bool:
    """Returns whether this round and all later closed rounds can be sent again."""
    kept = self._journal.rounds
    oldest = kept[0] if kept else self.published
    return oldest <= number <= self.published

  async def entry(self, number: int) -> Entry:
    """Returns a closed round.

    Raises:
      ConfigError: its payloads are no longer kept.
    """
    if number in self._recent:
      return self._recent[number]
    return await asyncio.to_thread(self._journal.read, number)

  def is_owner(self, session: str, number: int, site: int) -> bool:
    """Returns whether the process of this session keeps this payload itself."""
    return self._owners.get((number, site)) == session

  def notify(self) -> None:
    """Wakes all that wait for news."""
    self._last_news = time.monotonic()
    self.changed.set()
    self.changed = asyncio.Event()

  # Rounds.

  def stop(self) -> None:
    """Makes `close_rounds` end after the round that it writes or applies now."""
    self._stopped = True
    self.notify()

  async def close_rounds(self, measure: Measure) -> bool:
    """Closes rounds until all are closed and the sites have finished.

    Args:
      measure: measures the payloads of all sites in a round; runs in a thread.

    Returns:
      False if `stop` ended this before.
    """
    while not self._is_over():
      if self._stopped:
        return False
      self._begin()
      closing = self.rounds.close(time.monotonic()) if self.started else None
      if closing is None:
        await self._pause()
        continue
      entry = await self._entry(closing, measure)
      await asyncio.to_thread(self._journal.write, entry)
      self._recent[entry.round] = entry
      self._recent.pop(entry.round - _RECENT, None)
      self._owners = {k: v for k, v in self._owners.items() if k[0] > entry.round - 64}
      for key in [k for k in self.uploads if k[0] <= entry.round]:
        del self.uploads[key]
      self.published = entry.round + 1
      self.notify()
      for show in self.on_closed:
        show(entry)
    return True

  async def apply_rounds(self, load: Callable[[], "OuterGroup"]) -> "OuterGroup":
    """Loads the outer state, and applies the closed rounds to it.

    Rounds close meanwhile: they need no outer state. After a restart, sites wait for
    the coordinator until it listens, not until it has read a checkpoint.

    Args:
      load: reads the outer state; runs in a thread.

    Returns:
      The outer state, when all rounds of the run are applied, or after `stop`.

    Raises:
      ConfigError: the outer state has rounds that the journal does not know.
    """
    group = self._group = await asyncio.to_thread(load)
    if group.applied > self.published:
      raise ConfigError(
        f"--workdir has a checkpoint of {group.applied} rounds, but rounds.jsonl has"
        f" {self.published}; restore rounds.jsonl from a copy."
      )
    self._loaded.set()
    while not self._stopped and group.applied < len(self.calendar.rounds):
      news = self.changed
      while group.applied < self.published and not self._stopped:
        entry = await self.entry(group.applied)
        async with self._applying:
          await asyncio.to_thread(group.apply, entry)
        self.notify()
      if news is self.changed:
        await news.wait()
    return group

  def _is_over(self) -> bool:
    if self.published < len(self.calendar.rounds) or self.inside():
      return False
    quiet = time.monotonic() - self._last_news
    # A site that was cut off may come back for the last rounds.
    return len(self._done) == self.calendar.sites or quiet > self._linger_s

  async def _pause(self) -> None:
    """Waits until something happens, or a window ends."""
    seconds = min(max(self.rounds.deadline() - time.monotonic(), 0.01), 0.5)
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(self.changed.wait(), seconds)

  def _begin(self) -> None:
    """Starts the group when all sites are ready, or when the first waited enough."""
    if self.started:
      return
    ready = sum(m.presence is Presence.IN for m in self._members.values())
    waited = time.monotonic() - self._first_ready
    enough = ready >= self._sites.quorum and waited > self._sites.start_s
    if ready == self.calendar.sites or enough:
      self._show(f"Training begins with {ready} of {self.calendar.sites} sites.")
      self.started = True
      self.notify()

  def _chunk(self, session: Session, message: Message) -> None:
    """Takes a part of a payload.

    The first payload that came in full counts: a site that sends the round again, on
    another connection, changes nothing.
    """
    r = number(message, "round", 0, len(self.calendar.rounds) - 1)
    if r < self.rounds.closed:
      return  # Too late; the site learns it with the closed round.
    if r >= self.rounds.closed + self.calendar.fragments:
      raise BadMessage(f"it sent round {r}, but round {self.rounds.closed} is open")
    offset, size = number(message, "offset", 0, _LARGEST), len(message.body)
    if offset != session.offsets.get(r, 0) or not size:
      raise BadMessage(f"it sent byte {offset} of round {r} out of order")
    kept = {k: n for k, n in session.offsets.items() if k >= self.rounds.closed}
    session.offsets = kept | {r: offset + size}
    site = session.site
    if self.rounds.has(site, r):
      return
    if offset == 0:
      self.uploads[r, site] = self._begin_upload(session, r, message)
    upload = self.uploads[r, site]
    if offset + size > upload.total:
      raise BadMessage(f"it sent more than {upload.total} bytes of round {r}")
    upload.received += message.body
    if len(upload.received) == upload.total:
      if zlib.crc32(upload.received) != upload.crc32:
        upload.crc32 = -1
        raise BadMessage(f"its payload of round {r} has another checksum")
      self._owners[r, site] = session.name
      self.rounds.sent(site, r, time.monotonic())
    self.notify()

  def _begin_upload(self, session: Session, r: int, message: Message) -> Upload:
    """Reads the header of a payload's first part."""
    total = number(message, "total", 0, _LARGEST)
    wanted = self.calendar.payload_bytes(r)
    if total != wanted:
      raise BadMessage(f"its payload of round {r} has {total} bytes, not {wanted}")
    data = message.fields.get("data")
    own = self.calendar.shards_of(session.site)
    return Upload(
      number(message, "tokens", 1, _LARGEST),
      number(message, "per_step", 1, _LARGEST),
      {s: data[s] for s in own if s in data} if isinstance(data, dict) else {},
      _names(message.fields.get("finished", [])),
      total,
      number(message, "crc32", 0, (1 << 32) - 1),
    )

  async def _entry(self, closing: Closing, measure: Measure) -> Entry:
    """Makes a closed round of the payloads that have no bad numbers."""
    number, (step, fragment) = closing.round, self.calendar.rounds[closing.round]
    uploads = {k: self.uploads[number, k] for k in closing.members}
    payloads = {k: bytes(u.received) for k, u in uploads.items()}
    tokens = {k: u.tokens for k, u in uploads.items()}
    measured = await asyncio.to_thread(measure, number, payloads)
    steps = {k: u.tokens / u.per_step for k, u in uploads.items()}
    refused = self._outliers.refused(fragment, measured, steps)
    for site, reason in refused.items():
      del payloads[site], tokens[site]
      self._show(f"Refuses the payload of site {site} in round {number}: {reason}.")
    self._outliers.counted(fragment, [measured[k].norm for k in tokens])
    data = {shard: x for k in tokens for shard, x in uploads[k].data.items()}
    waited_s = round(closing.waited_s, 3)
    head = (number, fragment, step, tokens, payloads, closing.late, data, waited_s)
    per_step = {k: uploads[k].per_step for k in tokens}
    lent = self._lend(number, per_step)
    said = [name for k in tokens for name in uploads[k].finished]
    finished = [name for name in said if tuple(name) in self.lending.open]
    self.lending.closed(number, tokens, lent, finished)
    return Entry(*head, measured, per_step, lent, finished)

  def _lend(self, number: int, per_step: dict[int, int]) -> dict[int, Block]:
    """Chooses blocks of the texts whose positions are known."""
    applied, known = 0, dict[str, Any]()
    if self._group:
      applied, known = self._group.applied, self._group.data
    positions = {
      k: {s: known[s] for s in shards}
      for k, shards in ((k, self.calendar.shards_of(k)) for k in self._members)
      if known.keys() >= {*shards} and applied > self.lending.sent[k]
    }
    away = [k for k, m in self._members.items() if m.presence is Presence.AWAY]
    return self.lending.choose(number, per_step, away, positions)


def _names(found: Any) -> list[list[int]]:
  """Reads the names of blocks.

  Raises:
    BadMessage: these are no pairs of whole numbers.
  """
  pairs = isinstance(found, list) and all(isinstance(x, list) for x in found)
  if not pairs or any(len(x) != 2 or {type(n) for n in x} != {int} for x in found):
    raise BadMessage(
      f"chunk.finished is {str(found)[:50]}; it must be pairs of numbers"
    )
  return found
