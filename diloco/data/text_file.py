"""Reads a file of documents: text, JSON lines or a table, perhaps compressed."""

import bz2
import codecs
import dataclasses
import functools
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from diloco.data import records
from diloco.errors import ConfigError
from diloco.util.command import optional

# The record that `File.scan` returns for each document of a text file.
DOCUMENT = np.dtype([("offset", "i8"), ("bytes", "i8"), ("hash", "i8")])

LINES = (".jsonl", ".ndjson", ".json")
ROWS = (".parquet", ".arrow", ".feather")
# Number of bytes that `sample` reads at the start and at the end of a file.
_SAMPLE = 1 << 16
_BLOCK = 1 << 16  # Bytes of a compressed file that are read at once.


class _Streams(io.RawIOBase):
  """Reads a file of compressed streams, one after another; finds all damage.

  Python's readers of .bz2 and .xz take a damaged later stream for the end of the file.
  """

  def __init__(self, make: Callable[[], Any], path: pathlib.Path):
    self._make, self._stream, self._file = make, make(), path.open("rb")

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    while True:
      raw = b""
      if self._stream.eof:
        raw = self._stream.unused_data.lstrip(b"\0")  # .xz may be padded with zeros.
        while not raw and (block := self._file.read(_BLOCK)):
          raw = block.lstrip(b"\0")
        if not raw:
          return 0
        self._stream = self._make()
      elif self._stream.needs_input and not (raw := self._file.read(_BLOCK)):
        raise EOFError("the last stream has no end")
      if data := self._stream.decompress(raw, len(buffer)):
        buffer[: len(data)] = data
        return len(data)

  def close(self) -> None:
    self._file.close()
    super().close()


def _open_streams(make: Callable[[], Any], path: pathlib.Path) -> io.BufferedIOBase:
  return io.BufferedReader(_Streams(make, path))


def _open_zst(path: pathlib.Path) -> io.BufferedIOBase:
  arrow = optional("pyarrow", f"{path} needs", "prepare")
  return io.BufferedReader(arrow.input_stream(str(path), compression="zstd"))


COMPRESSED: dict[str, Callable[[pathlib.Path], Any]] = {
  ".gz": gzip.open,
  ".bz2": functools.partial(_open_streams, bz2.BZ2Decompressor),
  ".xz": functools.partial(_open_streams, lzma.LZMADecompressor),
  ".zst": _open_zst,
}


@dataclasses.dataclass(frozen=True)
class File:
  """A file of documents.

  Attributes:
    path: path of the file.
    kind: which parts of the file are documents: "file" (the whole file), "paragraphs",
      "lines" (of JSON) or "rows" (of a table). `data.prepare` also uses the kinds
      "tfrecord" and "array_record".
    field: the field of JSON, or the column of a table, that holds the text.
  """

  path: pathlib.Path
  kind: str
  field: str = "text"

  @property
  def compressed(self) -> bool:
    return self.path.suffix.lower() in COMPRESSED

  def documents(self, start: int = 0, stop: int = 0) -> Iterator[tuple[int, str]]:
    """Yields (byte offset, text) of the documents that begin in bytes start to stop.

    A file of JSON lines may be read in ranges of bytes; each document is in one range.
    Other files and compressed files must be read whole. For rows of a table, the row
    number takes the place of the byte offset.

    Args:
      start: first byte.
      stop: byte after the last byte; 0: the end of the file.

    Raises:
      ConfigError: a line is not a JSON object with a text, a text is not UTF-8, or the
        file is binary.
    """
    if self.kind == "rows":
      yield from enumerate(records.read_rows(self.path, self.field))
    else:
      for offset, raw in self._raw(start, stop):
        yield offset, self._text(offset, raw)

  def document(self, offset: int) -> str:
    """Reads the document that begins at a byte offset; does not change line ends."""
    for _, raw in self._raw(offset):
      return self._text(offset, raw)
    raise ConfigError(f"{self.path} has become shorter since the start; start again.")

  def scan(self) -> np.ndarray:
    """Returns an array of `DOCUMENT`, one record for each document, in order.

    Equal documents have equal values of `hash`, in this process only. The hash of a
    paragraph ignores white space around the paragraph. The hash of a JSON line uses the
    text as it is written, escapes included, unless nested objects also have a text. The
    hash of a file that is one document uses its size, its beginning and its end.

    A file is read once, and again only after it has changed.

    Raises:
      ConfigError: the kind is "file", but the file is binary.
    """
    status = self.path.stat()
    return _scan(self, status.st_size, status.st_mtime_ns)

  def _scanned(self) -> Iterator[tuple[int, int, int]]:
    if self.kind == "file":
      size, *content = sample(self.path)
      self._refuse_binary(content[0])
      yield 0, int(size), hash((size, *content))
      return
    # A regular expression finds the text: parsing JSON takes longer and may fail. Only
    # JSON knows which text is the document's if nested objects have one, too.
    name = re.escape(json.dumps(self.field).encode())
    in_line = re.compile(name + rb'\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"')
    for offset, raw in self._raw():
      texts = in_line.findall(raw) if self.kind == "lines" else []
      if len(texts) > 1:
        texts = [self._text(offset, raw).encode()]
      raw = texts[0] if texts else raw.strip()
      yield offset, len(raw), hash(raw)

  def _open(self) -> io.BufferedIOBase:
    plain = lambda path: path.open("rb")
    return COMPRESSED.get(self.path.suffix.lower(), plain)(self.path)

  def _raw(self, start: int = 0, stop: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields (byte offset, bytes) of documents; takes the arguments of `documents`."""
    with self._open() as file:
      if self.kind == "file":
        yield 0, file.read()
        return
      offset = start
      if start:  # Skips the rest of a line that began before `start`.
        file.seek(start - 1)
        offset += len(file.readline()) - 1
      if self.kind == "lines":
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

  def _text(self, offset: int, raw: bytes) -> str:
    """Decodes the bytes of a document to text."""
    try:
      if self.kind == "lines":
        return self._json_text(offset, raw)
      self._refuse_binary(raw)
      if not offset and _is_json_line(raw.partition(b"\n")[0]):
        raise ConfigError(
          f"{self.path} is taken as plain text, but its first line is a JSON object"
          f" with a `text`; rename the file so that it ends in {', '.join(LINES)}."
        )
      return raw.decode("utf-8")
    except UnicodeDecodeError as error:
      raise ConfigError(
        f"{self.path}, line {self._line(offset + error.start)}, is not UTF-8 text (byte"
        f" 0x{raw[error.start]:02x}); convert the file with `iconv -f <encoding> -t"
        " UTF-8`, or leave it out."
      ) from error

  def _json_text(self, offset: int, raw: bytes) -> str:
    try:
      text = json.loads(raw)[self.field]
      text.encode()  # Fails for half a surrogate pair, which tokenizers do not accept.
    except UnicodeDecodeError:
      raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
      raise ConfigError(
        f"{self.path}, line {self._line(offset)}, is not a JSON object with a string"
        f" `{self.field}`; files named .jsonl or .json need one such object per line;"
        " another name of the text is given as in files:/data/*.jsonl#content."
      ) from error
    return text

  def _refuse_binary(self, raw: bytes) -> None:
    utf_16 = raw.startswith((codecs.BOM_UTF16_BE, codecs.BOM_UTF16_LE))
    if b"\0" in raw and not utf_16:
      raise ConfigError(
        f"{self.path} is a binary file, which is not read; give plain text,"
        f" {', '.join([*LINES, *ROWS])}, also compressed as"
        f" {', '.join(COMPRESSED)}, or leave the file out."
      )

  def _line(self, offset: int) -> int:
    """Returns the number (from 1) of the line that contains the byte at an offset."""
    with self._open() as file:
      ends = itertools.accumulate(map(len, file))
      return 1 + sum(1 for _ in itertools.takewhile(lambda end: end <= offset, ends))


@functools.cache
def _scan(file: File, size: int, changed: int) -> np.ndarray:
  """Scans a file; scans it again only if `size` or the time `changed` is new."""
  return np.fromiter(file._scanned(), DOCUMENT)


def sample(path: pathlib.Path) -> Iterable[bytes]:
  """Yields the size of a file in bytes, its beginning and its end."""
  with path.open("rb") as file:
    size = file.seek(0, os.SEEK_END)  # `stat` of a path in a bucket has other fields.
    yield str(size).encode()
    file.seek(0)
    yield file.read(_SAMPLE)
    file.seek(max(size - _SAMPLE, 0))
    yield file.read(_SAMPLE)


def digest(parts: Iterable[bytes]) -> str:
  """Returns the SHA-256 of a list of parts; it also depends on where each part ends."""
  sha256 = hashlib.sha256()
  for part in parts:
    sha256.update(f"{len(part)}:".encode() + part)
  return sha256.hexdigest()


def _is_json_line(line: bytes) -> bool:
  try:
    return line[:1] == b"{" and "text" in json.loads(line)
  except (RecursionError, ValueError):
    return False
