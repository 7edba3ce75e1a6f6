"""Records of TFRecord and ArrayRecord files, in order, without TensorFlow.

A TFRecord file is a sequence of (length: uint64, CRC of the length: uint32, bytes, CRC
of the bytes: uint32), little-endian. Each CRC-32C (RFC 3720) is stored rotated right by
15 bits plus 0xA282EAD8. The reader checks both CRCs of every record that it yields.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO

from diloco.util.command import optional


def read_tfrecord(path: pathlib.Path, start: int, stop: int) -> Iterator[bytes]:
  """Yields the records [start, stop) of a TFRecord file.

  Raises:
    ValueError: the file is damaged or has fewer records.
  """
  with path.open("rb") as file:
    for i in range(stop):
      if not file.peek(1):
        raise ValueError(
          f"{path} ends after {i} records, but its data set says that it has at least"
          f" {stop}; fetch the file again."
        )
      size = int.from_bytes(_read_checked(file, 8), "little")
      if i < start:
        file.seek(size + 4, os.SEEK_CUR)
      else:
        yield _read_checked(file, size)


def read_array_record(path: pathlib.Path, start: int, stop: int) -> Iterator[bytes]:
  """Yields the records [start, stop) of an ArrayRecord file; holds at most 256."""
  from array_record.python import array_record_module  # Plain text does not need it.

  options = "readahead_buffer_size:0,max_parallelism:0"
  reader = array_record_module.ArrayRecordReader(str(path), options)
  for first in range(start, stop, 256):
    yield from reader.read(first, min(first + 256, stop))


def example_text(record: bytes) -> str:
  """Returns the feature `text` of a serialised tf.train.Example.

  Raises:
    RuntimeError: the record has no such feature; ArrayRecord raises the same kind.
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


def _read_checked(file: BinaryIO, size: int) -> bytes:
  """Reads `size` bytes and checks the CRC that follows them."""
  block, crc = file.read(size), file.read(4)
  if len(crc) < 4 or masked_crc32c(block) != int.from_bytes(crc, "little"):
    raise ValueError(
      f"{file.name} is cut short, damaged or not a TFRecord file; fetch it again and"
      " repeat the command."
    )
  return block
