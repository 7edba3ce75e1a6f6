"""A site's link to its group: files in a folder or in a bucket.

One thread writes the site's payloads and its record, and reads the closed rounds. While
the site has the lease, the thread also closes the rounds of the group (`holder.py`).

  config.json            config of the run
  contents.json          digests of its text and its tokenizer
  lease                  which site closes rounds; which rounds are kept (`lease.py`)
  sites/K                whether site K is there, and what it has sent (`records.py`)
  payloads/ROUND.site-K  a payload, until its round is closed
  journal/ROUND.round    a closed round (`journal.py`)
  snapshots/ROUND.state  the outer state before a round, for new sites
  snapshots/ROUND.head   digests of that state, headers since the previous snapshot

Sites ask for files by their names, which follow from the numbers of rounds and sites.
So nothing waits for a listing; listings only find files that may be deleted.
"""

import asyncio
import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Awaitable, Callable

from diloco.contrib.sites import SitesConfig
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.group import journal, records
from diloco.contrib.sites.group.holder import Holder
from diloco.contrib.sites.group.journal import Closed, Journal
from diloco.contrib.sites.group.lease import Lease
from diloco.contrib.sites.group.records import Record, pack
from diloco.contrib.sites.group.rounds import Measure
from diloco.errors import ConfigError
from diloco.util.storage import Storage
from diloco.util.types import Json
from diloco.wire.transport import ExchangeFailed

_KEPT = 64  # Number of rounds whose digests are kept, for a site that comes back.
_QUIET_S = 5.0  # Shorter failures of the file system print no line.


@dataclasses.dataclass(frozen=True)
class Welcome:
  """The answer to a site that joins.

  Attributes:
    round: the first round that the site will receive.
    data: {shard: [step, position in its text]}, from the closed rounds.
    snapshot: the group's outer state as bytes; empty if the site's own state is right.
  """

  round: int
  data: Json
  snapshot: bytes = b""


class Link:
  """The link of one site."""

  def __init__(
    self,
    storage: Storage,
    address: str,
    calendar: Calendar,
    site: int,
    measure: Measure,
    print_line: Callable[[str], None],
  ):
    """Prepares the link; `join` starts it.

    Args:
      storage, address: the files of the group, and their address, for messages.
      calendar: all rounds.
      site: number of this site.
      measure: measures the payloads of a round, if this site closes it.
      print_line: prints a line.
    """
    self._storage, self._address, self._calendar = storage, address, calendar
    self._site, self._measure, self._print = site, measure, print_line
    self._lost_s = calendar.config.of(SitesConfig).lost_s
    self._name = secrets.token_hex(8)  # A random name of this process.
    self._journal, self._lease = Journal(storage), Lease(self._name, self._lost_s)
    self._changed = threading.Condition()
    self._thread: threading.Thread | None = None
    self._error: Exception | None = None
    self._started = self._leaving = False
    self._reason = "gone"
    # Rounds that this site had applied when it joined, and digests of its outer state.
    self._own: tuple[int, list[int]] = 0, []
    self._welcome: Welcome | None = None  # Until the training thread takes it.
    self._known = False  # Whether there was a welcome.
    self._closed = dict[int, Closed]()
    self._first = self._next = 0  # The first and the next round to receive.
    self._outgoing = dict[int, bytes]()  # Files with payloads of open rounds.
    self._sent = set[int]()  # Open rounds whose payload is in the storage.
    self._ready: int | None = None  # The last argument of `ready`.
    # {number of applied rounds: a CRC-32 of each fragment's outer state}
    self._digests = dict[int, list[int]]()
    self._offered: tuple[int, list[int], bytes] | None = None
    self._checked: int | None = None  # The snapshot that `_compare` checked last.
    self._record: Record | None = None  # The last record of this site, and its time.
    self._record_at, self._beats = 0.0, 0
    # The last record of an earlier process of this site.
    self._before: Record | None = None
    self._holder: Holder | None = None

  # The training thread calls these methods.

  def join(
    self, applied: int, digests: list[int], stopping: Callable[[], bool]
  ) -> Welcome | None:
    """Joins the group, and waits for its welcome; None if `stopping()` comes first.

    Args:
      applied: rounds below this number are in the outer state of the site.
      digests: checksums of this outer state, one for each fragment.

    Raises:
      ConfigError: another process runs this site, or it has rounds of another run.
    """
    self._own = applied, digests
    self._thread = threading.Thread(target=self._run, daemon=True, name="link")
    self._thread.start()
    self._wait(lambda: self._welcome is not None or stopping())
    return self.welcome()

  def ready(self, first: int) -> None:
    """Says that the site will send round `first` and all later rounds."""
    with self._changed:
      self._ready = first

  def wait_for_start(self, stopping: Callable[[], bool]) -> bool:
    """Waits until the group begins; returns False if `stopping()` comes first."""
    self._wait(lambda: self._started or stopping())
    return self._started

  def send(self, number: int, data: bytes, fields: Json) -> None:
    """Sends the payload of a round; `fields` are those of `records.Payload`."""
    with self._changed:
      if number >= self._next:  # Otherwise the round closed without this site.
        self._outgoing[number] = pack(fields, data)

  def wait_until(self, number: int, stopping: Callable[[], bool]) -> bool:
    """Waits until a round is closed; returns False if `stopping()` comes first."""
    self._wait(lambda: number < self._next or stopping())
    return number < self._next

  def closed(self, number: int) -> Closed:
    """Returns a closed round that is not applied."""
    with self._changed:
      return self._closed[number]

  def welcome(self) -> Welcome | None:
    """Returns the welcome after a join or a long absence, but only once; else None."""
    with self._changed:
      welcome, self._welcome = self._welcome, None
      return welcome

  def newest(self) -> tuple[int, int]:
    """Returns how many rounds this site received, and how many the group closed."""
    with self._changed:
      self._raise()
      return self._next, max(self._journal.closed, self._next)

  def absent(self) -> list[int]:
    """Lists the sites that have no payload in any closed round."""
    shards = {k: self._calendar.shards_of(k) for k in range(self._calendar.sites)}
    known = self._journal.data.keys()
    return [k for k, names in shards.items() if not known >= {*names}]

  def applied(self, number: int, digest: int) -> None:
    """Forgets a round that was applied; records the digest of its fragment after it."""
    p = self._calendar.rounds[number][1]
    with self._changed:
      self._closed = {r: x for r, x in self._closed.items() if r > number}
      if before := self._digests.get(number):
        self._digests[number + 1] = [*before[:p], digest, *before[p + 1 :]]
        for old in [r for r in self._digests if r < number - _KEPT]:
          del self._digests[old]

  def offer(self, applied: int, make: Callable[[], tuple[list[int], bytes]]) -> None:
    """Takes the outer state after `applied` rounds, if the group needs a snapshot.

    Args:
      make: returns the digests of the outer state, and the state as bytes.
    """
    newest = self._lease.seen.get("snapshot")
    # Every site offers its first state: one of them will get the lease and write it.
    if newest is None or (self._lease.held and newest < applied):
      made = make()
      with self._changed:
        self._offered = (applied, *made)

  def leave(self, reason: str) -> None:
    """Announces that the site leaves, and ends the thread; later calls do nothing."""
    with self._changed:
      if self._leaving:
        return
      self._leaving, self._reason = True, reason
      self._changed.notify_all()
    if self._thread:
      self._thread.join(timeout=10)

  def _wait(self, done: Callable[[], bool]) -> None:
    with self._changed:
      while not done():
        self._raise()
        self._changed.wait(1.0)  # Lets Ctrl-C through.

  def _raise(self) -> None:
    if self._error:
      raise self._error
    if self._leaving:
      raise ConnectionError("this site has left")

  # The link's own thread runs these methods.

  def _run(self) -> None:
    """Runs until the site leaves, or cannot go on."""
    try:
      asyncio.run(self._main())
    except Exception as error:  # Otherwise the training thread would wait for ever.
      with self._changed:
        self._error = error
        self._changed.notify_all()

  async def _main(self) -> None:
    lease = (self._follow, self._hold, self._keep_state)
    steps = (self._say, self._send, self._read_rounds, *lease)
    await asyncio.gather(*(self._again(step) for step in steps))
    await self._send()
    await self._write_record({**self._own_record(), "reason": self._reason})
    if self._lease.held:
      await self._write("lease", pack(self._lease.leave()))

  async def _again(self, step: Callable[[], Awaitable[None]]) -> None:
    """Calls `step` until the site leaves; tries again if the storage fails."""
    failed_at = 0.0  # 0: no failure. Infinite: the failure is printed.
    while not self._leaving:
      try:
        await step()
        failed_at = 0.0
      except OSError as error:
        failed_at = failed_at or time.monotonic()
        if time.monotonic() - failed_at > _QUIET_S:
          failed_at = math.inf
          self._print(f"{self._address}: {error}. This site tries again.")
      await asyncio.sleep(self._storage.poll_s)

  async def _say(self) -> None:
    """Writes the record of this site if it has changed, or is old."""
    now, record = time.monotonic(), self._own_record()
    if record != self._record or now - self._record_at >= self._lease.beat_s:
      await self._check_alone(now)
      record = self._own_record()
      await self._write_record(record)
      self._record, self._record_at = record, now

  def _own_record(self) -> Record:
    with self._changed:
      return Record(
        session=self._name,
        beat=0,
        ready=self._ready if self._known else None,
        sent=sorted(self._sent & self._outgoing.keys()),
        digests={str(r): x for r, x in self._digests.items()},
        reason="",
      )

  async def _write_record(self, record: Record) -> None:
    self._beats += 1
    data = pack({**record, "beat": self._beats})
    await self._write(records.record_of(self._site), data)

  async def _check_alone(self, now: float) -> None:
    """Looks for another process of this site; keeps the digests of an earlier one.

    Raises:
      ConfigError: another process runs this site.
    """
    args = (self._storage, self._calendar, self._site)
    other = await asyncio.to_thread(records.read_record, *args)
    if self._record is None:
      self._before = other
      with self._changed:
        known = other["digests"] if other else {}
        self._digests = {int(r): x for r, x in known.items()}
      return
    if other is None or other["session"] == self._name:
      return
    before = self._before or other
    is_before = self._before is not None and other["session"] == before["session"]
    # For a while, the storage may still show an old file.
    if is_before and other["beat"] <= before["beat"]:
      return
    # Of two processes, the first goes on, unless it was away for long.
    if is_before or now - self._record_at > self._lost_s:
      raise ConfigError(
        f"--site is {self._site}, but another process at {self._address} is this site;"
        " give each its own number."
      )

  async def _follow(self) -> None:
    """Reads which site has the lease; claims or renews the lease if due."""
    unpacked, held = await self._read("lease"), self._lease.held
    now = time.monotonic()
    self._lease.observe(unpacked[0] if unpacked else None, now)
    if self._lease.held and not held:
      self._print(f"Group: site {self._site} closes the rounds.")
    if self._lease.is_due(now):
      news: Json = {"site": self._site}
      if self._holder:
        news["started"] = self._holder.started
      await self._write("lease", pack(self._lease.record(now, **news)))
    seen = self._lease.seen
    with self._changed:
      self._started = self._started or bool(seen.get("started"))
      self._changed.notify_all()
    self._journal.forget(seen.get("first", 0))
    await self._compare(seen.get("snapshot"))

  async def _compare(self, snapshot: int | None) -> None:
    """Compares the outer state of this site with a new snapshot.

    Raises:
      ExchangeFailed: the two states differ.
    """
    if snapshot is None or snapshot == self._checked or not self._known:
      return
    digests = self._digests.get(snapshot)
    head = await self._read(journal.head_of(snapshot)) if digests else None
    if not head:
      return
    if head[0]["digests"] != digests:
      # Without digests, this site takes the group's state when it starts again.
      self._digests.clear()
      await self._write_record({**self._own_record(), "reason": "stopped"})
      raise ExchangeFailed(
        f"the outer state of site {self._site} after {snapshot} rounds is not that of"
        f" the group at {self._address}; start the site again, then it takes the"
        " group's."
      )
    self._checked = snapshot

  async def _send(self) -> None:
    """Writes the payloads that are not in the storage yet."""
    with self._changed:
      self._sent &= self._outgoing.keys()
      waiting = {r: x for r, x in self._outgoing.items() if r not in self._sent}
    for number, data in waiting.items():
      await self._write(records.payload_of(number, self._site), data)
      self._sent.add(number)

  async def _read_rounds(self) -> None:
    """Reads the rounds that closed, as far as there is room for them."""
    if not self._known:
      await self._find_place()
      return
    await asyncio.to_thread(self._journal.advance)
    if self._journal.closed < self._journal.first:
      await self._skip()  # This site was away for so long that rounds are gone.
    # Rounds before a snapshot need no room.
    held = lambda: sum(r >= self._first for r in self._closed)
    while self._next < self._journal.closed and held() < self._calendar.room:
      closed = await asyncio.to_thread(self._journal.find, self._next)
      if closed:
        self._take(closed)
        if closed.round in self._sent:
          name = records.payload_of(closed.round, self._site)
          await asyncio.to_thread(self._storage.delete, name)
      elif self._next < self._journal.first:
        await self._skip()
      else:
        raise OSError(f"{journal.path_of(self._next)} is missing or damaged")

  def _take(self, closed: Closed) -> None:
    with self._changed:
      self._closed[closed.round] = closed
      self._outgoing.pop(closed.round, None)
      self._next = closed.round + 1
      self._changed.notify_all()

  async def _find_place(self) -> None:
    """Decides at which round the site begins, once the group has an outer state.

    Raises:
      ConfigError: this site has rounds of another run.
    """
    snapshot, (number, digests) = self._lease.seen.get("snapshot"), self._own
    if self._record is None or (snapshot is None and not self._lease.held):
      return
    if snapshot is None:
      if number:
        raise ConfigError(
          f"--group is {self._address}, which has no closed round, but this site has"
          f" {number}; give the folder that the run had, or another --workdir."
        )
      names = await asyncio.to_thread(self._storage.names, "snapshots")
      if any(journal.number_of(name) > 0 for name in names):  # After a round or more.
        raise ConfigError(
          f"--group is {self._address}, which has snapshots but no readable lease;"
          " restore this file from a copy."
        )
      self._welcomed_with(Welcome(0, {}), digests)
      return
    head = await self._whole(journal.head_of(snapshot))
    self._journal.begin(snapshot, head[0])
    await asyncio.to_thread(self._journal.advance)
    known = self._digests | {snapshot: head[0]["digests"]}
    is_kept = self._journal.first <= number <= self._journal.closed
    if is_kept and known.get(number) == digests:
      self._welcomed_with(Welcome(number, self._journal.data.copy()), digests)
    else:
      await self._skip()

  async def _skip(self) -> None:
    """Takes the newest snapshot, and begins with the rounds after it."""
    number = self._lease.seen["snapshot"]
    head = await self._whole(journal.head_of(number))
    state = await self._whole(journal.state_of(number))
    self._journal.begin(number, head[0])
    welcome = Welcome(number, self._journal.data.copy(), bytes(state[1]))
    self._welcomed_with(welcome, head[0]["digests"])

  def _welcomed_with(self, welcome: Welcome, digests: list[int]) -> None:
    with self._changed:
      self._welcome, self._next = welcome, welcome.round
      self._digests[welcome.round] = digests
      self._first = welcome.round
      self._outgoing.clear()
      self._known = True
      self._changed.notify_all()

  # These methods work only while this site has the lease.

  async def _hold(self) -> None:
    """Closes rounds until the site loses the lease or leaves."""
    seen = self._lease.seen
    if not (self._known and self._lease.held and seen.get("snapshot") is not None):
      return
    args = (self._storage, self._calendar, self._journal, bool(seen.get("started")))
    self._holder = Holder(*args, self._print)
    try:
      goes_on = lambda: self._lease.held and not self._leaving
      await self._holder.close_rounds(self._measure, goes_on)
    finally:
      self._holder = None

  async def _keep_state(self) -> None:
    """Writes the snapshot that the site has offered, and deletes old files."""
    offered, before = self._offered, self._lease.seen.get("snapshot")
    if not offered or not self._lease.held:
      return
    number, digests, state = offered
    if before is None or before < number:
      await self._write(journal.state_of(number), pack({}, state))
      head = self._journal.head(digests, before or 0, number)
      await self._write(journal.head_of(number), pack(head))
      if self._lease.held:
        news = {"snapshot": number, "first": before or 0}
        await self._write("lease", pack(self._lease.record(time.monotonic(), **news)))
        await asyncio.to_thread(self._delete, before or 0)
    if self._offered is offered:
      self._offered = None

  def _delete(self, first: int) -> None:
    """Deletes the rounds below `first`; a site that lacks them takes a snapshot."""
    for folder in ("journal", "payloads", "snapshots"):
      for name in self._storage.names(folder):
        is_old = 0 <= journal.number_of(name) < first
        if is_old and not name.endswith(".head"):
          self._storage.delete(f"{folder}/{name}")

  async def _read(self, name: str) -> tuple[Json, memoryview] | None:
    return await asyncio.to_thread(records.read, self._storage, name)

  async def _whole(self, name: str) -> tuple[Json, memoryview]:
    """Reads a file that must be there.

    Raises:
      OSError: the file is missing or damaged; `_again` prints this.
    """
    if unpacked := await self._read(name):
      return unpacked
    raise OSError(f"{name} is missing or damaged")

  async def _write(self, name: str, data: bytes) -> None:
    await asyncio.to_thread(self._storage.put, name, data)
