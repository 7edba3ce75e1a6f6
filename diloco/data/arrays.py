"""Documents as tokens in memory-mapped arrays, which `prepare_data.py` writes.

A split is a folder:
  manifest.json         what it was made from and with, and all counts
  ends.npy              uint64[documents], tokens up to the end of each document
  bytes.npy             uint32[documents], UTF-8 bytes of each document's text
  00000-of-00004.npy    uint16 or uint32 ids of consecutive documents, each ended by EOS
"""

import bisect
import functools
import json
import pathlib
from typing import Any

import numpy as np

from diloco.config import ConfigError
from diloco.data.tokenizer import Tokenizer

MANIFEST, PLAN, ENDS, BYTES = "manifest.json", "plan.json", "ends.npy", "bytes.npy"
VERSION = 1
# Shards kept open, each of which takes a file descriptor.
_OPEN_SHARDS = 512


class TokenArrays:
  """The documents of a prepared split; `arrays[i]` is int32 ids, ended by EOS.

  Raises:
    ConfigError: the folder holds no finished split, files of other sizes than its
      manifest says, or ids of another tokenizer.
  """

  def __init__(self, folder: pathlib.Path, tokenizer: Tokenizer):
    self.manifest = read_manifest(folder)
    self._folder, self._tokenizer = folder, tokenizer
    self._check()
    self._ends = np.load(folder / ENDS, mmap_mode="r")
    self._bytes = np.load(folder / BYTES, mmap_mode="r")
    shards = self.manifest["shards"]
    self._names = [s["file"] for s in shards]
    self._starts = [0, *np.cumsum([s["tokens"] for s in shards]).tolist()]
    # Bound to the object, so that the maps go when it goes.
    self._open = functools.lru_cache(_OPEN_SHARDS)(self._map)

  def __len__(self) -> int:
    return len(self._ends)

  def __getitem__(self, index: int) -> np.ndarray:
    start = int(self._ends[index - 1]) if index else 0
    stop = int(self._ends[index])
    shard = bisect.bisect_right(self._starts, start) - 1
    first = self._starts[shard]
    return self._open(shard)[start - first : stop - first].astype(np.int32)

  def num_bytes(self, index: int, num_tokens: int) -> int:
    """UTF-8 bytes of the text for which a document's first tokens stand.

    Exact for tokenizers that give texts back as they were; of others exact for whole
    documents.
    """
    ids = self[index]
    if num_tokens >= len(ids):
      return int(self._bytes[index])
    return self._tokenizer.prefix_bytes(
      self._tokenizer.decode(ids.tolist()), num_tokens
    )

  def _map(self, shard: int) -> np.ndarray:
    return np.load(self._folder / self._names[shard], mmap_mode="r")

  def _check(self) -> None:
    found, here = self.manifest["tokenizer"], self._tokenizer
    if found["sha256"] != here.sha256:
      raise ConfigError(
        f"data.source names the arrays in {self._folder}, made with the tokenizer"
        f" {found['name']} (sha256 {found['sha256'][:12]}), but data.tokenizer has"
        f" sha256 {here.sha256[:12]}; set data.tokenizer to that file, or tokenize"
        " anew."
      )
    for file in self.manifest["files"]:
      path = self._folder / file["file"]
      size = path.stat().st_size if path.is_file() else 0
      if size != file["size"]:
        raise ConfigError(
          f"data.source names the arrays in {self._folder}, whose file {file['file']}"
          f" has {size:,} bytes instead of {file['size']:,}; copy it again, or delete"
          " the folder and tokenize anew."
        )


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
  """What a finished split was made from and with, and its counts.

  Raises:
    ConfigError: the split is not there, not finished, or of another version.
  """
  path = folder / MANIFEST
  if path.is_file():
    manifest = json.loads(path.read_text())
    if manifest["version"] != VERSION:
      raise ConfigError(
        f"{path} is of version {manifest['version']}, but this program reads version"
        f" {VERSION}; tokenize anew."
      )
    return manifest
  if (folder / PLAN).is_file():
    raise ConfigError(
      f"data.source names the arrays in {folder}, whose preparation is not finished;"
      " start the same `python scripts/prepare_data.py tokenize` again, it goes on."
    )
  raise ConfigError(
    f"data.source names arrays, but {path} does not exist; prepare it with `python"
    " scripts/prepare_data.py tokenize --source=<source> --split=<split>"
    f" --tokenizer=<tokenizer> --output={folder}`, or set data.train_split and"
    " data.eval_split to folders in data.source=arrays:<folder>."
  )
