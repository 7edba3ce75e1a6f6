"""Which layers form a fragment, and when a fragment is sent and received. No JAX.

The only place that knows the schedule of Streaming DiLoCo (arXiv 2501.18512, section
2.2 and Algorithm 2): trainer, ledger, checkpoints and simulators all ask it.

Symbols: M replicas, H inner steps between two syncs of one fragment, P fragments,
tau overlap in inner steps, t = 1..T finished inner steps.
"""

import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Fragment:
  """Parameters that are synchronised together.

  Attributes:
    layers: indices of its transformer blocks, ascending; may be empty.
    embed: whether it holds `embed`: the embedding, head, positions and final norm.
  """

  layers: tuple[int, ...]
  embed: bool = False

  @property
  def indices(self) -> np.ndarray:
    """int32 (n,): its layers, as an argument that programs take."""
    return np.asarray(self.layers, np.int32)

  def shapes(self, parameters: dict[str, dict]) -> dict[str, dict]:
    """Shapes of the fragment's parameters, from those of a model.

    Args:
      parameters: as `diloco.model.shapes.parameters` gives them.
    """

    def cut(tree):
      if isinstance(tree, dict):
        return {name: cut(part) for name, part in tree.items()}
      return (len(self.layers), *tree[1:])

    blocks = {"blocks": cut(parameters["blocks"])} if self.layers else {}
    return blocks | ({"embed": parameters["embed"]} if self.embed else {})


def make_fragments(
  num_layers: int,
  size: int = 3,
  pattern: str = "strided",
  embedding: str = "last",
) -> tuple[Fragment, ...]:
  """Splits a model; every parameter belongs to exactly one fragment.

  With n = ceil(num_layers / size), `strided` gives fragment p the layers p, p+n, p+2n,
  ...; `sequential` gives it consecutive layers; `whole` makes DiLoCo's one fragment of
  all parameters. If size does not divide num_layers, some fragments have one layer less
  (strided), or the last fragment is smaller (sequential).

  Args:
    num_layers: transformer blocks N.
    size: blocks per fragment (the paper uses 3); `whole` ignores it.
    pattern: strided, sequential or whole (figure 2).
    embedding: place of the embedding's own fragment in the schedule, last or first. The
      paper shows the fragment (figures 2 and 17) but not when it is sent.

  Returns:
    The P fragments in the order in which they are sent.

  Raises:
    ValueError: the fragment is larger than the model.
  """
  if pattern == "whole":
    return (Fragment(tuple(range(num_layers)), embed=True),)
  if not 1 <= size <= num_layers:
    raise ValueError(
      f"fragments.size is {size}, but the model has {num_layers} layers; choose a size"
      f" from 1 to {num_layers}."
    )
  n = -(-num_layers // size)
  if pattern == "strided":
    layers = [range(p, num_layers, n) for p in range(n)]
  else:
    layers = [range(i, min(i + size, num_layers)) for i in range(0, num_layers, size)]
  blocks = [Fragment(tuple(ids)) for ids in layers]
  embed = [Fragment((), embed=True)]
  return tuple(embed + blocks if embedding == "first" else blocks + embed)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """When each fragment is sent, and when each replica receives it.

  Attributes:
    num_fragments: P.
    sync_every: H, inner steps between two syncs of one fragment.
    taus: tau_m of each replica, the inner steps that hide its exchange.

  Raises:
    ValueError: a tau is not below H.
  """

  num_fragments: int
  sync_every: int
  taus: tuple[int, ...]

  def __post_init__(self):
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
    """Whether fragment p is sent at the end of inner step t (Algorithm 2, line 6).

    The text of the paper says t + t_p, Algorithm 2 says t - t_p. The paper's example
    (H=100, P=2: second fragment at 150, 250, ...) fits t - t_p, with no send before a
    full H steps.
    """
    t_p = self.offset(p)
    return t >= self.sync_every + t_p and (t - t_p) % self.sync_every == 0

  def sends(self, t: int) -> list[int]:
    """Fragments sent at the end of inner step t (line 6)."""
    return [p for p in range(self.num_fragments) if self.is_sent(p, t)]

  def num_sends(self, p: int, steps: int) -> int:
    """How often fragment p is sent in a run of `steps` inner steps."""
    return max((steps - self.offset(p)) // self.sync_every, 0)

  def arrivals(
    self, t: int, last_send: int | None = None
  ) -> list[tuple[int, tuple[bool, ...]]]:
    """Fragments that some replica merges after inner step t (line 9).

    Args:
      t: finished inner steps.
      last_send: step after which nothing is sent any more, None if there is none.

    Returns:
      Pairs (p, mask): mask[m] says whether replica m merges fragment p now. If taus
      differ, a fragment appears at several steps, each replica once.
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
      {p: step at which it was sent}. A fragment is in flight at most once, since
      tau < H. Replicas that merge later than the earliest need nothing stored: they
      merge the outer parameters, which do not change before the next outer update.
    """
    return {
      p: sent
      for p in range(self.num_fragments)
      for sent in range(max(t - min(self.taus) + 1, 1), t + 1)
      if self.is_sent(p, sent)
    }

  def hiding_steps(self, t: int) -> int:
    """Inner steps that hide the exchange of what is sent at the end of step t.

    They end at the next send or arrival of any fragment. 0 if nothing is sent at t, or
    if tau is 0.
    """
    if not self.sends(t) or min(self.taus) == 0:
      return 0
    k = 1
    while not self.sends(t + k) and not self.arrivals(t + k):
      k += 1
    return k

  def longest_hiding(self) -> int:
    """The most inner steps that hide any exchange; 0 if none is hidden."""
    # In the first round fewer sends lie between a send and its arrival.
    first_rounds = range(self.sync_every, 3 * self.sync_every)
    return max(self.hiding_steps(t) for t in first_rounds)

  def groups(self) -> list[tuple[int, ...]]:
    """Fragments that are always sent together: several in one group only if H < P."""
    fragments = range(self.num_fragments)
    return [tuple(group) for _, group in itertools.groupby(fragments, self.offset)]

  def next_to_send(self, t: int) -> tuple[int, ...]:
    """The group that is sent next, at step t or later (FedPart, section 3.3.1)."""

    def wait(group: tuple[int, ...]) -> int:
      first = self.sync_every + self.offset(group[0])
      return max(first - t, 0) if t <= first else -(t - first) % self.sync_every

    return min(self.groups(), key=wait)
