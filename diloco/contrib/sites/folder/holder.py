"""Closes the rounds of a group while this site has the lease.

What the sites have written reaches the `Board` of a coordinator as if it came over
connections, so the rules by which rounds close are the coordinator's.
"""

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator.board import Board, Measure, Session
from diloco.contrib.sites.folder.journal import Adopted, StoreJournal
from diloco.contrib.sites.folder.store import Store
from diloco.contrib.sites.messages import BadMessage, Message


@dataclasses.dataclass
class Seen:
  """What the holder has seen of a site.

  Attributes:
    record: the site's newest record, {} before there is one, None before a look.
    changed_at: when it changed last.
    session: of the site's process, if the site is in.
    refused: payloads that are no payloads of their round.
  """

  record: dict[str, Any] | None = None
  changed_at: float = 0.0
  session: Session | None = None
  refused: set[int] = dataclasses.field(default_factory=set)


class Holder:
  """Closes rounds."""

  def __init__(
    self,
    store: Store,
    calendar: Calendar,
    journal: StoreJournal,
    lost_s: float,
    print_line: Callable[[str], None],
  ):
    """Prepares to close rounds.

    Args:
      store, calendar: the files, and the rounds of the run.
      journal: the closed rounds.
      lost_s: seconds without a change of its record after which a site counts as gone.
      print_line: prints a line.
    """
    self._store, self._calendar, self._journal = store, calendar, journal
    self._lost_s, self._print = lost_s, print_line
    self._seen = {site: Seen() for site in range(calendar.sites)}
    self._board: Board | None = None

  def news(self) -> dict[str, Any]:
    """Returns what the record of the lease tells the sites."""
    board = self._board
    return {"inside": board.inside(), "started": board.started} if board else {}

  async def close_rounds(
    self, measure: Measure, started: bool, goes_on: Callable[[], bool]
  ) -> None:
    """Closes rounds until all are closed, or another site has closed one.

    Args:
      measure: measures the payloads of a round.
      started: whether the group has begun.
      goes_on: returns whether this site still has the lease.

    Raises:
      OSError: the file system fails.
    """
    await asyncio.to_thread(self._journal.advance)
    lines = lambda line: self._print(f"Group: {line}")
    board = self._board = Board(self._calendar, self._journal, lines)
    board.started |= started
    closing = asyncio.create_task(board.close_rounds(measure))
    try:
      while goes_on() and not closing.done():
        looks = (self._look(board, site) for site in self._seen)
        for error in await asyncio.gather(*looks, return_exceptions=True):
          if error:
            raise error
        await asyncio.sleep(self._store.poll_s)
    finally:
      board.stop()
      await asyncio.wait([closing])
    try:
      closing.result()
    except Adopted:
      number = board.published
      await asyncio.to_thread(self._journal.advance)
      self._journal.read(number)  # Raises OSError if the file is damaged.

  async def _look(self, board: Board, site: int) -> None:
    """Takes what is new of a site."""
    seen, now = self._seen[site], time.monotonic()
    found = await asyncio.to_thread(self._store.read, record_of(site))
    record = found[0] if found and _is_record(found[0]) else seen.record or {}
    if record != seen.record:
      # What is there at the first look may be of a process that has ended.
      seen.changed_at = -math.inf if seen.record is None else now
      seen.record = record
    self._come_or_go(board, site, record, now - seen.changed_at < self._lost_s)
    if seen.session:
      await self._payloads(board, seen.session, record["sent"])

  def _come_or_go(
    self, board: Board, site: int, record: dict[str, Any], is_fresh: bool
  ) -> None:
    session = self._seen[site].session
    is_in = is_fresh and record and not record["reason"]
    if session and not (is_in and session.name == record["session"]):
      if record["reason"]:
        board.receive(session, Message("leave", {"reason": record["reason"]}))
      board.gone(site)
      session = None
    if is_in and not session:
      session = Session(site, record["session"], {"ready": None})
      board.joined(site)
    self._seen[site].session = session
    if session and record["ready"] != (before := session.fields["ready"]):
      session.fields["ready"] = record["ready"]
      # Of a site that was there before this holder, open rounds are here already.
      rounds = [record["ready"], *(record["sent"] if before is None else ())]
      board.receive(session, Message("ready", {"round": min(rounds)}))

  async def _payloads(self, board: Board, session: Session, sent: list[int]) -> None:
    site, closed = session.site, board.rounds.closed
    for r in sent:
      is_open = closed <= r < closed + self._calendar.fragments
      if not is_open or board.rounds.has(site, r) or r in self._seen[site].refused:
        continue
      found = await asyncio.to_thread(self._store.read, payload_of(r, site))
      if not found:
        continue  # It is not there in whole yet.
      head, data = found
      session.offsets.pop(r, None)
      try:
        if len(data) != head.get("total"):
          raise BadMessage(f"its payload of round {r} has {len(data)} bytes")
        whole = head | {"round": r, "offset": 0}
        board.receive(session, Message("chunk", whole, data))
      except BadMessage as error:
        self._seen[site].refused.add(r)
        self._print(f"Group: site {site}: {error}.")


def _is_record(found: dict[str, Any]) -> bool:
  """Returns whether a file of a site is what `FolderLink` writes."""
  ready, sent = found.get("ready"), found.get("sent")
  numbers = [*sent, ready or 0] if isinstance(sent, list) else [None]
  is_round = lambda x: isinstance(x, int) and x >= 0
  texts = (found.get("session"), found.get("reason"))
  return all(isinstance(x, str) for x in texts) and all(map(is_round, numbers))


def record_of(site: int) -> str:
  """Names the file that says what a site does."""
  return f"sites/{site}"


def payload_of(number: int, site: int) -> str:
  """Names a payload."""
  return f"payloads/{number:09d}.site-{site}"
