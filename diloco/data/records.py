"""Reads the records of TFRecord files, ArrayRecord files and tables, in order.

A TFRecord file is a sequence of (length: uint64, CRC of the length: uint32, bytes, CRC
of the bytes: uint32), little-endian. The CRCs are CRC-32C (RFC 3720), stored as (CRC
rotated right by 15 bits) + 0xA282EAD8. The reader checks both CRCs of every record that
it yields.
"""

import io
import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO

from diloco.errors import ConfigError
from diloco.util.command import one_line, optional


def read_tfrecord(path: pathlib.Path, start: int, stop: int) -> Iterator[bytes]:
  """Yields the records [start, stop) of a TFRecord file.

  Raises:
    ValueError: the file is damaged or has fewer than `stop` records.
  """
  # BufferedReader adds the method `peek`, which open files in a bucket lack.
  with path.open("rb") as raw, io.BufferedReader(raw) as file:
    for i in range(stop):
      if not file.peek(1):
        raise ValueError(
          f"{path} ends after {i} records, but its data set says that it has at least"
          f" {stop}; fetch the file again."
        )
      size = int.from_bytes(_read_checked(file, 8, path), "little")
      if i < start:
        file.seek(size + 4, os.SEEK_CUR)
      else:
        yield _read_checked(file, size, path)


def read_array_record(path: pathlib.Path, start: int, stop: int) -> Iterator[bytes]:
  """Yields the records [start, stop) of an ArrayRecord file, read 256 at a time."""
  from array_record.python import array_record_module  # Few users need it.

  options = "readahead_buffer_size:0,max_parallelism:0"
  reader = array_record_module.ArrayRecordReader(str(path), options)
  for first in range(start, stop, 256):
    yield from reader.read(first, min(first + 256, stop))


def read_rows(path: pathlib.Path, column: str) -> Iterator[str]:
  """Yields the texts in a column of a parquet or Arrow file, one for each row.

  Keeps one batch of rows in memory.

  Raises:
    ConfigError: the column is missing or has other values than texts, or the package
      pyarrow is missing.
    ValueError: the file is damaged.
  """
  arrow = optional("pyarrow", f"{path} needs", "prepare")
  try:
    if path.suffix.lower() == ".parquet":
      parquet = optional("pyarrow.parquet", f"{path} needs", "prepare")
      table = parquet.ParquetFile(path, page_checksum_verification=True)
      names = table.schema_arrow.names
      batches = table.iter_batches(1024, columns=[column])
    else:
      file = arrow.memory_map(str(path))
      if file.read(6) == b"ARROW1":
        table = arrow.ipc.open_file(file)
        batches = map(table.get_batch, range(table.num_record_batches))
      else:  # Hugging Face's `datasets` writes streams, which do not begin so.
        file.seek(0)
        batches = table = arrow.ipc.open_stream(file)
      names = table.schema.names
    if column not in names:
      raise ConfigError(
        f"{path} has no column {column!r} but {', '.join(names)}; name the column of"
        f" the text as in files:{path}#{names[0]}."
      )
    for row, text in enumerate(x for b in batches for x in b[column].to_pylist()):
      if not isinstance(text, str):
        raise ConfigError(
          f"{path}, row {row} from 0, has {type(text).__name__} and no text in"
          f" {column!r}; name another column, or leave the row out."
        )
      yield text
  except (arrow.ArrowException, UnicodeError) as error:
    raise ValueError(
      f"{path} is cut short, damaged or no {path.suffix} file ({one_line(error)});"
      " fetch it again and repeat the command."
    ) from error


def example_text(record: bytes) -> str:
  """Returns the feature `text` of a serialised tf.train.Example.

  Raises:
    RuntimeError: the record has no such feature. ArrayRecord's reader raises the same
      type, so callers catch one type for both.
  """
  from google.protobuf import message  # Slow to import.
  from tensorflow_datasets.proto import tf_example_pb2

  try:
    example = tf_example_pb2.Example.FromString(record)
    return example.features.feature["text"].bytes_list.value[0].decode("utf-8")
  except (IndexError, UnicodeError, message.DecodeError) as error:
    raise RuntimeError("a record has no text in UTF-8") from error


def masked_crc32c(block: bytes) -> int:
  """Returns the CRC-32C of a block as TFRecord stores it."""
  crc32c = optional("google_crc32c", "reading TFRecord files needs", "prepare")
  crc = crc32c.value(block)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _read_checked(file: BinaryIO, size: int, path: pathlib.PurePath) -> bytes:
  """Reads `size` bytes and checks the CRC that follows them."""
  block, crc = file.read(size), file.read(4)
  if len(crc) < 4 or masked_crc32c(block) != int.from_bytes(crc, "little"):
    raise ValueError(
      f"{path} is cut short, damaged or not a TFRecord file; fetch it again and"
      " repeat the command."
    )
  return block
