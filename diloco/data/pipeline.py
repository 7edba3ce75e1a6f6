"""Packed sequences: per-replica shards for training, a fixed set for evaluation.

Replica r of M reads the documents r, r+M, r+2M, ... and no others, shuffled anew in
every epoch. Documents end with EOS, are concatenated and cut into sequences of
exactly L tokens; the model shifts them right itself, so every token is a target
exactly once. All algorithms see the same M shards.
"""

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from diloco.config import Config, ConfigError
from diloco.data.documents import Documents, make_documents


@dataclasses.dataclass(frozen=True)
class EvalSet:
  """Held-out text, packed.

  Attributes:
    tokens: int32 [K, B, L], K batches; padded with 0.
    weights: float32 [K, B, L], 0 where padded.
    num_tokens: tokens that count, EOS included.
    num_bytes: UTF-8 bytes of the text that these tokens stand for.
  """

  tokens: np.ndarray
  weights: np.ndarray
  num_tokens: int
  num_bytes: int


class TrainIterator:
  """Endless batches int32 [R, B, L] for R replicas, with an exact position.

  A replica's batches depend on the config and its id alone, not on which process
  reads them or what else that process reads. So any division of the replicas over
  processes gives the same run, and positions, kept by replica id, resume on any
  other. A process that holds only some sequences of a replica reads that replica's
  whole stream and takes its rows: B is small and reading is much faster than
  training, which makes the simple way the exact one.
  """

  def __init__(self, replicas: dict[int, Any], num_documents: int):
    """Takes over the replicas' iterators, by replica id and in batch order."""
    self._replicas = replicas
    self._num_documents = num_documents
    # Also at exit: a thread that the ending interpreter kills inside C++ prints
    # tracebacks, or aborts the process and hides its exit code.
    self._finalizer = weakref.finalize(self, _close_all, replicas)

  def __iter__(self) -> "TrainIterator":
    return self

  def __next__(self) -> np.ndarray:
    return np.stack([next(r)["tokens"] for r in self._replicas.values()])

  def get_state(self) -> dict[str, dict[str, Any]]:
    """The position after the last batch taken, as JSON.

    Returns:
      For each replica id held here, as a string, the number of training documents and
      the position in its stream. Updating a dict with those of all processes gives
      the position of the run.
    """
    return {
      str(i): {"documents": self._num_documents, "position": r.get_state()}
      for i, r in self._replicas.items()
    }

  def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Goes to a position from `get_state`: the same batches follow.

    Args:
      state: positions of at least the replicas held here, of any number of processes.

    Raises:
      ConfigError: a replica is missing, or the documents are other ones.
    """
    missing = [str(i) for i in self._replicas if str(i) not in state]
    if missing:
      raise ConfigError(
        f"The saved data position is of replicas {', '.join(state) or '(none)'}, but"
        f" replica {', '.join(missing)} is to go on; join the positions of all"
        " processes, or resume with as many replicas as were saved."
      )
    for i in self._replicas:
      saved = state[str(i)]["documents"]
      if saved != self._num_documents:
        raise ConfigError(
          f"The saved data position is in {saved} training documents, but data.source"
          f" now has {self._num_documents}; restore the former data, or start anew in"
          " another --workdir."
        )
    for i, replica in self._replicas.items():
      replica.set_state(_tuples(state[str(i)]["position"]))

  def close(self) -> None:
    """Ends the background threads; the iterator cannot be used any more."""
    self._finalizer()


def _close_all(replicas: dict[int, Any]) -> None:
  while replicas:
    replicas.popitem()[1].close()


def _tuples(position):
  """Lists as tuples, which JSON does not have.

  grain's packer knows an empty remainder by comparing with a tuple; given a list it
  would take a document that was read in full as not read at all.
  """
  if isinstance(position, Mapping):
    return {key: _tuples(value) for key, value in position.items()}
  if isinstance(position, list | tuple):
    return tuple(_tuples(value) for value in position)
  return position


def make_train_iterator(
  c: Config, replica_ids: list[int] | None = None
) -> TrainIterator:
  """The training batches of some replicas.

  Args:
    c: resolved config.
    replica_ids: whose batches, in the order of R; default all M. A process of a
      larger run gives the replicas that it trains, wholly or in part.

  Returns:
    An iterator of int32 [R, train.batch_size / M, L].

  Raises:
    ConfigError: data are missing, too few, or do not fit the model's vocabulary.
  """
  documents = make_documents(c, "train")
  if len(documents) < c.replicas:
    raise ConfigError(
      f"replicas is {c.replicas}, but data.source {c.data.source!r} has only"
      f" {len(documents)} training documents; use at most that many replicas."
    )
  ids = range(c.replicas) if replica_ids is None else replica_ids
  for r in ids:
    if not 0 <= r < c.replicas:
      raise ConfigError(
        f"replicas is {c.replicas}, but the data of replica {r} are asked for; choose"
        f" ids from 0 to {c.replicas - 1}."
      )
  return TrainIterator({r: _shard(c, documents, r) for r in ids}, len(documents))


def _shard(c: Config, documents: Documents, replica: int):
  """Replica r's endless stream of batches [B, L]."""
  import grain  # Imports JAX, which those who only read text do not need.

  length = c.model.seq_len
  shard = grain.MapDataset.source(documents)[replica :: c.replicas]
  # A seed for each replica: with one for all, shards of one length would be read in
  # one order, and replicas would see neighbouring documents at the same time.
  seeds = np.random.SeedSequence([c.seed, replica]).generate_state(2)
  tokens = (
    shard.shuffle(seed=int(seeds[0]))
    .repeat()
    .map(lambda ids: {"tokens": ids})
    .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
  )
  packed = grain.experimental.ConcatThenSplitIterDataset(
    tokens, length_struct={"tokens": length}
  )
  if c.data.shuffle_window > 1:
    packed = grain.experimental.WindowShuffleIterDataset(
      packed, window_size=c.data.shuffle_window, seed=int(seeds[1])
    )
  batches = packed.batch(c.train.batch_size // c.replicas, drop_remainder=True)
  if c.data.prefetch:
    batches = grain.experimental.ThreadPrefetchIterDataset(
      batches, prefetch_buffer_size=c.data.prefetch
    )
  return iter(batches)


def make_eval_set(c: Config) -> EvalSet:
  """The first `eval.tokens` held-out tokens (all of them if 0), packed in order.

  Where the budget cuts a document, the bytes of what is left of it are counted.

  Raises:
    ConfigError: data are missing or empty.
  """
  documents = make_documents(c, "eval")
  pieces: list[np.ndarray] = []
  count, num_bytes = 0, 0
  budget = c.eval.tokens or np.inf
  for i in range(len(documents)):
    if count >= budget:
      break
    ids = documents[i]
    kept = int(min(len(ids), budget - count))
    pieces.append(ids[:kept])
    count += kept
    num_bytes += documents.num_bytes(i, kept)
  if not count:
    raise ConfigError(
      f"data.source is {c.data.source!r}, whose held-out part is empty; give it more"
      " documents or another data.eval_split."
    )
  rows, length = c.eval.batch_size, c.model.seq_len
  shape = (-(-count // (rows * length)), rows, length)
  tokens = np.zeros(shape, np.int32)
  weights = np.zeros(shape, np.float32)
  tokens.reshape(-1)[:count] = np.concatenate(pieces)
  weights.reshape(-1)[:count] = 1
  return EvalSet(tokens, weights, count, num_bytes)
