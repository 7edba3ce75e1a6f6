"""Lists and opens files that hold documents.

`*.jsonl`, `*.ndjson` and `*.json` hold one JSON object per line with a field `text`, as
the public copies of C4 and Dolma do; `*.parquet`, `*.arrow` and `*.feather` hold rows
with a column `text`, as FineWeb and folders of Hugging Face's `datasets` do. Upper case
is the same. Every other file is one document, or has one document in each paragraph:
paragraphs are separated by blank lines. A file may be compressed: `.gz`, `.bz2`, `.xz`
or `.zst` at the end of its name.
"""

import bz2
import codecs
import contextlib
import glob
import gzip
import importlib.metadata
import io
import itertools
import json
import lzma
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from diloco.data import records
from diloco.errors import ConfigError
from diloco.util.command import optional
from diloco.util.files import local_path

# Without a validation split, a source holds out about one document in this many.
HOLD_OUT_EVERY = 20

# What is one document of a file: "file", "paragraphs", "lines" (of JSON), "rows" (of a
# table). Another field than `text` follows, as in "lines:content".
Layout: TypeAlias = str

_FILES, _PARAGRAPHS = "files:", "paragraphs:"
_LINES = (".jsonl", ".ndjson", ".json")
_ROWS = (".parquet", ".arrow", ".feather")
# Beside the Arrow files in a folder of Hugging Face's `datasets`.
_DESCRIPTIONS = ("dataset_dict.json", "dataset_info.json", "state.json")


def _open_zst(path: pathlib.Path) -> io.BufferedIOBase:
  arrow = optional("pyarrow", f"{path} needs", "prepare")
  return io.BufferedReader(arrow.input_stream(str(path), compression="zstd"))


_COMPRESSED: dict[str, Callable[[pathlib.Path], Any]] = {
  ".gz": gzip.open,
  ".bz2": bz2.open,
  ".xz": lzma.open,
  ".zst": _open_zst,
}


def list_files(source: str) -> dict[pathlib.Path, Layout]:
  """Lists the files of `sotu`, `files:<glob>` or `paragraphs:<glob>` in order.

  A folder instead of a glob stands for all files in it that are not hidden. A file that
  several names or links lead to counts once, under the first name. `#content` at the
  end means that texts lie in the field or column `content`, not in `text`.

  Returns:
    {file: what is one document of it}.

  Raises:
    ConfigError: no file was found, or the source is of another kind.
  """
  field = ""
  if source == "sotu":
    # Importing the package would import pandas.
    package = importlib.metadata.distribution("sotu")
    pattern = glob.escape(str(package.locate_file("sotu"))) + "/data/speeches/*.txt"
  elif source.startswith((_FILES, _PARAGRAPHS)):
    pattern, field = _pattern(source)
    pattern = str(local_path(pattern, "data.source"))
  else:
    raise ConfigError(
      f"data.source is {source!r}; choose sotu, files:<glob>, paragraphs:<glob> or"
      " tfds:<name>:<version>, or arrays:<folder> to train on prepared tokens."
    )
  with reading():
    found = (
      _below(pattern) if os.path.isdir(pattern) else glob.glob(pattern, recursive=True)
    )
    paths = dict[tuple[int, int], pathlib.Path]()  # By what the file is.
    for path in map(pathlib.Path, sorted(found)):
      if path.is_file():
        status = path.stat()
        paths.setdefault((status.st_dev, status.st_ino), path)
  if not paths:
    raise ConfigError(
      f"data.source is {source!r}, but no file matches {pattern!r}; give a folder, or a"
      " glob such as files:/data/text/*.txt."
    )
  paragraphs = source.startswith(_PARAGRAPHS)
  return {path: layout(path, paragraphs, field) for path in paths.values()}


def _pattern(source: str) -> tuple[str, str]:
  """Divides `files:<glob>#<field>` into glob and field; the field may be empty."""
  pattern = source.partition(":")[2]
  found = re.fullmatch(r"(.+)#(\w+)", pattern)
  if found and not os.path.exists(pattern):
    return found[1], found[2]
  return pattern, ""


def _below(folder: str) -> Iterator[str]:
  """Yields the files below a folder; enters each folder once, even if links lead back.

  Raises:
    OSError: a folder cannot be read.
  """

  def fail(error: OSError) -> None:
    raise error

  entered = set[tuple[int, int]]()
  for root, folders, names in os.walk(folder, followlinks=True, onerror=fail):
    status = os.stat(root)
    if (status.st_dev, status.st_ino) in entered:
      folders.clear()
      continue
    entered.add((status.st_dev, status.st_ino))
    folders[:] = sorted(name for name in folders if not name.startswith("."))
    names = [x for x in names if not x.startswith(".") and x not in _DESCRIPTIONS]
    yield from (os.path.join(root, name) for name in names)


def more_documents(source: str) -> str:
  """Explains how a user gets more documents from a source."""
  kind = layout(pathlib.Path(_pattern(source)[0]), paragraphs=False)
  if not source.startswith(_FILES) or kind in ("lines", "rows"):
    return "add documents"
  return (
    f"a text file is one document, and one document in {HOLD_OUT_EVERY} is"
    f" held out: add files, or write {_PARAGRAPHS}{source.removeprefix(_FILES)} to make"
    " each paragraph a document"
  )


def is_compressed(path: pathlib.Path) -> bool:
  return path.suffix.lower() in _COMPRESSED


def layout(path: pathlib.Path, paragraphs: bool, field: str = "") -> Layout:
  """Returns what is one document of a file.

  Args:
    paragraphs: whether text files have a document in each paragraph.
    field: of the text in JSON and tables; empty: text.
  """
  name = (path.stem if is_compressed(path) else path.name).lower()
  kind = "lines" if name.endswith(_LINES) else "rows" if name.endswith(_ROWS) else ""
  if kind:
    return f"{kind}:{field}" if field else kind
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
  files and compressed files must be read whole. The offset of a row is its number.

  Args:
    start: first byte.
    stop: byte after the last one; 0: the end of the file.

  Raises:
    ConfigError: a line is not a JSON object with a text, or a text is not UTF-8.
  """
  if kind.startswith("rows"):
    yield from enumerate(records.read_rows(path, field_of(kind)))
    return
  for offset, raw in read_raw(path, kind, start, stop):
    yield offset, _text(path, kind, offset, raw)


def read_document(path: pathlib.Path, kind: Layout, offset: int) -> str:
  """Reads the document that begins at a byte offset. Line ends stay as stored."""
  # A file that was cut meanwhile has nothing there.
  _, raw = next(read_raw(path, kind, offset), (offset, b""))
  return _text(path, kind, offset, raw)


def document_offsets(path: pathlib.Path, kind: Layout) -> np.ndarray:
  """Returns the byte offsets at which documents begin, int64; reads the file once."""
  if kind == "file":
    with _open(path) as file:
      _refuse_binary(path, file.read(4096))
    return np.zeros(1, np.int64)
  return np.fromiter((offset for offset, _ in read_raw(path, kind)), np.int64)


def _open(path: pathlib.Path) -> io.BufferedIOBase:
  return _COMPRESSED.get(path.suffix.lower(), lambda path: path.open("rb"))(path)


def field_of(kind: Layout) -> str:
  return kind.partition(":")[2] or "text"


def _refuse_binary(path: pathlib.Path, raw: bytes) -> None:
  if b"\0" in raw and not raw.startswith((codecs.BOM_UTF16_BE, codecs.BOM_UTF16_LE)):
    raise ConfigError(
      f"{path} is a binary file, which is not read; give plain text,"
      f" {', '.join([*_LINES, *_ROWS])}, also compressed as"
      f" {', '.join(_COMPRESSED)}, or leave the file out."
    )


def read_raw(
  path: pathlib.Path, kind: Layout, start: int = 0, stop: int = 0
) -> Iterator[tuple[int, bytes]]:
  """Yields (byte offset, bytes) of documents; the arguments are as `read_documents`."""
  with _open(path) as file:
    if kind == "file":
      yield 0, file.read()
      return
    offset = start
    if start:  # Skips the rest of a line that begins before `start`.
      file.seek(start - 1)
      offset += len(file.readline()) - 1
    if kind.startswith("lines"):
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
  if not kind.startswith("lines"):
    _refuse_binary(path, raw)
    if not offset and _is_json_line(raw.partition(b"\n")[0]):
      raise ConfigError(
        f"{path} is taken as plain text, but its first line is a JSON object with a"
        f" `text`; rename the file so that it ends in {', '.join(_LINES)}."
      )
    try:
      return raw.decode("utf-8")
    except UnicodeDecodeError as error:
      raise ConfigError(
        f"{path}, line {_line(path, offset + error.start)}, is not UTF-8 text (byte"
        f" 0x{raw[error.start]:02x}); convert the file with `iconv -f <encoding> -t"
        " UTF-8`, or leave it out."
      ) from error
  field = field_of(kind)
  try:
    text = json.loads(raw)[field]
    text.encode()  # Fails for half a character, which tokenizers do not accept.
  except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
    raise ConfigError(
      f"{path}, line {_line(path, offset)}, is not a JSON object with a string"
      f" `{field}`; files named .jsonl or .json need one such object per line;"
      " another name of the text is given as in files:/data/*.jsonl#content."
    ) from error
  return text


def _is_json_line(line: bytes) -> bool:
  try:
    return line[:1] == b"{" and "text" in json.loads(line)
  except (RecursionError, ValueError):
    return False


def _line(path: pathlib.Path, offset: int) -> int:
  """Returns the number of the line, from 1, that has the byte at an offset."""
  with _open(path) as file:
    ends = itertools.accumulate(map(len, file))
    return 1 + sum(1 for _ in itertools.takewhile(lambda end: end <= offset, ends))
