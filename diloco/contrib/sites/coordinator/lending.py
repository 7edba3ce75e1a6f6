"""Which site trains the text of a site that is away: the coordinator's decisions.

The text of an absent site is lent in blocks of sequences, about one for every period of
sync_every steps. A site that comes back goes on after the last block, so nobody waits
for a block to be returned. A block whose reader dies is lent again. No I/O, no JAX.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from diloco.contrib.sites import SitesConfig
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.link import Block


class Lending:
  """The texts of all sites.

  Attributes:
    skip: {site: sequences of each of its shards, after its recorded position, that
      were lent}. A site that comes back goes on after these.
    sent: {site: the last round with its payload}; -1: none.
    open: {(round, site whose text it is): block that is not known to be finished}.
  """

  def __init__(self, calendar: Calendar, lines: Iterable[Mapping[str, Any]]):
    """Starts before the first round, or goes on after the lines of rounds.jsonl."""
    self._calendar, self._sites = calendar, range(calendar.sites)
    self.skip = dict.fromkeys(self._sites, 0)
    self.sent = dict.fromkeys(self._sites, -1)
    self._lent = dict.fromkeys(self._sites, -1)  # The last round with a block of it.
    self._taken = dict.fromkeys(self._sites, 0)  # Blocks that each site was lent.
    self.open: dict[tuple[int, ...], Block] = {}
    for line in lines:
      lent = {int(k): Block(*block) for k, block in line.get("lent", {}).items()}
      members = [int(site) for site in line["tokens"]]
      self.closed(line["round"], members, lent, line.get("finished", ()))

  def started_again(self, site: int) -> None:
    """A process of a site is new: it does not know the blocks of the one before."""
    for name, block in self.open.items():
      if block.reader == site:
        self.open[name] = block._replace(reader=-1)

  def choose(
    self,
    number: int,
    per_step: Mapping[int, int],
    away: Collection[int],
    positions: Mapping[int, Mapping[str, Any]],
  ) -> dict[int, Block]:
    """Returns {site: block of its text} for a round that closes.

    Args:
      number: the round.
      per_step: {member: tokens of one of its replicas' inner steps}.
      away: the sites that are not connected.
      positions: {site: recorded positions of its shards}; only where they are known.
    """
    c, found = self._calendar.config, dict[int, Block]()
    absent = c.of(SitesConfig).lend_after * self._calendar.fragments
    if not absent or not per_step:
      return found
    tokens = c.model.seq_len * c.shards // c.replicas  # Of a sequence in each shard.
    normal = c.sync_every * (c.train.batch_size // c.shards)
    share = math.ceil(normal * len(per_step) / len(self._sites))
    load = {k: sum(b.reader == k for b in self.open.values()) for k in per_step}
    gone = [k for k in away if number - self.sent[k] > absent]
    rows = {k: max(n // tokens, 1) for k, n in per_step.items()}
    turn = lambda i: (load[i], self._taken[i], i)
    for k in self._sites:
      orphans = (
        (name, block)
        for name, block in self.open.items()
        if name[1] == k and block.reader in (-1, *gone)
      )
      if orphan := next(orphans, None):
        name, block = orphan
        # If possible, by whole batches: a reader goes on to the end of its last batch.
        reader = min(load, key=lambda i: (block.size % rows[i] > 0, turn(i)))
        found[k] = block._replace(reader=reader, again=name)
      elif k in gone and k in positions and number >= self._lent[k] + absent:
        reader = min(load, key=turn)
        size = math.ceil(share / rows[reader]) * rows[reader]
        found[k] = Block(reader, dict(positions[k]), self.skip[k], size)
      if k in found:
        load[found[k].reader] += 1
    return found

  def closed(
    self,
    number: int,
    members: Iterable[int],
    lent: Mapping[int, Block],
    finished: Iterable[Iterable[int]],
  ) -> None:
    """Takes a closed round.

    Args:
      number: the round.
      members: the sites whose payloads count.
      lent: from `choose`.
      finished: the names of blocks that members have finished.
    """
    for k in members:
      self.sent[k], self.skip[k] = number, 0
    for name in finished:
      self.open.pop(tuple(name), None)
    for k, block in lent.items():
      if block.again:
        self.open.pop(tuple(block.again), None)
      else:
        self.skip[k], self._lent[k] = block.skip + block.size, number
      self.open[number, k] = block
      self._taken[block.reader] += 1
