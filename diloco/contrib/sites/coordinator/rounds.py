"""Which round closes when, and with whom: the coordinator's decisions. No I/O, no JAX.

A round is one send of one fragment, by all sites. Rounds close in the order of the
schedule. A round closes when every expected site has sent its payload, or when a quorum
has sent and the grace window is over. A site that misses a round is not expected again
until it reports that it has caught up, so it delays the others once, by the window at
most. A site that misses one round after another is waited for half as long, then a
quarter as long. Times are seconds of any clock that never goes back.
"""

import dataclasses
import enum
import math

_LEAST_PATIENCE = 0.25


class Presence(enum.Enum):
  """Whether a site takes part."""

  AWAY = "away"  # Not connected.
  JOINED = "joined"  # Connected, but it has not trained its first step yet.
  IN = "in"  # Expected in every round from `Member.first` on.
  LATE = "late"  # Missed a round, and has not caught up.


@dataclasses.dataclass
class Member:
  """What the coordinator knows of one site.

  Attributes:
    presence: whether the site takes part.
    first: the first round in which the site is expected.
    late: how often the site missed a round.
    patience: share of the window that a round waits for this site.
  """

  presence: Presence = Presence.AWAY
  first: int = 0
  late: int = 0
  patience: float = 1.0


@dataclasses.dataclass(frozen=True)
class Closing:
  """A round that closes.

  Attributes:
    round: its number.
    members: the sites whose payloads count, ascending.
    late: the sites that were expected and did not send.
    waited_s: seconds between the quorum and the closing.
  """

  round: int
  members: tuple[int, ...]
  late: tuple[int, ...]
  waited_s: float


class Rounds:
  """The state of all open rounds.

  Attributes:
    closed: rounds below this number are closed.
    members: {site: Member}.
  """

  def __init__(self, sites: int, quorum: int, grace_s: float, closed: int = 0):
    """Starts before the first round, or goes on after a restart.

    Args:
      sites: number of sites, K.
      quorum: payloads without which no round closes.
      grace_s: seconds that a round waits for the other sites after the quorum.
      closed: rounds that are closed already.
    """
    self.closed, self._quorum, self._grace_s = closed, quorum, grace_s
    self.members = {k: Member(first=closed) for k in range(sites)}
    self._sent: dict[int, set[int]] = {}  # {open round: sites that have sent}
    self._quorum_at: dict[int, float] = {}
    # After a restart the sites that are still on their way count as expected.
    self._returning: set[int] = set()

  def expect_return(self, sites: tuple[int, ...]) -> None:
    """Expects sites of a run that the coordinator continues, for one window."""
    self._returning = set(sites)

  def join(self, site: int) -> None:
    """A site connects; it is not expected before `ready`."""
    self.members[site].presence = Presence.JOINED

  def ready(self, site: int, first: int) -> None:
    """A site reports that it will send round `first` and those after it."""
    member = self.members[site]
    self._returning.discard(site)
    if member.presence is not Presence.AWAY:
      member.presence, member.first = Presence.IN, max(first, self.closed)

  def leave(self, site: int) -> None:
    """The connection of a site ends. What it has sent in full still counts."""
    self.members[site].presence = Presence.AWAY
    self._returning.discard(site)

  def sent(self, site: int, number: int, now: float) -> bool:
    """A payload is complete; returns False if its round closed without it."""
    if number < self.closed:
      return False
    sites = self._sent.setdefault(number, set())
    sites.add(site)
    self.members[site].patience = 1.0
    if len(sites) >= self._quorum:
      self._quorum_at.setdefault(number, now)
    return True

  def has(self, site: int, number: int) -> bool:
    """Returns whether a site has sent its payload of an open round."""
    return site in self._sent.get(number, ())

  def close(self, now: float) -> Closing | None:
    """Closes the next round if it may close."""
    number = self.closed
    have = self._sent.get(number, set())
    if len(have) < self._quorum:
      return None
    missing = self._expected(number) - have
    if now < self.deadline():
      return None
    for site in missing:
      self._returning.discard(site)
      member = self.members[site]
      member.late += 1
      member.patience = max(member.patience / 2, _LEAST_PATIENCE)
      if member.presence is Presence.IN:
        member.presence = Presence.LATE
    self._sent.pop(number)
    quorum_at = self._quorum_at.pop(number)
    self.closed += 1
    return Closing(number, tuple(sorted(have)), tuple(sorted(missing)), now - quorum_at)

  def deadline(self) -> float:
    """Returns when the next round closes even if nothing happens; or infinity."""
    missing = self._expected(self.closed) - self._sent.get(self.closed, set())
    patience = max((self.members[site].patience for site in missing), default=0.0)
    return self._quorum_at.get(self.closed, math.inf) + patience * self._grace_s

  def _expected(self, number: int) -> set[int]:
    inside = {
      site
      for site, member in self.members.items()
      if member.presence is Presence.IN and member.first <= number
    }
    return inside | self._returning
