"""Documents as tokens by index, encoded as they are asked for or prepared before."""

import pathlib
from typing import Protocol

import numpy as np

from diloco.config import Config, ConfigError
from diloco.data.arrays import TokenArrays
from diloco.data.sources import Source, make_source
from diloco.data.tokenizer import BOS_ID, EOS_ID, Tokenizer, load_tokenizer


class Documents(Protocol):
  """The documents of one split, int32 ids, each ended by EOS."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> np.ndarray: ...

  def num_bytes(self, index: int, num_tokens: int) -> int:
    """UTF-8 bytes of the text for which a document's first tokens stand."""
    ...


def make_documents(c: Config, split: str) -> Documents:
  """The documents of `config.data.source`: the one way in which a run gets its data.

  Args:
    c: resolved config.
    split: train or eval.

  Raises:
    ConfigError: data are missing or do not fit tokenizer or model.
  """
  tokenizer = _load(c)
  documents: Documents
  if c.data.source.startswith("arrays:"):
    name = c.data.train_split if split == "train" else c.data.eval_split
    folder = pathlib.Path(c.data.source.removeprefix("arrays:")) / name
    documents = TokenArrays(folder, tokenizer)
  else:
    documents = EncodedText(make_source(c.data, split), tokenizer)
  return WithBos(documents) if c.data.add_bos else documents


class EncodedText:
  """Documents of a text source, encoded when they are asked for."""

  def __init__(self, source: Source, tokenizer: Tokenizer):
    self._source, self._tokenizer = source, tokenizer

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> np.ndarray:
    return encode_document(self._tokenizer, self._source[index])

  def num_bytes(self, index: int, num_tokens: int) -> int:
    return self._tokenizer.prefix_bytes(self._source[index], num_tokens)


class WithBos:
  """Documents that begin with BOS, as NanoDO's do."""

  def __init__(self, documents: Documents):
    self._documents = documents

  def __len__(self) -> int:
    return len(self._documents)

  def __getitem__(self, index: int) -> np.ndarray:
    return np.concatenate([np.asarray([BOS_ID], np.int32), self._documents[index]])

  def num_bytes(self, index: int, num_tokens: int) -> int:
    return self._documents.num_bytes(index, max(num_tokens - 1, 0))


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray:
  """int32 ids of a document, ended by EOS."""
  return np.asarray([*tokenizer.encode(text), EOS_ID], np.int32)


def _load(c: Config) -> Tokenizer:
  tokenizer = load_tokenizer(c.data.tokenizer)
  if tokenizer.vocab_size > c.model.vocab_size:
    raise ConfigError(
      f"model.vocab_size is {c.model.vocab_size}, but data.tokenizer"
      f" {c.data.tokenizer!r} has {tokenizer.vocab_size} pieces; raise"
      f" model.vocab_size to at least {tokenizer.vocab_size}."
    )
  return tokenizer
