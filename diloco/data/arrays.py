"""Memory-mapped token arrays of documents; `python -m diloco prepare_data` writes them.

A split is a folder with these files:
  manifest.json         source, options, sizes of all files, counts
  tokenizer.model       copy of the tokenizer
  ends.npy              uint64[documents], count of tokens up to each document's end
  bytes.npy             uint32[documents], UTF-8 bytes of each document's text
  00000-of-00004.npy    uint16 or uint32 ids of consecutive documents, EOS after each
"""

import bisect
import functools
import itertools
import mmap
import pathlib

import numpy as np
from numpy.typing import DTypeLike

from diloco.data.files import reading
from diloco.errors import ConfigError
from diloco.spec.shapes import EOS_ID
from diloco.tokenizer.tokenizer import Tokenizer
from diloco.tokenizer.vocabulary import read_manifest
from diloco.util.types import Json

ENDS, BYTES = "ends.npy", "bytes.npy"
# The most arrays that are open at the same time: each array needs a file descriptor.
_OPEN_ARRAYS = 512


class TokenArrays:
  """The documents of a prepared split: `arrays[i]` has int32 ids that end with EOS.

  Checks every document when it reads the document. Otherwise a damaged file would train
  the model on wrong or impossible tokens.

  Raises:
    ConfigError: the split is not fully prepared, the size, type or shape of a file is
      not what the manifest says, or the arrays were made with another tokenizer.
  """

  def __init__(self, folder: pathlib.Path, tokenizer: Tokenizer):
    self._folder, self._tokenizer = folder, tokenizer
    manifest = read_manifest(folder)
    self._check(manifest)
    shards, count = manifest["shards"], manifest["documents"]
    self._starts = [0, *itertools.accumulate(s["tokens"] for s in shards)]
    self._ends = _load(folder / ENDS, np.uint64, count)
    self._bytes = _load(folder / BYTES, np.uint32, count)
    total = int(self._ends[-1]) if count else 0
    if total != self._starts[-1]:
      raise _damage(
        folder / ENDS, f"which counts {total:,} tokens instead of {self._starts[-1]:,}"
      )
    self._arguments = [
      (folder / s["file"], manifest["dtype"], s["tokens"]) for s in shards
    ]
    # Each object has its own cache, so deleting the object closes the arrays.
    self._open = functools.lru_cache(_OPEN_ARRAYS)(_load)
    for arguments in self._arguments:
      self._open(*arguments)  # Finds wrong types and lengths before training.

  def __len__(self) -> int:
    return len(self._ends)

  def __getitem__(self, index: int) -> np.ndarray:
    start = int(self._ends[index - 1]) if index else 0
    stop = int(self._ends[index])
    last = len(self._arguments)
    shard = bisect.bisect_right(self._starts, start, hi=last) - 1
    first, after = self._starts[shard : shard + 2]
    if not first <= start < stop <= after:
      raise _damage(
        self._folder / ENDS, f"whose document {index} has the tokens {start} to {stop}"
      )
    path = self._arguments[shard][0]
    ids = self._open(*self._arguments[shard])[start - first : stop - first]
    largest = int(ids.max())
    if largest >= self._tokenizer.vocab_size:
      raise _damage(
        path,
        f"whose document {index} has the token {largest}, but the tokenizer has only"
        f" {self._tokenizer.vocab_size} pieces",
      )
    if ids[-1] != EOS_ID:
      raise _damage(path, f"whose document {index} does not end with EOS")
    return ids.astype(np.int32)

  def lengths(self, indices: range) -> np.ndarray:
    """Returns the number of tokens of each given document, int64."""
    at, ends = np.array(indices), np.asarray(self._ends)
    return (ends[at] - np.where(at > 0, ends[at - 1], 0)).astype(np.int64)

  def num_bytes(self, index: int, num_tokens: int) -> int:
    """Returns the UTF-8 bytes of the text of a document's first `num_tokens` tokens.

    The number is exact for whole documents. For parts of documents it is exact if
    encoding and then decoding leaves every text unchanged.
    """
    ids = self[index]
    if num_tokens >= len(ids):
      return int(self._bytes[index])
    text = self._tokenizer.decode(ids.tolist())
    return self._tokenizer.prefix_bytes(text, num_tokens)

  def _check(self, manifest: Json) -> None:
    made_with = manifest["tokenizer"]
    if made_with["sha256"] != self._tokenizer.sha256:
      raise ConfigError(
        f"data.source has arrays made with the tokenizer {made_with['name']} (sha256"
        f" {made_with['sha256'][:12]}), but data.tokenizer has sha256"
        f" {self._tokenizer.sha256[:12]}; set data.tokenizer to the first one (empty:"
        " that of data.source), or make the arrays again with the second one."
      )
    for file in manifest["files"]:
      path = self._folder / file["file"]
      size = path.stat().st_size if path.is_file() else 0
      if size != file["size"]:
        raise _damage(path, f"with {size:,} bytes instead of {file['size']:,}")


def _load(path: pathlib.Path, dtype: DTypeLike, length: int) -> np.ndarray:
  """Maps a one-dimensional array into memory, and turns read-ahead off.

  Documents are read in random order. With Linux's read-ahead, a training step would
  read 200 times the bytes that it needs (docs/data.md).

  Raises:
    ConfigError: the file is not an array, or its type or length is not as given.
  """
  with reading():
    try:
      array = np.lib.format.open_memmap(path, mode="r")
    except OSError:
      raise
    except Exception as error:  # NumPy's header parser raises many types of errors.
      raise _damage(path, "which is no array") from error
  if array.dtype != dtype or array.shape != (length,):
    raise _damage(
      path,
      f"which holds {array.dtype}{list(array.shape)} instead of"
      f" {np.dtype(dtype)}[{length}]",
    )
  if isinstance(array.base, mmap.mmap):  # An empty array has no map.
    array.base.madvise(mmap.MADV_RANDOM)
  return array


def _damage(path: pathlib.Path, what: str) -> ConfigError:
  return ConfigError(
    f"data.source has {path}, {what}; copy the file again, or delete the folder and"
    " tokenize again."
  )
