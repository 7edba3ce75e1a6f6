"""Gives documents as tokens: encodes text when it is read, or reads token arrays."""

import dataclasses
from typing import TypeAlias

import numpy as np

from diloco.config import Config
from diloco.data.arrays import TokenArrays
from diloco.data.files import reading
from diloco.data.sources import Source, make_source, refuse_shared
from diloco.errors import ConfigError
from diloco.spec.shapes import BOS_ID, EOS_ID
from diloco.tokenizer.tokenizer import Tokenizer, load_tokenizer
from diloco.tokenizer.vocabulary import read_manifest, split_folder

# The most tokens in memory at once: 512 MiB as int32. Reading takes up to a minute.
MOST_TOKENS = 1 << 27


def make_documents(c: Config, split: str) -> "Documents":
  """Opens the documents of `config.data`. All runs get their data from this function.

  Args:
    split: train, or eval (from data.eval_source, if that is set).

  Raises:
    ConfigError: data are missing, do not fit the tokenizer or the model, or held-out
      slices of a TFDS data set share documents with training.
  """
  d = c.data
  if split == "train" or d.eval_source in ("", d.source):
    if split == "eval":
      refuse_shared(d.source, d.data_dir, d.train_split, d.eval_split)
    return _open(c, split)
  data = dataclasses.replace(d, source=d.eval_source)
  try:
    return _open(dataclasses.replace(c, data=data), split)
  except ConfigError as error:  # Its message names data.source, the wrong field here.
    text = str(error).replace("data.source", "data.eval_source")
    raise ConfigError(text) from error


def _open(c: Config, split: str) -> "Documents":
  """Opens the documents of a split of `data.source`."""
  if is_arrays := c.data.source.startswith("arrays:"):
    name = c.data.train_split if split == "train" else c.data.eval_split
    folder = split_folder(c.data.source, name)
    read_manifest(folder)  # If it is missing, so is the tokenizer beside it.
  tokenizer = load_tokenizer(c.data.tokenizer)
  if tokenizer.vocab_size > c.model.vocab_size:
    raise ConfigError(
      f"model.vocab_size is {c.model.vocab_size}, but data.tokenizer"
      f" {c.data.tokenizer!r} has {tokenizer.vocab_size} pieces; raise"
      f" model.vocab_size to at least {tokenizer.vocab_size}, or set 0 for exactly as"
      " many."
    )
  documents: TokenArrays | EncodedText
  if is_arrays:
    with reading():
      documents = TokenArrays(folder, tokenizer)
  else:
    documents = EncodedText(make_source(c.data, split), tokenizer)
  return WithBos(documents) if c.data.add_bos else documents


class EncodedText:
  """Documents of a text source; encodes a document when it reads the document."""

  def __init__(self, source: Source, tokenizer: Tokenizer):
    self._source, self._tokenizer = source, tokenizer
    self._kept = list[np.ndarray]()

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> np.ndarray:
    if self._kept:
      return self._kept[index]
    return encode_document(self._tokenizer, self._source[index])

  def lengths(self, indices: range) -> np.ndarray:
    """Returns the number of tokens of each given document, int64.

    The first call encodes all documents, and keeps their tokens in memory.

    Raises:
      ConfigError: the documents have more than MOST_TOKENS tokens in all (estimated).
    """
    self._kept = self._kept or self._encode_all()
    return np.array([len(self._kept[i]) for i in indices], np.int64)

  def _encode_all(self) -> list[np.ndarray]:
    kept, total = list[np.ndarray](), 0
    for i in range(len(self)):
      kept.append(self[i])
      total += len(kept[-1])
      expected = total // (i + 1) * len(self) if i > 1000 else total
      if expected > MOST_TOKENS:
        raise ConfigError(
          "data.shuffle_window is -1, which keeps all tokens of a text in memory, but"
          f" data.source has about {expected:,}, and {MOST_TOKENS:,} are allowed;"
          " prepare arrays (python -m diloco prepare_data), which stay on"
          " disk, or choose a window."
        )
    return kept

  def num_bytes(self, index: int, num_tokens: int) -> int:
    """Returns the UTF-8 bytes of the text of a document's first `num_tokens` tokens."""
    return self._tokenizer.prefix_bytes(self._source[index], num_tokens)


class WithBos:
  """Documents that begin with BOS, as in NanoDO."""

  def __init__(self, documents: TokenArrays | EncodedText):
    self._documents = documents

  def __len__(self) -> int:
    return len(self._documents)

  def __getitem__(self, index: int) -> np.ndarray:
    return np.insert(self._documents[index], 0, BOS_ID)

  def lengths(self, indices: range) -> np.ndarray:
    return self._documents.lengths(indices) + 1

  def num_bytes(self, index: int, num_tokens: int) -> int:
    return self._documents.num_bytes(index, max(num_tokens - 1, 0))


# The documents of one split. Each document is an array of int32 ids that ends with EOS.
Documents: TypeAlias = TokenArrays | EncodedText | WithBos


class Sequences:
  """Gives the sequences of a shard by index, so that a whole epoch can be shuffled.

  If documents are long, shuffling only documents, or only a window of sequences, is not
  enough: a replica trains for many steps on few documents, which the other replicas do
  not see, and the replicas drift apart (docs/ladder.md). Documents of C4 are short.

  The documents are concatenated in their order and cut into sequences of L tokens. If
  fewer than L tokens remain at the end of the shard, they are dropped.

  Raises:
    ConfigError: the shard has fewer than L tokens.
  """

  def __init__(self, documents: Documents, indices: range, length: int):
    """Finds where each document ends in the concatenated shard.

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


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray:
  """Encodes a text as int32 ids, and appends EOS."""
  return np.asarray([*tokenizer.encode(text), EOS_ID], np.int32)
