"""Closes the rounds of a group while this site has the lease. No JAX.

The holder reads the files of all sites, tells `Rounds` what is new, and writes the
rounds that may close.
"""

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable

from diloco.config import changed
from diloco.contrib.sites import SitesConfig
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.group import records
from diloco.contrib.sites.group.journal import Closed, Journal, path_of
from diloco.contrib.sites.group.records import Payload, Record
from diloco.contrib.sites.group.rounds import Closing, Measure, Outliers, Rounds, Window
from diloco.util.storage import Storage


@dataclasses.dataclass
class Seen:
  """What the holder of the lease knows of a site's files.

  Attributes:
    record: the site's newest record; None before there is one.
    looked: whether the holder has looked for a record.
    changed_at: when the record changed last.
    session: name of the site's process that takes part; "": no process takes part.
    ready: the record's `ready` that `Rounds` was told last.
    refused: rounds for which this site sent an invalid payload.
  """

  record: Record | None = None
  looked: bool = False
  changed_at: float = -math.inf
  session: str = ""
  ready: int | None = None
  refused: set[int] = dataclasses.field(default_factory=set)


class Holder:
  """Closes rounds.

  Attributes:
    started: whether the group has begun.
  """

  def __init__(
    self,
    storage: Storage,
    calendar: Calendar,
    journal: Journal,
    started: bool,
    print_line: Callable[[str], None],
  ):
    """Prepares to close rounds.

    Args:
      storage, calendar: the files, and the rounds of the run.
      journal: the closed rounds, as far as this site has seen them.
      started: whether the group has begun.
      print_line: prints a line.
    """
    c = calendar.config
    self._storage, self._journal, self._config = storage, journal, c.of(SitesConfig)
    # Without this site's own fields, which must not limit the other sites.
    fields = {"sites.pace": 1.0, "sites.batch_size": 0}
    self._calendar = Calendar(changed(c, fields))
    self._print = lambda line: print_line(f"Group: {line}")
    self.started = started or journal.closed > 0
    self._seen = {site: Seen() for site in range(calendar.sites)}
    self._payloads = dict[tuple[int, int], Payload]()  # {(open round, site): payload}
    self._first_ready = math.inf

  async def close_rounds(self, measure: Measure, goes_on: Callable[[], bool]) -> None:
    """Closes rounds until this site loses the lease, or another site closes a round.

    Args:
      measure: measures the payloads of a round; runs in a thread.
      goes_on: returns whether this site still has the lease.

    Raises:
      OSError: the storage fails.
    """
    await asyncio.to_thread(self._journal.advance)
    rounds, outliers = self._start()
    while goes_on():
      looks = (self._look(rounds, site) for site in self._seen)
      for error in await asyncio.gather(*looks, return_exceptions=True):
        if error:
          raise error
      self._begin(rounds)
      while self.started and (closing := rounds.close(time.monotonic())):
        closed = await self._closed(closing, outliers, measure)
        if not await asyncio.to_thread(self._journal.write, closed):
          await asyncio.to_thread(self._journal.advance)
          if self._journal.closed <= closed.round:
            raise OSError(f"{path_of(closed.round)} is missing or damaged")
          return
        kept = {k: x for k, x in self._payloads.items() if k[0] > closed.round}
        self._payloads = kept
      await asyncio.sleep(self._storage.poll_s)

  def _start(self) -> tuple[Rounds, Outliers]:
    """Makes the open rounds and the usual norms from the last closed rounds."""
    sites, c = self._config, self._calendar.config
    steps = [t for t, _ in self._calendar.rounds if t <= c.train.steps]
    tau = min(c.overlap.taus)
    window = Window(sites.grace_s, sites.least_grace_s, tau, steps)
    number = self._journal.closed
    rounds = Rounds(self._calendar.sites, sites.quorum, window, number)
    outliers = Outliers(sites.most_norm, sites.least_cosine)
    headers = self._journal.headers
    for r in sorted(headers):
      norms = [headers[r]["measured"][site][0] for site in headers[r]["tokens"]]
      outliers.counted(headers[r]["fragment"], norms)
    if number - 1 in headers:
      rounds.expect_return(tuple(map(int, headers[number - 1]["tokens"])))
    return rounds, outliers

  async def _look(self, rounds: Rounds, site: int) -> None:
    """Reads a site's record, and takes its new payloads."""
    seen, now = self._seen[site], time.monotonic()
    args = (self._storage, self._calendar, site)
    record = await asyncio.to_thread(records.read_record, *args) or seen.record
    if record != seen.record:
      # A record at the first look may come from a process that has ended.
      seen.changed_at = now if seen.looked else -math.inf
      seen.record = record
    seen.looked = True
    # First, because perhaps only the farewell of a site names its last payload.
    if seen.session and record:
      await self._take(rounds, site, record["sent"])
    self._come_or_go(rounds, site, now - seen.changed_at < self._config.lost_s)

  def _come_or_go(self, rounds: Rounds, site: int, is_fresh: bool) -> None:
    """Tells `Rounds` whether a site takes part, and which rounds it will send."""
    seen, record = self._seen[site], self._seen[site].record
    is_in = bool(is_fresh and record and not record["reason"])
    if seen.session and not (is_in and record and seen.session == record["session"]):
      rounds.leave(site)
      seen.session, seen.ready = "", None
      reason = record["reason"] if record else ""
      self._count(f"Site {site} {f'has {reason}' if reason else 'is gone'}")
    if not (is_in and record):
      return
    if not seen.session:
      seen.session = record["session"]
      self._count(f"Site {site} is in")
    if record["ready"] is not None and record["ready"] != seen.ready:
      # A site that came before this holder may already have sent open rounds.
      sent = record["sent"] if seen.ready is None else []
      rounds.ready(site, min([record["ready"], *sent]))
      seen.ready = record["ready"]
      self._first_ready = min(self._first_ready, time.monotonic())

  def _count(self, line: str) -> None:
    inside = sum(bool(seen.session) for seen in self._seen.values())
    self._print(f"{line}: {inside} of {self._calendar.sites}.")

  def _begin(self, rounds: Rounds) -> None:
    """Starts the group when all are ready, or when the first site waited start_s."""
    if self.started:
      return
    sites, count = self._config, self._calendar.sites
    ready = sum(m.first < math.inf for m in rounds.members.values())
    waited_s = time.monotonic() - self._first_ready
    if ready == count or (ready >= sites.quorum and waited_s > sites.start_s):
      self._print(f"training begins with {ready} of {count} sites.")
      self.started = True

  async def _take(self, rounds: Rounds, site: int, sent: list[int]) -> None:
    """Takes the payloads that a site says it has written."""
    for r in sent:
      is_open = rounds.closed <= r < rounds.closed + self._calendar.fragments
      in_run = r < len(self._calendar.rounds)
      known = rounds.has(site, r) or r in self._seen[site].refused
      if not (is_open and in_run) or known:
        continue
      name = records.payload_of(r, site)
      unpacked = await asyncio.to_thread(records.read, self._storage, name)
      if not unpacked:
        continue  # The file is still missing or incomplete.
      try:
        payload = records.check_payload(self._calendar, r, site, *unpacked)
      except ValueError as error:
        self._seen[site].refused.add(r)
        self._print(f"site {site}: {error}.")
      else:
        self._payloads[r, site] = payload
        rounds.sent(site, r, time.monotonic())

  async def _closed(
    self, closing: Closing, outliers: Outliers, measure: Measure
  ) -> Closed:
    """Makes a closed round of the payloads that have no bad numbers."""
    number, (step, fragment) = closing.round, self._calendar.rounds[closing.round]
    sent = {k: self._payloads[number, k] for k in closing.members}
    bodies = {k: bytes(x.body) for k, x in sent.items()}
    measured = await asyncio.to_thread(measure, number, bodies)
    steps = {k: x.tokens / x.per_step for k, x in sent.items()}
    refused = outliers.refused(fragment, measured, steps)
    for site, reason in refused.items():
      del sent[site]
      self._print(f"refuses the payload of site {site} in round {number}: {reason}.")
    outliers.counted(fragment, [measured[k].norm for k in sent])
    return Closed(
      round=number,
      fragment=fragment,
      step=step,
      tokens={k: x.tokens for k, x in sent.items()},
      payloads={k: bodies[k] for k in sent},
      per_step={k: x.per_step for k, x in sent.items()},
      late=closing.late,
      refused=tuple(sorted(refused)),
      measured=measured,
      waited_s=round(closing.waited_s, 3),
      data={shard: at for x in sent.values() for shard, at in x.data.items()},
    )
