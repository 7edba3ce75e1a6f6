"""The text that a site reads: its own, and blocks of the texts of absent sites."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diloco.config import Config, changed
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.link import Block
from diloco.data import TrainIterator
from diloco.data.batches import Batches


class Texts(TrainIterator):
  """Reads blocks of other sites' texts before the site's own.

  Attributes:
    finished: the last blocks whose last batch was taken, as [round, site].
  """

  def __init__(self, c: Config, replicas: Sequence[int], batches: Batches):
    """Prepares; the first block takes the place of `batches.data`.

    Args:
      c: config of the run, with this site's batch.
      replicas: those whose text this process reads.
      batches: of this site.
    """
    self.finished = collections.deque[list[int]](maxlen=64)
    self._c, self._replicas, self._batches = c, replicas, batches
    self._own: TrainIterator | None = None
    self._blocks = collections.deque[tuple[int, int, Block]]()
    self._lent: TrainIterator | None = None  # Of the first block.
    self._left = 0  # Sequences of each shard that are left of it.
    self._at = (-1, 0)  # The last jump.
    # {site: where its text was left: step of the recorded position, sequences after
    # it, positions}. So a reader need not begin at the recorded position each time.
    self._ends: dict[int, tuple[int, int, dict[str, Any]]] = {}

  def lend(self, number: int, site: int, block: Block) -> None:
    """Takes a block of a site's text, which round `number` has lent."""
    self._blocks.append((number, site, block))
    if self._own is None:
      self._own, self._batches.data = self._batches.data, self

  def drop(self, name: Sequence[int]) -> None:
    """Leaves a block, as [round, site], to another site."""
    for block in [x for x in self._blocks if x[:2] == tuple(name)]:
      if block is self._blocks[0]:
        self._close_block()
      self._blocks.remove(block)

  def jump(self, positions: Mapping[str, Any], skip: int) -> None:
    """Goes on in the own text after what was lent, once.

    Args:
      positions: {shard: [step, position]}, as the coordinator recorded them.
      skip: sequences of each shard after these positions.
    """
    to = (max(step for step, _ in positions.values()), skip)
    if to <= self._at:
      return
    self._at = to
    own = {shard: x for shard, (_, x) in positions.items()}
    self._batches.set_state(_skipped(self._c, self._replicas, own, skip))

  def __next__(self) -> np.ndarray:
    assert self._own is not None
    if not self._blocks:
      return next(self._own)
    number, site, block = self._blocks[0]
    recorded = max(step for step, _ in block.positions.values())
    if self._lent is None:
      n = Calendar(self._c).replicas_per_site
      replicas = [r % n + n * site for r in self._replicas]
      first = {shard: x for shard, (_, x) in block.positions.items()}
      step, begin, state = self._ends.get(site, (-1, 0, {}))
      if step != recorded or begin > block.skip:
        begin, state = 0, first
      c = changed(self._c, {"data.prefetch": 0})
      self._lent, self._left = TrainIterator(c, replicas), block.size
      self._lent.set_state(_skipped(c, replicas, state, block.skip - begin))
    tokens = next(self._lent)
    self._left -= self._c.train.batch_size // self._c.shards
    if self._left <= 0:
      end = block.skip + block.size - self._left
      self._ends[site] = (recorded, end, self._lent.get_state())
      self._close_block()
      self._blocks.popleft()
      self.finished.append([number, site])
    return tokens

  def get_state(self) -> dict[str, Any]:
    """Returns the positions in the own text."""
    assert self._own is not None
    return self._own.get_state()

  def set_state(self, state: Mapping[str, Any]) -> None:
    assert self._own is not None
    self._own.set_state(state)

  def close(self) -> None:
    self._close_block()
    if self._own is not None:
      self._own.close()

  def _close_block(self) -> None:
    if self._lent is not None:
      self._lent.close()
    self._lent = None


def _skipped(
  c: Config, replicas: Sequence[int], state: Mapping[str, Any], skip: int
) -> dict[str, Any]:
  """Returns the positions `skip` sequences of each shard later."""
  one = {"train.batch_size": c.shards, "train.accumulate": 1, "data.prefetch": 0}
  text = TrainIterator(changed(c, one | {"sites.batch_size": 0}), list(replicas))
  text.set_state(state)
  for _ in range(skip):
    next(text)
  found = text.get_state()
  text.close()
  return found
