"""Which layers form a fragment, and when a fragment is sent and received.

This is the only place that knows the schedule of Streaming DiLoCo (arXiv
2501.18512, Section 2.2 and Algorithm 2): the trainer, the byte ledger, the
checkpoints and the simulators all ask it. It imports no JAX.

Symbols: M replicas, H inner steps between two syncs of one fragment, P
fragments, tau overlap in inner steps, t = 1..T finished inner steps.
"""

import dataclasses
import itertools

PATTERNS = ("strided", "sequential", "whole")
EMBEDDING_POSITIONS = ("last", "first")


@dataclasses.dataclass(frozen=True)
class Fragment:
  """A set of parameters that is synchronised at once.

  Attributes:
    layers: indices of its transformer blocks, ascending; may be empty.
    embed: whether it holds the embedding, which comes with the tied head, the
      positions and the final norm.
  """

  layers: tuple[int, ...]
  embed: bool = False


def make_fragments(
  num_layers: int,
  fragment_size: int = 3,
  pattern: str = "strided",
  embedding: str = "last",
) -> tuple[Fragment, ...]:
  """Partitions the model; every parameter belongs to exactly one fragment.

  With n = ceil(num_layers / fragment_size) block fragments, `strided` gives
  fragment p the layers p, p+n, p+2n, ...; `sequential` gives it consecutive
  layers; `whole` is DiLoCo's single fragment of all layers and the embedding.
  A depth that is not a multiple of the fragment size leaves some fragments one
  layer smaller (strided) or the last one smaller (sequential).

  Args:
    num_layers: transformer blocks N.
    fragment_size: blocks per fragment (the paper uses 3); unused by `whole`.
    pattern: one of PATTERNS (figure 2 of the paper).
    embedding: position in the schedule of the embedding's own fragment, one of
      EMBEDDING_POSITIONS. The paper shows the fragment (figures 2 and 17) but
      does not say when it is sent.

  Returns:
    The P fragments in the order in which they are sent.

  Raises:
    ValueError: a name is unknown or the fragment is larger than the model.
  """
  if pattern not in PATTERNS:
    raise ValueError(
      f"fragments.pattern is {pattern!r}; choose one of {', '.join(PATTERNS)}."
    )
  if embedding not in EMBEDDING_POSITIONS:
    raise ValueError(
      f"fragments.embedding is {embedding!r}; choose one of"
      f" {', '.join(EMBEDDING_POSITIONS)}."
    )
  if pattern == "whole":
    return (Fragment(tuple(range(num_layers)), embed=True),)
  if not 1 <= fragment_size <= num_layers:
    raise ValueError(
      f"fragments.size is {fragment_size}, but the model has {num_layers} layers;"
      f" choose a size from 1 to {num_layers}."
    )
  n = -(-num_layers // fragment_size)
  if pattern == "strided":
    blocks = [Fragment(tuple(range(p, num_layers, n))) for p in range(n)]
  else:
    blocks = [
      Fragment(tuple(range(lo, min(lo + fragment_size, num_layers))))
      for lo in range(0, num_layers, fragment_size)
    ]
  embed = [Fragment((), embed=True)]
  return tuple(embed + blocks if embedding == "first" else blocks + embed)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """When each fragment is sent, and when each replica receives it.

  Attributes:
    num_fragments: P.
    sync_every: H, inner steps between two syncs of one fragment.
    taus: tau_m of each replica, the inner steps that hide its exchange.
  """

  num_fragments: int
  sync_every: int
  taus: tuple[int, ...]

  def __post_init__(self):
    if self.sync_every < 1:
      raise ValueError(f"sync_every is {self.sync_every}; H must be at least 1.")
    for tau in self.taus:
      if not 0 <= tau < self.sync_every:
        raise ValueError(
          f"overlap.tau is {tau}, but sync_every is {self.sync_every}; tau must"
          f" lie in 0..{self.sync_every - 1}, so lower tau or raise sync_every."
        )

  def offset(self, p: int) -> int:
    """t_p = floor(p H / P): fragments are spread evenly over H steps."""
    return p * self.sync_every // self.num_fragments

  def is_sent(self, p: int, t: int) -> bool:
    """Whether fragment p leaves at the end of inner step t.

    Algorithm 2 line 6, with no send before a full H steps: the text's t + t_p
    contradicts the paper's own example (H=100, P=2: 150, 250, ...), t - t_p
    fits it.
    """
    t_p = self.offset(p)
    return t >= self.sync_every + t_p and (t - t_p) % self.sync_every == 0

  def sends(self, t: int) -> list[int]:
    """Fragments sent at the end of inner step t (line 6)."""
    return [p for p in range(self.num_fragments) if self.is_sent(p, t)]

  def arrivals(
    self, t: int, last_send: int | None = None
  ) -> list[tuple[int, tuple[bool, ...]]]:
    """Fragments that some replica merges after inner step t (line 9).

    Args:
      t: finished inner steps.
      last_send: step after which nothing is sent any more, None if there is none.

    Returns:
      Pairs (p, mask) where mask[m] says whether replica m merges fragment p now.
      With unequal taus a fragment appears at several steps, each replica once.
    """
    found = []
    for p in range(self.num_fragments):
      mask = tuple(
        self.is_sent(p, t - tau) and (last_send is None or t - tau <= last_send)
        for tau in self.taus
      )
      if any(mask):
        found.append((p, mask))
    return found

  def is_outer_step(self, p: int, t: int) -> bool:
    """Whether fragment p's outer update happens now: at the earliest arrival."""
    return self.is_sent(p, t - min(self.taus))

  def in_flight(self, t: int) -> dict[int, int]:
    """Fragments on the wire after step t: sent, outer update still to come.

    Returns:
      {p: step at which it was sent}. Since tau < H, a fragment is in flight at
      most once. Replicas that merge later than the earliest need nothing kept:
      they merge the outer parameters, which stay until the next outer update.
    """
    flying = {}
    for p in range(self.num_fragments):
      for sent in range(max(t - min(self.taus) + 1, 1), t + 1):
        if self.is_sent(p, sent):
          flying[p] = sent
    return flying

  def hiding_steps(self, t: int) -> int:
    """Inner steps that hide the exchange of what is sent at the end of step t.

    They end at the next send or arrival of any fragment; 0 if nothing is sent at t
    or if it is waited for.
    """
    if not self.sends(t) or min(self.taus) == 0:
      return 0
    k = 1
    while not self.sends(t + k) and not self.arrivals(t + k):
      k += 1
    return k

  def longest_hiding(self) -> int:
    """Most inner steps that hide an exchange anywhere; 0 if none ever do."""
    # The first sends have fewer others beside them than those of later rounds.
    first_rounds = range(self.sync_every, 3 * self.sync_every)
    return max(self.hiding_steps(t) for t in first_rounds)

  def groups(self) -> list[tuple[int, ...]]:
    """Fragments that are always sent together: several in one only if H < P."""
    fragments = range(self.num_fragments)
    return [tuple(group) for _, group in itertools.groupby(fragments, self.offset)]

  def next_to_send(self, t: int) -> tuple[int, ...]:
    """The group whose send comes next, at step t or later (FedPart, 3.3.1)."""

    def wait(group: tuple[int, ...]) -> int:
      first = self.sync_every + self.offset(group[0])
      return max(first - t, 0) if t <= first else -(t - first) % self.sync_every

    return min(self.groups(), key=wait)
