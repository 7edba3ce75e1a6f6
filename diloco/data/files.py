"""Documents in text files and JSON-lines files.

`*.jsonl` and `*.json` hold one JSON object per line with a field `text`, as the public
copies of C4 and Dolma do. Every other file is one document, or has one document in each
paragraph: paragraphs are separated by blank lines. A file is compressed if its name
ends in `.gz`.
"""

import contextlib
import gzip
import io
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Literal

import numpy as np

from diloco.errors import ConfigError

# Without a validation split, a source holds out about one document in this many.
HOLD_OUT_EVERY = 20

# What is one document of a file: the file, a line of JSON, or a paragraph.
Layout = Literal["file", "lines", "paragraphs"]


def is_gzip(path: pathlib.Path) -> bool:
  return path.suffix == ".gz"


def layout(path: pathlib.Path, paragraphs: bool) -> Layout:
  """Returns what is one document of a file.

  Args:
    paragraphs: whether text files have a document in each paragraph.
  """
  if path.name.removesuffix(".gz").endswith((".jsonl", ".json")):
    return "lines"
  return "paragraphs" if paragraphs else "file"


@contextlib.contextmanager
def reading() -> Iterator[None]:
  """Raises a ConfigError with one sentence in place of an OSError."""
  try:
    yield
  except OSError as error:
    raise ConfigError(
      f"data.source cannot be read ({error}); restore the file or its permissions, or"
      " name other files."
    ) from error


def in_split(split: str, file_index: int, offset: int | np.ndarray) -> np.ndarray:
  """Returns whether documents belong to the split `train`, `eval` or `all`.

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
  path: pathlib.Path, kind: Layout, start: int = 0, stop: int = 0
) -> Iterator[tuple[int, str]]:
  """Yields (byte offset, text) of the documents that begin in bytes start to stop.

  Ranges that together cover a file of JSON lines give each of its documents once. Other
  files and compressed files must be read whole.

  Args:
    start: first byte.
    stop: byte after the last one; 0: the end of the file.

  Raises:
    ConfigError: a line is not a JSON object with a text, or a text is not UTF-8.
  """
  for offset, raw in _read(path, kind, start, stop):
    yield offset, _text(path, kind, offset, raw)


def read_document(path: pathlib.Path, kind: Layout, offset: int) -> str:
  """Reads the document that begins at a byte offset. Line ends stay as stored."""
  # A file that was cut meanwhile has nothing there.
  _, raw = next(_read(path, kind, offset, 0), (offset, b""))
  return _text(path, kind, offset, raw)


def document_offsets(path: pathlib.Path, kind: Layout) -> np.ndarray:
  """Returns the byte offsets at which documents begin, int64; reads the file once."""
  if kind == "file":
    return np.zeros(1, np.int64)
  return np.fromiter((offset for offset, _ in _read(path, kind, 0, 0)), np.int64)


def _open(path: pathlib.Path) -> io.BufferedIOBase:
  return gzip.open(path) if is_gzip(path) else path.open("rb")


def _read(
  path: pathlib.Path, kind: Layout, start: int, stop: int
) -> Iterator[tuple[int, bytes]]:
  """Yields (byte offset, bytes) of the documents that begin in a range."""
  with _open(path) as file:
    if kind == "file":
      yield 0, file.read()
      return
    offset = start
    if start:  # Skips the rest of a line that begins before `start`.
      file.seek(start - 1)
      offset += len(file.readline()) - 1
    if kind == "lines":
      while (not stop or offset < stop) and (line := file.readline()):
        if not line.isspace():
          yield offset, line
        offset += len(line)
    else:
      for blank, lines in itertools.groupby(file, key=bytes.isspace):
        paragraph = b"".join(lines)
        if not blank:
          yield offset, paragraph
        offset += len(paragraph)


def _text(path: pathlib.Path, kind: Layout, offset: int, raw: bytes) -> str:
  """Returns the text of a document from its bytes."""
  if kind != "lines":
    try:
      return raw.decode("utf-8")
    except UnicodeDecodeError as error:
      raise ConfigError(
        f"{path}, line {_line(path, offset + error.start)}, is not UTF-8 text (byte"
        f" 0x{raw[error.start]:02x}); convert the file with `iconv -f <encoding> -t"
        " UTF-8`, or leave it out."
      ) from error
  try:
    text = json.loads(raw)["text"]
    text.encode()  # Fails for half a character, which tokenizers do not accept.
  except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
    raise ConfigError(
      f"{path}, line {_line(path, offset)}, is not a JSON object with a string `text`;"
      " files named .jsonl or .json need one such object per line."
    ) from error
  return text


def _line(path: pathlib.Path, offset: int) -> int:
  """Returns the number of the line, from 1, that has the byte at an offset."""
  with _open(path) as file:
    ends = itertools.accumulate(map(len, file))
    return 1 + sum(1 for _ in itertools.takewhile(lambda end: end <= offset, ends))
