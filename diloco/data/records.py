"""Records of TFRecord and ArrayRecord files, in order, without TensorFlow.

A TFRecord file is a row of (length: uint64, CRC of the length: uint32, bytes, CRC of
the bytes: uint32), little-endian. Its CRC-32C (RFC 3720) is stored rotated right by 15
bits plus 0xA282EAD8. All checksums are checked: a damaged copy is never converted.
"""

import os
from collections.abc import Iterator

from diloco.config import ConfigError


class DamagedRecord(ValueError):
  """A file ends within a record, or a checksum is wrong."""


def read_tfrecord(path: str | os.PathLike, skip: int = 0) -> Iterator[bytes]:
  """The records of a TFRecord file after the first `skip`, in order.

  Raises:
    DamagedRecord: the file is cut short or damaged.
  """
  with open(path, "rb") as file:
    while file.peek(1):
      size = int.from_bytes(_read(path, file, 8), "little")
      if skip:
        skip -= 1
        file.seek(size + 4, os.SEEK_CUR)
      else:
        yield _read(path, file, size)


def read_array_record(
  path: str | os.PathLike, start: int = 0, stop: int | None = None
) -> Iterator[bytes]:
  """Records start..stop of an ArrayRecord file, in order, a few hundred at a time."""
  from array_record.python import array_record_module  # Not needed for plain text.

  reader = array_record_module.ArrayRecordReader(
    os.fspath(path), "readahead_buffer_size:0,max_parallelism:0"
  )
  try:
    stop = reader.num_records() if stop is None else stop
    for first in range(start, stop, 256):
      yield from reader.read(list(range(first, min(first + 256, stop))))
  finally:
    reader.close()


def example_text(record: bytes) -> str:
  """The feature `text` of a serialised tf.train.Example."""
  from tensorflow_datasets.proto import tf_example_pb2  # Slow to import.

  example = tf_example_pb2.Example.FromString(record)
  return example.features.feature["text"].bytes_list.value[0].decode("utf-8")


def masked_crc32c(block: bytes) -> int:
  """The CRC-32C of a block as TFRecord stores it."""
  try:
    import google_crc32c
  except ImportError as error:
    raise ConfigError(
      "reading TFRecord files needs google-crc32c, which is not installed: pip install"
      " google-crc32c, or '.[prepare]' from a clone."
    ) from error
  crc = google_crc32c.value(block)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _read(path, file, size: int) -> bytes:
  """`size` bytes and their checksum, which is checked."""
  block, crc = file.read(size), file.read(4)
  if len(crc) < 4 or masked_crc32c(block) != int.from_bytes(crc, "little"):
    raise DamagedRecord(
      f"{path} is cut short or damaged, or is no TFRecord file; fetch it again and"
      " start the same command."
    )
  return block
