"""Decides when a fragment is sent and received. No JAX.

The schedule is that of Streaming DiLoCo (arXiv 2501.18512, section 2.2 and Algorithm
2). Trainer, library, checkpoints and simulators use this file.

Symbols: M replicas, H inner steps between two syncs of one fragment, P fragments,
tau overlap in inner steps, t = 1..T finished inner steps.
"""

import dataclasses
import functools

from diloco.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The steps at which each fragment is sent, and at which each replica receives it.

  Attributes:
    num_fragments: P.
    sync_every: H, inner steps between two syncs of one fragment.
    taus: tau_m of each replica m: its inner steps between a send and the merge.
    drained: the last step of a finished run that is now extended, else 0. Every
      fragment that was sent up to this step has been received, so this schedule begins
      after this step.
    joint_steps: number of first steps in which replicas stay equal. In these steps
      nothing is sent: the outer parameters of a fragment that is due become those of
      the replicas.

  Raises:
    ConfigError: a tau is not below H.
  """

  num_fragments: int
  sync_every: int
  taus: tuple[int, ...]
  drained: int = 0
  joint_steps: int = 0

  def __post_init__(self) -> None:
    for tau in self.taus:
      if not 0 <= tau < self.sync_every:
        raise ConfigError(
          f"overlap.tau is {tau}, but sync_every is {self.sync_every}; tau must"
          f" lie in 0..{self.sync_every - 1}, so change tau or sync_every."
        )

  def offset(self, p: int) -> int:
    """Returns t_p = floor(p H / P), which spreads the fragments evenly over H steps."""
    return p * self.sync_every // self.num_fragments

  def is_due(self, p: int, t: int) -> bool:
    """Returns whether t is t_p + k H for a whole number k."""
    return (t - self.offset(p)) % self.sync_every == 0

  def is_sent(self, p: int, t: int) -> bool:
    """Returns whether fragment p is sent after inner step t (Algorithm 2, line 6).

    By the text of the paper, H divides t + t_p; by Algorithm 2, H divides t - t_p. The
    paper's example (H=100, P=2: the second fragment is sent at 150, 250, ...) fits
    Algorithm 2 if nothing is sent before step H.
    """
    return t > self.drained and t >= self.first_send(p) and self.is_due(p, t)

  def first_send(self, p: int) -> int:
    """Returns the step after which fragment p is first sent: H + t_p.

    With joint steps, it is the first step after them at which fragment p is due.
    """
    first = self.sync_every + self.offset(p)
    rounds = -(-max(self.joint_steps + 1 - first, 0) // self.sync_every)
    return first + rounds * self.sync_every

  @property
  def first_sends(self) -> list[int]:
    """The `first_send` of each fragment."""
    return [*map(self.first_send, range(self.num_fragments))]

  def follows(self, t: int) -> list[int]:
    """Lists the fragments whose outer parameters follow the replicas at step t."""
    if t > self.joint_steps:
      return []
    return [
      p
      for p in range(self.num_fragments)
      if t >= self.sync_every + self.offset(p) and self.is_due(p, t)
    ]

  def sends(self, t: int, last_send: int | None = None) -> list[int]:
    """Lists the fragments that are sent after inner step t (Algorithm 2, line 6).

    Args:
      t: finished inner steps.
      last_send: the last step after which fragments are sent; None: no last step.
    """
    if last_send is not None and t > last_send:
      return []
    return [p for p in range(self.num_fragments) if self.is_sent(p, t)]

  def num_sends(self, p: int, steps: int) -> int:
    """Counts how often fragment p is sent in a run of `steps` steps, from the start."""
    return max((steps - self.first_send(p)) // self.sync_every + 1, 0)

  def arrivals(
    self, t: int, last_send: int | None = None
  ) -> list[tuple[int, tuple[bool, ...]]]:
    """Lists the fragments that a replica merges after step t (Algorithm 2, line 9).

    Args:
      t: finished inner steps.
      last_send: the last step after which fragments are sent; None: no last step.

    Returns:
      Pairs (p, mask): mask[m] says whether replica m merges fragment p now. If the
      taus differ, a fragment arrives at different steps at different replicas.
    """
    pairs = []
    for p in range(self.num_fragments):
      mask = tuple(
        self.is_sent(p, t - tau) and (last_send is None or t - tau <= last_send)
        for tau in self.taus
      )
      if any(mask):
        pairs.append((p, mask))
    return pairs

  def is_busy(self, t: int) -> bool:
    """Returns whether the outer step has anything to do after inner step t."""
    return bool(self.follows(t) or self.sends(t) or self.arrivals(t))

  def is_outer_step(self, p: int, t: int) -> bool:
    """Returns whether fragment p first arrives at step t, so its outer step runs."""
    return self.is_sent(p, t - min(self.taus))

  def in_flight(self, t: int) -> dict[int, int]:
    """Returns the fragments that are sent, but not yet updated, after step t.

    A fragment is in flight at most once, since tau < H. A replica with a larger tau
    merges later, but needs no payload: the outer parameters that it merges stay the
    same until the next outer update.

    Returns:
      {p: step at which fragment p was sent}.
    """
    age = lambda p: (t - self.offset(p)) % self.sync_every  # Steps since p was due.
    return {
      p: t - age(p)
      for p in range(self.num_fragments)
      if age(p) < min(self.taus) and self.is_sent(p, t - age(p))
    }

  def overlap_steps(self, t: int) -> int:
    """Counts the inner steps that overlap the exchange that follows step t.

    The overlap ends at the next send or arrival of any fragment. The count is 0 if
    nothing is sent after step t, or if the smallest tau is 0.
    """
    if not self.sends(t) or min(self.taus) == 0:
      return 0
    k = 1
    while not self.sends(t + k) and not self.arrivals(t + k):
      k += 1
    return k

  @functools.cached_property
  def longest_overlap(self) -> int:
    """The largest `overlap_steps` of any step; 0 if no step overlaps an exchange."""
    # Three rounds of H steps are enough: the first may be cut short, and in the second
    # fewer sends may come before an arrival than in later rounds.
    first = max(self.sync_every, self.drained + 1, self.joint_steps + 1)
    rounds = range(first // self.sync_every, first // self.sync_every + 3)
    offsets = {self.offset(p) for p in range(self.num_fragments)}
    ends = (n * self.sync_every + offset for n in rounds for offset in offsets)
    return max(map(self.overlap_steps, ends), default=0)


def reaches(first: int, last: int, every: int) -> bool:
  """Returns whether a multiple of `every` lies in first..last; False for every = 0."""
  return bool(every) and last // every > (first - 1) // every
