"""Memory-mapped token arrays of documents; `scripts/prepare_data.py` writes them.

A split is a folder with these files:
  manifest.json         source, options, sizes of all files, counts
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
# Most arrays open at the same time: each needs a file descriptor.
_OPEN_ARRAYS = 512


class TokenArrays:
  """The documents of a prepared split; `arrays[i]`: int32 ids that end with EOS.

  Raises:
    ConfigError: the split is not finished, a file has another size than the manifest
      says, or the arrays were made with another tokenizer.
  """

  def __init__(self, folder: pathlib.Path, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    manifest = read_manifest(folder)
    self._check(folder, manifest)
    self._ends = np.load(folder / ENDS, mmap_mode="r")
    self._bytes = np.load(folder / BYTES, mmap_mode="r")
    self._paths = [folder / s["file"] for s in manifest["shards"]]
    self._starts = [0, *np.cumsum([s["tokens"] for s in manifest["shards"]]).tolist()]
    # One cache per object: the arrays are closed when the object is deleted.
    load = functools.partial(np.load, mmap_mode="r")
    self._open = functools.lru_cache(_OPEN_ARRAYS)(load)

  def __len__(self) -> int:
    return len(self._ends)

  def __getitem__(self, index: int) -> np.ndarray:
    start = int(self._ends[index - 1]) if index else 0
    stop = int(self._ends[index])
    shard = bisect.bisect_right(self._starts, start) - 1
    first = self._starts[shard]
    return self._open(self._paths[shard])[start - first : stop - first].astype(np.int32)

  def num_bytes(self, index: int, num_tokens: int) -> int:
    """Returns how many UTF-8 bytes the first tokens of a document stand for.

    The number is exact for whole documents. For parts of documents it is exact if the
    tokenizer decodes every text unchanged.
    """
    ids = self[index]
    if num_tokens >= len(ids):
      return int(self._bytes[index])
    text = self._tokenizer.decode(ids.tolist())
    return self._tokenizer.prefix_bytes(text, num_tokens)

  def _check(self, folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    made_with = manifest["tokenizer"]
    if made_with["sha256"] != self._tokenizer.sha256:
      raise ConfigError(
        f"data.source has arrays made with the tokenizer {made_with['name']} (sha256"
        f" {made_with['sha256'][:12]}), but data.tokenizer has sha256"
        f" {self._tokenizer.sha256[:12]}; set data.tokenizer to the first one."
      )
    for file in manifest["files"]:
      path = folder / file["file"]
      size = path.stat().st_size if path.is_file() else 0
      if size != file["size"]:
        raise ConfigError(
          f"data.source has {path} with {size:,} bytes instead of {file['size']:,};"
          " copy the file again, or delete the folder and tokenize again."
        )


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
  """Reads the manifest of a finished split.

  Raises:
    ConfigError: the split is missing, not finished, or has another version.
  """
  path = folder / MANIFEST
  manifest = json.loads(path.read_text()) if path.is_file() else {}
  if manifest.get("version") != VERSION:
    state = "is not finished" if (folder / PLAN).is_file() else "does not exist"
    if manifest:
      state = f"has version {manifest['version']} instead of {VERSION}"
    raise ConfigError(
      f"data.source is arrays, but {path} {state}; run `python scripts/prepare_data.py"
      " tokenize --source=<source> --split=<split> --tokenizer=<tokenizer>"
      f" --output={folder}`, or set data.train_split and data.eval_split to the names"
      " of prepared folders."
    )
  return manifest
