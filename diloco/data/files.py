"""Documents in text files and JSON-lines files.

`*.jsonl` and `*.json` hold one JSON object per line with a field `text`, as the public
copies of C4 and Dolma do. Every other file is one document. A file is compressed if its
name ends in `.gz`.
"""

import gzip
import io
import json
import pathlib
from collections.abc import Iterator

import numpy as np

# Without a validation split, a source holds out about one document in this many.
HOLD_OUT_EVERY = 20


def is_gzip(path: pathlib.Path) -> bool:
  return path.suffix == ".gz"


def is_lines(path: pathlib.Path) -> bool:
  """Tells whether a file holds JSON lines."""
  return path.name.removesuffix(".gz").endswith((".jsonl", ".json"))


def in_split(split: str, file_index: int, offset: int | np.ndarray) -> np.ndarray:
  """Tells whether documents belong to the split `train`, `eval` or `all`.

  The answer depends only on the file's place in the sorted list and on the documents'
  byte offsets in the uncompressed file. So a process can decide without knowing the
  other documents. A document at offset 0 is held out if its file's place is a multiple
  of HOLD_OUT_EVERY.

  Args:
    file_index: place of the file in the sorted list.
    offset: byte offsets of the documents, any shape.

  Returns:
    bool, the shape of `offset`.
  """
  # Multiplicative hashing (Knuth, TAOCP 6.4), which maps offset 0 to 0.
  hashed = np.asarray(offset, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
  held_out = (np.uint64(file_index) + (hashed >> np.uint64(32))) % HOLD_OUT_EVERY == 0
  return {"train": ~held_out, "eval": held_out, "all": held_out | True}[split]


def read_documents(
  path: pathlib.Path, start: int = 0, stop: int = 0
) -> Iterator[tuple[int, str]]:
  """Yields (byte offset, text) of the documents that begin in bytes start to stop.

  Ranges that together cover a file give each of its documents once. A file that is one
  document or compressed must be read whole.

  Args:
    start: first byte.
    stop: byte after the last one; 0: the end of the file.

  Raises:
    ValueError: a line is not a JSON object with a text, or a text is not UTF-8.
  """
  if not is_lines(path):
    yield 0, read_document(path, 0)
    return
  for offset, line in _read_lines(path, start, stop):
    yield offset, _parse(path, offset, line)


def read_document(path: pathlib.Path, offset: int) -> str:
  """Reads the document that begins at a byte offset. Line ends stay as stored."""
  with _open(path) as file:
    if not is_lines(path):
      return file.read().decode("utf-8")
    file.seek(offset)
    return _parse(path, offset, file.readline())


def document_offsets(path: pathlib.Path) -> np.ndarray:
  """Returns the byte offsets at which documents begin, int64; reads JSON lines once."""
  if not is_lines(path):
    return np.zeros(1, np.int64)
  return np.fromiter((offset for offset, _ in _read_lines(path, 0, 0)), np.int64)


def _open(path: pathlib.Path) -> io.BufferedIOBase:
  return gzip.open(path) if is_gzip(path) else path.open("rb")


def _read_lines(
  path: pathlib.Path, start: int, stop: int
) -> Iterator[tuple[int, bytes]]:
  """Yields (byte offset, line) of the non-empty lines that begin in a range."""
  with _open(path) as file:
    offset = start
    if start:  # Skips the rest of a line that begins before `start`.
      file.seek(start - 1)
      offset += len(file.readline()) - 1
    while (not stop or offset < stop) and (line := file.readline()):
      if not line.isspace():
        yield offset, line
      offset += len(line)


def _parse(path: pathlib.Path, offset: int, line: bytes) -> str:
  try:
    text = json.loads(line)["text"]
  except (ValueError, KeyError, TypeError):
    text = None
  if not isinstance(text, str):
    raise ValueError(
      f"{path} has a line at byte {offset} that is not a JSON object with a string"
      " `text`; files named .jsonl or .json need one such object per line."
    )
  return text
