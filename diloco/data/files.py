"""Documents in files: one per text file, or one per line of JSON-lines files.

`*.jsonl`, `*.json` and both with `.gz` are JSON lines with a field `text`, as public
copies of C4 and Dolma have them; any other file is one document.
"""

import gzip
import json
import os
import pathlib
from collections.abc import Iterator

import numpy as np

# Of files without a validation split, about every so-manieth document is held out.
HOLD_OUT_EVERY = 20
_JSON_LINES = (".jsonl", ".json")
_BLANK = 2  # Bytes up to which a line is empty: its end alone.


def is_gzip(path: pathlib.Path) -> bool:
  return path.suffix == ".gz"


def is_lines(path: pathlib.Path) -> bool:
  """Whether a file holds JSON lines."""
  return path.name.removesuffix(".gz").endswith(_JSON_LINES)


def is_held_out(file_index: int, offset):
  """Whether a document of a split-less source is for evaluation.

  It depends on nothing but the place of its file in the sorted list and its byte offset
  (an integer or an array) in the uncompressed file, so any process can tell without
  knowing the others' documents. Whole files are held out in turn, from the first.
  """
  # Multiplicative hashing (Knuth, TAOCP 6.4): offset 0 has the value 0.
  with np.errstate(over="ignore"):
    mixed = np.asarray(offset, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
  return (np.uint64(file_index) + (mixed >> np.uint64(32))) % HOLD_OUT_EVERY == 0


def in_split(split: str, file_index: int, offset):
  """Whether a document belongs to `train`, `eval` or `all`."""
  if split == "all":
    return np.ones(np.shape(offset), bool)
  held_out = is_held_out(file_index, offset)
  return held_out if split == "eval" else ~held_out


def read_text(path: str | os.PathLike) -> str:
  """A file as one document; line ends stay as they are: bytes are counted as stored."""
  with open(path, encoding="utf-8", newline="") as file:
    return file.read()


def read_lines(
  path: pathlib.Path, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, str]]:
  """The documents whose lines begin in bytes start..stop, with their offsets.

  Ranges that cover a file give each of its documents once. A compressed file is read
  from its beginning: give it whole.

  Raises:
    ValueError: a line is no JSON object with a text.
  """
  with gzip.open(path) if is_gzip(path) else path.open("rb") as file:
    offset = start
    if start:  # The line that reaches over `start` began before it.
      file.seek(start - 1)
      offset += len(file.readline()) - 1
    while (stop is None or offset < stop) and (line := file.readline()):
      if len(line) > _BLANK:
        yield offset, _parse(path, offset, line)
      offset += len(line)


def read_line(path: pathlib.Path, offset: int) -> str:
  """The document whose line begins at a byte offset."""
  with path.open("rb") as file:
    file.seek(offset)
    return _parse(path, offset, file.readline())


def line_offsets(path: pathlib.Path) -> np.ndarray:
  """Where the documents of a JSON-lines file begin, int64; reads the file once."""
  ends, position = [np.zeros(1, np.int64)], 0
  with path.open("rb") as file:
    while block := file.read(1 << 24):
      newlines = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
      ends.append(newlines + (position + 1))
      position += len(block)
  offsets = np.concatenate(ends)
  sizes = np.diff(offsets, append=position)
  return offsets[sizes > _BLANK]


def _parse(path, offset: int, line: bytes) -> str:
  try:
    text = json.loads(line)["text"]
    if isinstance(text, str):
      return text
  except (ValueError, KeyError, TypeError):
    pass
  raise ValueError(
    f"{path} has a line at byte {offset} that is no JSON object with a string `text`;"
    " files whose names end in .jsonl or .json hold one such object per line."
  )
