"""The lease: the site that has the lease closes the rounds. No I/O, no JAX.

The holder of the lease changes a counter in a file again and again. A site that sees no
change for some seconds of its own clock claims the lease. No clocks are compared, so it
does not matter what time they show. Two sites may have the lease for a moment, or the
former holder may wake up: this costs time, but no round can be written twice
(`journal.py`).
"""

import random

from diloco.util.types import Json

_BEATS = 8  # The counter changes this many times within the lease's time-out.


class Lease:
  """What a site knows of the lease, and whether the site has it.

  Attributes:
    held: whether this site closes rounds.
    seen: the newest record of a holder, {} before there is one. It has the name of the
      holder, the number of the claim (`term`), the counter (`beat`), whether the holder
      has `left`, and what the holder adds.
    beat_s: seconds between two changes of the counter.
  """

  def __init__(self, name: str, lost_s: float):
    """Starts without a lease.

    Args:
      name: a random name of this process.
      lost_s: seconds without a change after which a site claims the lease.
    """
    self.held, self.seen, self.beat_s = False, Json(), lost_s / _BEATS
    self._name, self._lost_s = name, lost_s
    self._term = 0  # The number of this site's claim; 0: no claim.
    self._claimed_at = self._beat_at = self._changed_at = 0.0
    self._patience = 1.0

  def observe(self, record: Json | None, now: float) -> None:
    """Takes the record that was read from the storage, if any."""
    if not self._changed_at:
      self._renew(now)
    if not record or not _is_record(record) or _rank(record) < _rank(self.seen):
      return  # A former holder woke up and wrote; the new holder will write again.
    if _rank(record) != _rank(self.seen):
      self._renew(now)
    self.seen = dict(record)
    if record["name"] != self._name:
      self.held, self._term = False, 0
    elif self._term and now - self._claimed_at >= self.beat_s:
      self.held = True  # Nobody else claimed the lease in this time.

  def is_due(self, now: float) -> bool:
    """Returns whether this site must write `record` now."""
    if self._term:
      return now >= self._beat_at
    gone = not self.seen or self.seen["left"]
    return now - self._changed_at > self._patience * (
      self.beat_s if gone else self._lost_s
    )

  def record(self, now: float, **more: object) -> Json:
    """Returns the next record of a holder, or of a site that claims the lease."""
    if not self._term:
      self._term, self._claimed_at = self.seen.get("term", 0) + 1, now
    self._beat_at = now + self.beat_s
    lease = {"name": self._name, "term": self._term, "left": False}
    beat = self.seen["beat"] + 1 if self.seen.get("name") == self._name else 0
    self.seen = self.seen | more | lease | {"beat": beat}
    return self.seen

  def leave(self) -> Json:
    """Returns the last record of a holder; another site then claims the lease soon."""
    self.held = False
    return self.seen | {"beat": self.seen["beat"] + 1, "left": True}

  def _renew(self, now: float) -> None:
    # A random wait: not all sites claim the lease at the same moment.
    self._changed_at, self._patience = now, random.uniform(1.0, 1.5)


def _is_record(record: Json) -> bool:
  kinds = {"name": str, "term": int, "beat": int, "left": bool}
  added = {"site": int, "snapshot": int, "first": int, "started": bool}
  kinds |= {name: kind for name, kind in added.items() if name in record}
  return all(isinstance(record.get(name), kind) for name, kind in kinds.items())


def _rank(record: Json) -> tuple[int, str, int]:
  """Returns the rank of a record: of two claims at the same time, one ranks higher."""
  return record.get("term", 0), record.get("name", ""), record.get("beat", -1)
