"""The sequences of a shard by index, so that a whole epoch can be shuffled.

A shuffle of documents, or of a window of sequences, leaves a replica on few documents
for many steps, which other replicas do not see. That is how texts of long documents
differ from C4, and it widens the gap between replicas (docs/ladder.md).
"""

import numpy as np

from diloco.data.documents import Documents
from diloco.errors import ConfigError


class Sequences:
  """Documents, concatenated in their order and cut into sequences of L tokens.

  The last tokens of the shard, fewer than L, belong to no sequence.

  Raises:
    ConfigError: the shard has fewer than L tokens.
  """

  def __init__(self, documents: Documents, indices: range, length: int):
    """Finds where each document of the shard ends.

    Args:
      documents: all documents of the split.
      indices: the documents of the shard.
      length: L.
    """
    self._documents, self._indices, self._length = documents, indices, length
    self._ends = np.cumsum(documents.lengths(indices))
    if not len(self):
      raise ConfigError(
        f"data.shuffle_window is -1, but shard {indices.start} of {indices.step} of"
        f" data.source has only {self._ends[-1]} tokens, and model.seq_len is {length};"
        " lower model.seq_len or the number of shards."
      )

  def __len__(self) -> int:
    return int(self._ends[-1]) // self._length

  def __getitem__(self, index: int) -> np.ndarray:
    """Returns a sequence, int32 [L]."""
    start, stop = index * self._length, (index + 1) * self._length
    first, last = np.searchsorted(self._ends, (start, stop - 1), side="right")
    parts = [self._documents[self._indices[i]] for i in range(first, last + 1)]
    begin = start - int(self._ends[first]) + len(parts[0])
    return np.concatenate(parts)[begin : begin + self._length]
