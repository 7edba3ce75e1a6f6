"""Decides when a round closes, and with which sites. No I/O, no JAX.

A round is one send of one fragment, by all sites. Rounds close in the order of the
schedule. A round closes when every expected site has sent its payload, or when a quorum
has sent and the grace window is over. A site that misses a round is not expected again
until it reports that it has caught up. So it delays the others once, at most by the
window. If a site misses one round after another, the group waits for it half as long,
then a quarter as long. `Outliers` refuses payloads with bad numbers. Times are seconds
of any clock that never goes back.
"""

import collections
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

_LEAST_PATIENCE = 0.25
_LATELY = 8  # The usual norm comes from so many last rounds of a fragment.
_PACES = 16  # So many last pairs of rounds show how long a step takes.


@dataclasses.dataclass
class Member:
  """What the holder of the lease knows of one site.

  Attributes:
    first: the first round in which the site is expected; infinite before the site's
      first inner step, after the site has left, and from a missed round until the site
      has caught up.
    patience: share of the window that a round waits for this site.
  """

  first: float = math.inf
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


class Measured(NamedTuple):
  """The norm and the cosine of a payload.

  Attributes:
    norm: the largest norm of the site's replicas; None if a value is not finite.
    cosine: the mean cosine with the other payloads that are finite; None if there are
      fewer than two others.
  """

  norm: float | None
  cosine: float | None = None


# A function that measures the payloads {site: bytes} of a round.
Measure: TypeAlias = Callable[[int, dict[int, bytes]], dict[int, Measured]]


class Outliers:
  """Refuses payloads with bad numbers, compared with the group's latest payloads."""

  def __init__(self, most_norm: float, least_cosine: float):
    """Starts without earlier norms; the arguments are fields of `SitesConfig`."""
    self._most_norm, self._least_cosine = most_norm, least_cosine
    new = functools.partial(collections.deque[list[float]], maxlen=_LATELY)
    self._norms = collections.defaultdict[int, collections.deque[list[float]]](new)

  def refused(
    self, fragment: int, measured: Mapping[int, Measured], steps: Mapping[int, float]
  ) -> dict[int, str]:
    """Returns {site whose payload does not count in a round: the reason}.

    The limit of a norm is `most_norm` times the larger of two medians. One is over the
    norms that counted in this fragment's last rounds, the other over the other sites'
    norms in this round. So no site is refused if the whole group changes. If this
    site's payload has k > 1 times the inner steps of another site's, the other norm is
    first multiplied by k.

    Args:
      fragment: the fragment of the round.
      measured: norm and cosine of the payload of each site that has sent.
      steps: {site: number of inner steps in its payload}.
    """
    lately = [x for norms in self._norms[fragment] for x in norms]
    reasons = dict[int, str]()
    for site, (norm, cosine) in measured.items():
      others = [
        x.norm * max(steps[site] / steps[k], 1)
        for k, x in measured.items()
        if k != site and x.norm is not None
      ]
      usual = max((statistics.median_low(x) for x in (lately, others) if x), default=0)
      if norm is None:
        reasons[site] = "not all values are finite"
      elif self._most_norm and usual and norm > self._most_norm * usual:
        reasons[site] = f"its norm is {norm:.3g}, but {usual:.3g} is usual"
      elif cosine is not None and cosine < self._least_cosine:
        reasons[site] = f"its mean cosine with the others is {cosine:.2f}"
    return reasons

  def counted(self, fragment: int, norms: Iterable[float | None]) -> None:
    """Remembers the norms of the payloads that counted in a round."""
    self._norms[fragment].append([norm for norm in norms if norm is not None])


@dataclasses.dataclass
class Window:
  """How long a round waits after its quorum: for the rest of tau inner steps.

  The first site that sends trains tau more steps before it needs the round, so until
  then a wait costs nothing. The time of a step is the median of measured times: the
  time between the first payloads of two successive rounds, divided by the steps between
  them.

  Attributes:
    most_s: the longest wait; a round waits so long if tau is 0, before a step is
      measured, and in a final sync.
    least_s: the shortest wait, unless most_s is less.
    tau: inner steps between a send and the earliest merge.
    steps: the inner step after which each round is sent, without those of a final sync.
  """

  most_s: float
  least_s: float = 0.0
  tau: int = 0
  steps: Sequence[int] = ()

  def __post_init__(self) -> None:
    self._first: dict[int, float] = {}  # {round: when its first payload came}
    self._paces = collections.deque[float](maxlen=_PACES)  # Seconds per step.

  def sent(self, number: int, now: float) -> None:
    """Remembers when the first payload of a round came."""
    if number in self._first or number >= len(self.steps):
      return
    self._first[number] = now
    before = self._first.get(number - 1)
    steps = self.steps[number] - self.steps[number - 1] if number else 0
    if before is not None and steps:
      self._paces.append((now - before) / steps)

  def seconds(self, number: int, quorum_at: float) -> float:
    """Returns how long a round waits for the other sites after its quorum."""
    if not (self.tau and self._paces and number in self._first):
      return self.most_s
    needed_at = self._first[number] + self.tau * statistics.median(self._paces)
    return min(max(needed_at - quorum_at, self.least_s), self.most_s)


class Rounds:
  """The state of all open rounds.

  Attributes:
    closed: rounds below this number are closed.
    members: {site: Member}.
  """

  def __init__(self, sites: int, quorum: int, window: Window, closed: int = 0):
    """Starts before the first round, or when the holder of the lease changes.

    Args:
      sites: number of sites, K.
      quorum: smallest number of payloads with which a round closes.
      window: how long a round waits for the other sites after the quorum.
      closed: rounds that are closed already.
    """
    self.closed, self._quorum, self._window = closed, quorum, window
    self.members = {k: Member() for k in range(sites)}
    self._sent: dict[int, set[int]] = {}  # {open round: sites that have sent}
    self._quorum_at: dict[int, float] = {}
    # Sites that a new holder expects, although they have not reported to it yet.
    self._returning: set[int] = set()

  def expect_return(self, sites: tuple[int, ...]) -> None:
    """Expects the sites that were in the last round, for one window."""
    self._returning = set(sites)

  def ready(self, site: int, first: int) -> None:
    """Notes that a site will send round `first` and all later rounds."""
    self.members[site].first = first
    self._returning.discard(site)

  def leave(self, site: int) -> None:
    """Removes a site that goes; the payloads that it has sent still count."""
    self.members[site].first = math.inf
    self._returning.discard(site)

  def sent(self, site: int, number: int, now: float) -> None:
    """Notes that a site's payload of an open round has come."""
    sites = self._sent.setdefault(number, set())
    sites.add(site)
    self.members[site].patience = 1.0
    self._window.sent(number, now)
    if len(sites) >= self._quorum:
      self._quorum_at.setdefault(number, now)

  def has(self, site: int, number: int) -> bool:
    """Returns whether a site has sent its payload of an open round."""
    return site in self._sent.get(number, ())

  def close(self, now: float) -> Closing | None:
    """Closes the next round if it may close."""
    number = self.closed
    have = self._sent.get(number, set())
    missing = self._expected(number) - have
    if now < self.deadline():
      return None
    for site in missing:
      self._returning.discard(site)
      member = self.members[site]
      member.first = math.inf
      member.patience = max(member.patience / 2, _LEAST_PATIENCE)
    self._sent.pop(number)
    quorum_at = self._quorum_at.pop(number)
    self.closed += 1
    return Closing(number, tuple(sorted(have)), tuple(sorted(missing)), now - quorum_at)

  def deadline(self) -> float:
    """Returns when the next round closes if no payload comes; infinity: never."""
    missing = self._expected(self.closed) - self._sent.get(self.closed, set())
    patience = max((self.members[site].patience for site in missing), default=0.0)
    quorum_at = self._quorum_at.get(self.closed, math.inf)
    return quorum_at + patience * self._window.seconds(self.closed, quorum_at)

  def _expected(self, number: int) -> set[int]:
    inside = {site for site, member in self.members.items() if member.first <= number}
    return inside | self._returning
