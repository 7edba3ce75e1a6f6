"""A site's link to its group through a store: a folder or a bucket.

One thread writes the site's payloads and its record, and reads the closed rounds. While
the site has the lease, the thread also closes the rounds of the group (`holder.py`).

  config.json            config of the run
  lease                  who closes rounds, and what is kept (`lease.py`)
  sites/K                whether site K is there, and what it has sent
  payloads/ROUND.site-K  a payload, until its round is closed
  journal/ROUND.round    a closed round (`journal.py`)
  snapshots/ROUND.*      the outer state before a round, for newcomers
  rounds.jsonl           the rounds before the newest snapshot, for people
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from diloco.contrib.sites import outer_state
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator.board import Measure
from diloco.contrib.sites.coordinator.journal import Entry
from diloco.contrib.sites.folder.holder import Holder, payload_of, record_of
from diloco.contrib.sites.folder.journal import StoreJournal, number_of
from diloco.contrib.sites.folder.lease import Lease
from diloco.contrib.sites.folder.store import Store, pack
from diloco.contrib.sites.link import Closed, Link, Welcome
from diloco.errors import ConfigError
from diloco.util.types import PyTree

_KEPT = 64  # Rounds whose digests are kept, for a site that comes back.
_QUIET_S = 5.0  # A file system that fails for less is not worth a line.


class FolderLink(Link):
  """The link of one site, with the methods of a connection."""

  def __init__(
    self,
    store: Store,
    address: str,
    calendar: Calendar,
    site: int,
    lost_s: float,
    print_line: Callable[[str], None],
    measure: Measure,
  ):
    """Prepares the link; `join` begins.

    Args:
      store, address: the files of the group, and their place for messages.
      calendar: all rounds.
      site: number of this site.
      lost_s: seconds without news after which a site counts as gone.
      print_line: prints a line.
      measure: measures the payloads of a round, if this site closes it.

    """
    super().__init__(_no_channel, address, {"site": site}, print_line, calendar.room)
    self._store, self._calendar, self._site = store, calendar, site
    self._lost_s, self._measure = lost_s, measure
    self._name: str = self._hello["session"]
    self._journal, self._lease = StoreJournal(store), Lease(self._name, lost_s)
    self._sent = set[int]()  # Open rounds whose payload is in the store.
    # {number of applied rounds: a CRC-32 of each fragment's outer state}
    self._digests = dict[int, list[int]]()
    self._offered: tuple[int, list[int], bytes] | None = None
    self._checked: int | None = None  # The last snapshot that was compared.
    self._record = dict[str, Any]()  # What this site wrote last, and when.
    self._record_at, self._beats = 0.0, 0
    # The process that was this site before, and the last that it had written.
    self._before: dict[str, Any] = {}
    self._reason = "is gone"
    self._holder: Holder | None = None
    self._holding_since = 0  # The claim that was shown.

  # What the training thread calls.

  def applied(self, number: int, theta: PyTree, opt_state: PyTree) -> None:
    p, digest = self._calendar.rounds[number][1], outer_state.digest(theta, opt_state)
    with self._changed:
      if before := self._digests.get(number):
        self._digests[number + 1] = [*before[:p], digest, *before[p + 1 :]]
        for old in [r for r in self._digests if r < number - _KEPT]:
          del self._digests[old]

  def offer(self, applied: int, outer: PyTree) -> None:
    newest = self._lease.seen.get("snapshot")
    # Of the first states, one is needed, whoever has the lease in the end.
    if newest is None or (self._lease.held and newest < applied):
      found = outer_state.digests(outer), outer_state.to_bytes(outer)
      with self._changed:
        self._offered = (applied, *found)

  def leave(self, reason: str) -> None:
    self._reason = reason
    super().leave(reason)

  # The thread.

  def _keep(self) -> None:
    asyncio.run(self._main())

  async def _main(self) -> None:
    lease = (self._follow, self._hold, self._keep_state)
    steps = (self._say, self._send, self._read_rounds, *lease)
    await asyncio.gather(*(self._again(step) for step in steps))
    await self._send()
    await self._write_record(self._own_record() | {"reason": self._reason})
    if self._lease.held:
      await self._write("lease", pack(self._lease.leave()))
      await asyncio.to_thread(self._journal.write_lines)

  async def _again(self, step: Callable[[], Awaitable[None]]) -> None:
    """Calls `step` until the site leaves; tries again if the file system fails."""
    failed_at, told = 0.0, False
    while not self._leaving:
      try:
        await step()
        failed_at, told = 0.0, False
      except OSError as error:
        now = time.monotonic()
        failed_at = failed_at or now
        if not told and now - failed_at > _QUIET_S:
          told = True
          self._print(f"{self._address}: {error}. This site tries again.")
      await asyncio.sleep(self._store.poll_s)

  async def _say(self) -> None:
    """Writes the record of this site if it has changed, or is old."""
    record, now = self._own_record(), time.monotonic()
    if record != self._record or now - self._record_at >= self._lease.beat_s:
      await self._check_alone(now)
      await self._write_record(record)
      self._record, self._record_at = record, now

  def _own_record(self) -> dict[str, Any]:
    with self._changed:
      return {
        "session": self._name,
        "ready": self._first if self._known else None,
        "sent": sorted(self._sent & self._outgoing.keys()),
        "digests": self._digests.copy(),
        "reason": "",
      }

  async def _write_record(self, record: dict[str, Any]) -> None:
    self._beats += 1
    await self._write(record_of(self._site), pack(record | {"beat": self._beats}))

  async def _check_alone(self, now: float) -> None:
    """Looks for another process of this site; keeps what an earlier one has left.

    Raises:
      ConfigError: another process is this site.
    """
    found = await self._read(record_of(self._site))
    other = found[0] if found else {}
    if not self._record:
      self._before = other
      with self._changed:
        self._digests = {int(r): x for r, x in other.get("digests", {}).items()}
      return
    # An old file may still be seen for a while.
    is_before = other.get("session") == self._before.get("session")
    is_new = not is_before or other.get("beat", 0) > self._before.get("beat", 0)
    if other.get("session", self._name) == self._name or not is_new:
      return
    # The process that was there first goes on, unless it was away for long.
    if is_before or now - self._record_at > self._lost_s:
      raise ConfigError(
        f"--site is {self._site}, but another process at {self._address} is this site;"
        " give each its own number."
      )

  async def _follow(self) -> None:
    """Looks who has the lease; claims or keeps it."""
    found = await self._read("lease")
    now = time.monotonic()
    self._lease.observe(found[0] if found else None, now)
    if self._lease.is_due(now):
      news = {"site": self._site} | (self._holder.news() if self._holder else {})
      await self._write("lease", pack(self._lease.record(now, **news)))
    seen = self._lease.seen
    with self._changed:
      self.inside = seen.get("inside", 0)
      self._started = self._started or bool(seen.get("started"))
      self._changed.notify_all()
    self._journal.first = max(self._journal.first, seen.get("first", 0))
    self._journal.forget(seen.get("snapshot") or 0)
    await self._compare(seen.get("snapshot"))

  async def _compare(self, snapshot: int | None) -> None:
    """Compares the outer state of this site with a new snapshot.

    Raises:
      ConfigError: they differ.
    """
    if snapshot is None or snapshot == self._checked or not self._known:
      return
    own = self._digests.get(snapshot)
    if own is None:
      return
    found = await self._read(_head_of(snapshot))
    if not found:
      return
    if found[0]["digests"] != own:
      # Without digests it takes the group's state when it starts again.
      last = self._own_record() | {"digests": {}, "reason": "stopped"}
      await self._write_record(last)
      self._digests.clear()
      raise ConfigError(
        f"the outer state of site {self._site} after {snapshot} rounds is not that of"
        f" the group at {self._address}; start the site again, then it takes the"
        " group's."
      )
    self._checked = snapshot

  async def _send(self) -> None:
    """Writes the payloads that wait."""
    with self._changed:
      self._sent &= self._outgoing.keys()
      waiting = {r: x for r, x in self._outgoing.items() if r not in self._sent}
    for number, whole in waiting.items():
      data = pack(whole.fields, whole.body)
      await self._write(payload_of(number, self._site), data)
      self._sent.add(number)

  async def _read_rounds(self) -> None:
    """Reads the rounds that closed, as far as there is room for them."""
    if not self._known:
      await self._find_place()
      return
    await asyncio.to_thread(self._journal.advance)
    if self._journal.closed < self._journal.first:
      await self._skip()  # This site was away for so long that rounds are gone.
    with self._changed:
      self._published = self._journal.closed
      self._changed.notify_all()
    while self._next < self._journal.closed and len(self._closed) < self.room:
      entry = await asyncio.to_thread(self._journal.find, self._next)
      if entry:
        await self._take(entry)
      elif self._next < self._journal.first:
        await self._skip()
      else:
        raise OSError(f"round {self._next} is missing or damaged in journal/")

  async def _take(self, entry: Entry) -> None:
    number = entry.round
    own = (entry.tokens, entry.payloads, entry.refused, entry.per_step)
    with self._changed:
      self._closed[number] = Closed(number, entry.fragment, *own)
      self._outgoing.pop(number, None)
      self._next = number + 1
      self._changed.notify_all()
    if number in self._sent:
      await asyncio.to_thread(self._store.delete, payload_of(number, self._site))

  async def _find_place(self) -> None:
    """Finds out what the site lacks, as soon as the group has an outer state.

    Raises:
      ConfigError: this site has rounds of another run.
    """
    seen, number, own = self._lease.seen, self._hello["round"], self._hello["digests"]
    snapshot = seen.get("snapshot")
    if not self._record or (snapshot is None and not self._lease.held):
      return
    if snapshot is None:
      if number:
        raise ConfigError(
          f"--coordinator is {self._address}, which has no closed round, but this site"
          f" has {number}; give the folder that the run had, or another --workdir."
        )
      self._welcomed_with(Welcome(0, {}, b""), own)
      return
    found = await self._read(_head_of(snapshot))
    if not found:
      return
    self._journal.begin(snapshot, found[0]["data"])
    await asyncio.to_thread(self._journal.advance)
    known = self._digests | {snapshot: found[0]["digests"]}
    if (
      self._journal.first <= number <= self._journal.closed and known.get(number) == own
    ):
      self._welcomed_with(Welcome(number, self._journal.data.copy(), b""), own)
    else:
      await self._skip()

  async def _skip(self) -> None:
    """Takes the newest snapshot, and begins with the rounds after it."""
    number = self._lease.seen["snapshot"]
    head = await self._read(_head_of(number))
    state = await self._read(f"snapshots/{number:09d}.state")
    if head and state:
      self._journal.begin(number, head[0]["data"])
      welcome = Welcome(number, self._journal.data.copy(), bytes(state[1]))
      self._welcomed_with(welcome, head[0]["digests"])

  def _welcomed_with(self, welcome: Welcome, digests: list[int]) -> None:
    with self._changed:
      self._welcome, self._next = welcome, welcome.round
      self._published = max(self._journal.closed, self._next)
      self._digests[welcome.round] = digests
      self._outgoing.clear()
      self._known = True
      self._changed.notify_all()

  # While this site has the lease.

  async def _hold(self) -> None:
    """Closes rounds until the site loses the lease or leaves."""
    seen = self._lease.seen
    if not (self._known and self._lease.held and seen.get("snapshot") is not None):
      return
    if self._holding_since != seen["term"]:
      self._holding_since = seen["term"]
      self._print(f"Group: site {self._site} closes the rounds.")
    goes_on = lambda: self._lease.held and not self._leaving
    args = (self._store, self._calendar, self._journal, self._lost_s, self._print)
    self._holder = Holder(*args)
    try:
      await self._holder.close_rounds(self._measure, bool(seen.get("started")), goes_on)
    finally:
      self._holder = None

  async def _keep_state(self) -> None:
    """Writes the snapshot that the site has offered, and deletes old files."""
    offered, before = self._offered, self._lease.seen.get("snapshot")
    if not offered or not self._lease.held:
      return
    number, digests, state = offered
    if before is None or before < number:
      await self._write_snapshot(number, digests, state, before or 0)
    if self._offered is offered:
      self._offered = None

  async def _write_snapshot(
    self, number: int, digests: list[int], state: bytes, before: int
  ) -> None:
    await self._write(f"snapshots/{number:09d}.state", pack({}, state))
    head = {"digests": digests, "data": self._journal.data.copy()}
    await self._write(_head_of(number), pack(head))
    await asyncio.to_thread(self._journal.write_lines)
    if self._lease.held:
      own = {"snapshot": number, "first": before}
      await self._write("lease", pack(self._lease.record(time.monotonic(), **own)))
      await asyncio.to_thread(self._delete, before)

  def _delete(self, first: int) -> None:
    """Deletes the rounds below `first`; a site that lacks them takes a snapshot."""
    for folder in ("journal", "payloads", "snapshots"):
      for name in self._store.names(folder):
        number = number_of(name)
        if number is not None and number < first:
          self._store.delete(f"{folder}/{name}")

  async def _read(self, name: str) -> tuple[dict[str, Any], memoryview] | None:
    return await asyncio.to_thread(self._store.read, name)

  async def _write(self, name: str, data: bytes) -> None:
    await asyncio.to_thread(self._store.put, name, data)


def _no_channel() -> NoReturn:
  raise NotImplementedError("a store needs no channel")


def _head_of(number: int) -> str:
  return f"snapshots/{number:09d}.head"
