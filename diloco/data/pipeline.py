"""Packs documents into sequences: shards for training, a fixed set for evaluation.

Shard s of S has only the documents s, s+S, s+2S, ... Each epoch shuffles a shard's
documents, or its sequences, in a new order. Documents end with EOS, are concatenated,
and are cut into sequences of exactly L tokens. The model shifts its inputs right, so
every token is a target exactly once. All algorithms use the same shards: a replica has
one shard, or S / M shards if `data.shards` is S.
"""

import dataclasses
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from diloco.config import Config
from diloco.data.documents import MOST_TOKENS, Documents, Sequences, make_documents
from diloco.data.files import more_documents
from diloco.data.text_file import digest
from diloco.errors import ConfigError
from diloco.util.types import Json


@dataclasses.dataclass(frozen=True)
class EvalSet:
  """Held-out text, packed into batches.

  Attributes:
    tokens: int32 [K, B, L]: K batches, B sequences, L tokens; the padding is 0.
    weights: float32 [K, B, L], 0 for padding, else 1.
    num_tokens: number of tokens that are not padding, EOS included.
    num_bytes: UTF-8 bytes of the text of these `num_tokens` tokens.
  """

  tokens: np.ndarray
  weights: np.ndarray
  num_tokens: int
  num_bytes: int

  @property
  def digest(self) -> str:
    """SHA-256 of the tokens without padding; it does not depend on B and L."""
    return digest([self.tokens.reshape(-1)[: self.num_tokens].tobytes()])


class TrainIterator(Iterator[np.ndarray]):
  """Yields batches without end, int32 [R, B, L]: R replicas, B sequences, L tokens.

  A replica's batches depend only on the config and the replica's id, not on the process
  that reads them. So any process may read any replicas, and a run may resume from a
  saved position with another assignment of replicas to processes. A process that trains
  only some sequences of a replica reads all sequences of the replica and keeps its own.
  This costs little, because reading is much faster than training.
  """

  def __init__(self, c: Config, replica_ids: list[int] | None = None):
    """Opens the training batches of some replicas.

    Args:
      replica_ids: ids of the R replicas, in the order of a batch; None: all M. If a run
        has several processes, each process gives the replicas that it trains.

    Raises:
      ConfigError: data are missing or too few, or do not fit the model's vocabulary.
      ValueError: an id is not the id of a replica.
    """
    documents = training_documents(c)
    ids = range(c.replicas) if replica_ids is None else replica_ids
    if not set(ids) <= set(range(c.replicas)):
      raise ValueError(f"replica_ids is {ids}; give ids from 0 to {c.replicas - 1}.")
    self._num_documents, self._per_replica = len(documents), c.shards // c.replicas
    self._shards = {s: _shard(c, documents, s) for s in c.shards_of(ids)}
    # Closes the shards when Python exits, too. Otherwise Python kills their threads in
    # C++ code: this prints tracebacks, or aborts the process and hides its exit code.
    self._finalizer = weakref.finalize(self, _close_all, self._shards)

  def __next__(self) -> np.ndarray:
    rows = np.stack([next(shard)["tokens"] for shard in self._shards.values()])
    return rows.reshape(len(rows) // self._per_replica, -1, rows.shape[2])

  def get_state(self) -> dict[str, Json]:
    """Returns the position after the last batch, as JSON values.

    Returns:
      {shard as a string: number of training documents and position in the stream}.
      The dicts of all processes, merged, are the position of the run.
    """
    return {
      str(i): {"documents": self._num_documents, "position": shard.get_state()}
      for i, shard in self._shards.items()
    }

  def set_state(self, state: Mapping[str, Json]) -> None:
    """Goes to a position from `get_state`; the same batches follow as in the saved run.

    Args:
      state: positions of this process's shards; may have other shards, too.

    Raises:
      ConfigError: a shard is missing, or the number of documents has changed.
    """
    for i, shard in self._shards.items():
      if str(i) not in state:
        raise ConfigError(
          f"The saved data position has no shard {i}, only {', '.join(state)}; resume"
          " with as many replicas and data.shards as were saved."
        )
      saved = state[str(i)]
      if saved["documents"] != self._num_documents:
        raise ConfigError(
          f"The saved data position counts {saved['documents']} training documents, but"
          f" data.source now has {self._num_documents}; restore the data, or start anew"
          " in another --workdir."
        )
      shard.set_state(_tuples(saved["position"]))

  def close(self) -> None:
    """Ends the background threads. The iterator cannot be used afterwards."""
    self._finalizer()


def training_documents(c: Config) -> Documents:
  """Opens the documents on which a run trains.

  Raises:
    ConfigError: data are missing or too few, or do not fit the model's vocabulary.
  """
  batch = c.train.batch_size * c.model.seq_len
  _check_memory("model.seq_len", c.model.seq_len, 1)
  _check_memory("train.batch_size", c.train.batch_size, c.model.seq_len)
  _check_memory("data.prefetch", c.data.prefetch, batch)
  window = c.shards * c.model.seq_len
  _check_memory("data.shuffle_window", c.data.shuffle_window, window)
  documents = make_documents(c, "train")
  if len(documents) < c.shards:
    field = "data.shards" if c.data.shards else "replicas"
    raise ConfigError(
      f"{field} is {c.shards}, but data.source {c.data.source!r} has only"
      f" {len(documents)} training documents; {more_documents(c.data.source)}, or"
      f" lower {field}."
    )
  return documents


def _close_all(shards: dict[int, Any]) -> None:
  """Closes and deletes the iterators, because destructors fail when Python exits."""
  while shards:
    shards.popitem()[1].close()


def _tuples(position: Any) -> Any:
  """Turns lists back into tuples, because JSON has turned tuples into lists.

  The packer of the package grain compares the rest of a document with a tuple, to see
  whether the rest is empty. With a list, it would read a finished document again.
  """
  if isinstance(position, Mapping):
    return {key: _tuples(value) for key, value in position.items()}
  if isinstance(position, list | tuple):
    return tuple(_tuples(value) for value in position)
  return position


def _check_memory(field: str, value: int, tokens: int) -> None:
  """Checks a field that makes the program keep `value * tokens` tokens in memory.

  Raises:
    ConfigError: reading so many tokens would take minutes, and perhaps all memory.
  """
  if value * tokens > MOST_TOKENS:
    raise ConfigError(
      f"{field} is {value}, which reads and keeps {value * tokens:,} tokens at once;"
      f" lower it to at most {MOST_TOKENS // tokens}."
    )


def _shard(c: Config, documents: Documents, index: int) -> Any:
  """Opens a shard's endless stream of batches, {"tokens": int32 [B, L]}."""
  import grain  # Imported late: grain imports JAX, and reading text needs no JAX.

  # Each shard has its own seed. With a common seed, shards of equal length would have
  # the same order, and all shards would yield neighbouring documents at the same time.
  seeds = np.random.SeedSequence([c.seed, index]).generate_state(2)
  indices, length = range(index, len(documents), c.shards), c.model.seq_len
  threads, ahead = c.data.num_threads, 4 * c.data.num_threads
  if c.data.shuffle_window < 0:
    shard = grain.MapDataset.source(Sequences(documents, indices, length))
  else:
    shard = grain.MapDataset.source(documents)[index :: c.shards]
  packed = (
    shard.shuffle(seed=int(seeds[0]))
    .repeat()
    .map(lambda ids: {"tokens": ids})
    .to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead))
  )
  if c.data.shuffle_window >= 0:
    packed = grain.experimental.ConcatThenSplitIterDataset(
      packed, length_struct={"tokens": length}
    )
  if c.data.shuffle_window > 1:
    packed = grain.experimental.WindowShuffleIterDataset(
      packed, window_size=c.data.shuffle_window, seed=int(seeds[1])
    )
  batches = packed.batch(c.train.batch_size // c.shards, drop_remainder=True)
  if c.data.prefetch:
    batches = grain.experimental.ThreadPrefetchIterDataset(
      batches, prefetch_buffer_size=c.data.prefetch
    )
  return iter(batches)


def make_eval_set(c: Config, test: bool = False) -> EvalSet:
  """Packs the first `eval.tokens` held-out tokens (0: all tokens), in order.

  If the last document is cut, `num_bytes` counts only the bytes of its kept tokens.

  Args:
    test: whether to pack the next `eval.test_tokens` tokens instead, which are not from
      the documents of the first `eval.tokens` tokens.

  Raises:
    ConfigError: data are missing or empty.
  """
  _check_memory("eval.batch_size", c.eval.batch_size, c.model.seq_len)
  documents = make_documents(c, "eval")
  order = iter(range(len(documents)))
  for budget in (c.eval.tokens or sys.maxsize, c.eval.test_tokens)[: 1 + test]:
    kept, count, num_bytes = list[np.ndarray](), 0, 0
    while count < budget and (i := next(order, None)) is not None:
      kept.append(documents[i][: budget - count])
      count += len(kept[-1])
      num_bytes += documents.num_bytes(i, len(kept[-1]))
  if test and not num_bytes:
    raise ConfigError(
      f"eval.test_tokens is {c.eval.test_tokens}, but the first eval.tokens ="
      f" {c.eval.tokens} tokens take all held-out documents; lower eval.tokens."
    )
  if not num_bytes:
    field = "eval_source" if c.data.eval_source else "source"
    source = getattr(c.data, field)
    named = source.startswith(("tfds:", "arrays:"))
    raise ConfigError(
      f"data.{field} is {source!r}, whose held-out part has no text (eval.tokens is"
      f" {c.eval.tokens}); {more_documents(source)}"
      f"{', or choose another data.eval_split' * named}."
    )
  rows, length = c.eval.batch_size, c.model.seq_len
  shape = (-(-count // (rows * length)), rows, length)
  tokens, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
  tokens.reshape(-1)[:count] = np.concatenate(kept)
  weights.reshape(-1)[:count] = 1
  return EvalSet(tokens, weights, count, num_bytes)
