"""Data prepared once: text to token arrays, tfrecord to array_record.

Whenever a run is killed, finished units (see `diloco.data.units`) stay and the others
are made anew, so nothing is lost or repeated. Units depend on the data and the options
alone: any number of processes makes the same files.
"""

import array
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import numpy as np

from diloco.config import ConfigError
from diloco.data import arrays as arrays_lib
from diloco.data import pieces as pieces_lib
from diloco.data import sources as sources_lib
from diloco.data.documents import encode_document
from diloco.data.tokenizer import Tokenizer, load_tokenizer
from diloco.data.units import LOCK, lock, replacing, run_units, temporary, write_json

# Bytes on disk of a unit: few enough arrays to stay open while training (files that
# cannot be split may double them), none so large that a kill costs more than minutes.
_LEAST_UNIT, _MOST_UNIT, _UNITS = 1 << 24, 1 << 31, 256
_HEADER = 128  # Bytes of a .npy file before its data, whatever its length.


@dataclasses.dataclass(frozen=True)
class _Unit:
  """What one task tokenizes: `pieces` into `<folder>/<stem>.npy`."""

  folder: pathlib.Path
  stem: str
  pieces: list[pieces_lib.Piece]
  tokenizer: str
  dtype: str

  @property
  def tokens_file(self) -> pathlib.Path:
    return self.folder / f"{self.stem}.npy"

  @property
  def index_file(self) -> pathlib.Path:
    """int64 [documents, 2]: tokens and bytes of each."""
    return self.folder / f"{self.stem}.index.npy"

  @property
  def done_file(self) -> pathlib.Path:
    """Counts; exists once the unit is complete."""
    return self.folder / f"{self.stem}.done.json"


def tokenize(
  source: str,
  split: str,
  tokenizer: str,
  output: str | os.PathLike,
  data_dir: str = "",
  workers: int = 1,
  unit_size: int = 0,
) -> dict[str, Any]:
  """Writes a split of a source as token arrays, or goes on with it.

  Args:
    source: sotu, files:<glob> or tfds:<name>:<version> of array_record or tfrecord.
    split: a TFDS split or slice; of files train, eval or all.
    tokenizer: path of a .model, or the name of one in this package.
    output: the folder, see `diloco.data.arrays`.
    data_dir: root of TFDS data sets.
    workers: processes.
    unit_size: bytes on disk of the source for each array; 0 derives them.

  Returns:
    The manifest.

  Raises:
    ConfigError: data are missing, or output holds something else.
    ValueError: a file cannot be read.
  """
  folder = pathlib.Path(output)
  model = load_tokenizer(tokenizer)
  if not unit_size:
    whole = pieces_lib.make_pieces(source, split, data_dir, max_size=1 << 62)
    per_unit = sum(p.size for p in whole) // _UNITS
    unit_size = min(max(per_unit, _LEAST_UNIT), _MOST_UNIT)
  pieces = pieces_lib.make_pieces(source, split, data_dir, max_size=unit_size)
  groups = pieces_lib.group(pieces, unit_size)
  plan = {
    "version": arrays_lib.VERSION,
    "source": source,
    "split": split,
    "revision": pieces_lib.revision(pieces),
    "tokenizer": {
      "name": pathlib.Path(tokenizer).name,
      "sha256": model.sha256,
      "vocab_size": model.vocab_size,
    },
    "dtype": "uint16" if model.vocab_size <= 1 << 16 else "uint32",
    "unit_size": unit_size,
    "units": len(groups),
  }
  units = [
    _Unit(folder, f"{i:05}-of-{len(groups):05}", group, tokenizer, str(plan["dtype"]))
    for i, group in enumerate(groups)
  ]
  folder.mkdir(parents=True, exist_ok=True)
  with lock(folder):
    if not (folder / arrays_lib.MANIFEST).is_file():
      _check_plan(folder, plan)
      left = [u for u in units if not u.done_file.is_file()]
      sizes = [sum(p.size for p in u.pieces) for u in left]
      done = sum(p.size for p in pieces) - sum(sizes)
      run_units(_tokenize_unit, left, sizes, done, workers, f"{source} {split}")
      _join(folder, plan, units)
    manifest = arrays_lib.read_manifest(folder)
    changed = [k for k in plan if manifest[k] != plan[k]]
    if changed:
      raise _other(folder, changed[0], manifest[changed[0]], plan[changed[0]])
    for unit in units:
      unit.index_file.unlink(missing_ok=True)
      unit.done_file.unlink(missing_ok=True)
    (folder / arrays_lib.PLAN).unlink(missing_ok=True)
  return manifest


@functools.cache
def _tokenizer(name: str) -> Tokenizer:
  return load_tokenizer(name)


def _tokenize_unit(unit: _Unit) -> dict[str, int]:
  """Writes one array; returns its counts. Memory holds one document's text."""
  tokenizer, dtype = _tokenizer(unit.tokenizer), np.dtype(unit.dtype)
  lengths, sizes = array.array("q"), array.array("q")
  with replacing(unit.tokens_file) as file:
    file.write(_npy_header(dtype, 0))
    for piece in unit.pieces:
      for text in pieces_lib.read(piece):
        ids = encode_document(tokenizer, text)
        file.write(ids.astype(dtype).tobytes())
        lengths.append(len(ids))
        sizes.append(len(text.encode("utf-8")))
    file.seek(0)
    file.write(_npy_header(dtype, sum(lengths)))
  with replacing(unit.index_file) as file:
    np.save(file, np.stack([lengths, sizes], axis=1))
  counts = {
    "documents": len(lengths),
    "tokens": sum(lengths),
    "bytes": sum(sizes),
  }
  write_json(unit.done_file, counts)
  return counts


def _join(folder: pathlib.Path, plan: dict[str, Any], units: list[_Unit]) -> None:
  """Writes the index of all documents and, last, the manifest."""
  counts = [json.loads(unit.done_file.read_text()) for unit in units]
  documents = sum(c["documents"] for c in counts)
  total = 0
  with (
    replacing(folder / arrays_lib.ENDS) as ends,
    replacing(folder / arrays_lib.BYTES) as sizes,
  ):
    ends.write(_npy_header(np.dtype(np.uint64), documents))
    sizes.write(_npy_header(np.dtype(np.uint32), documents))
    for unit in units:
      index = np.load(unit.index_file)
      ends.write((total + np.cumsum(index[:, 0])).astype(np.uint64).tobytes())
      sizes.write(index[:, 1].astype(np.uint32).tobytes())
      total += int(index[:, 0].sum())
  names = [arrays_lib.ENDS, arrays_lib.BYTES, *(u.tokens_file.name for u in units)]
  manifest = {
    **plan,
    **{k: sum(c[k] for c in counts) for k in ("documents", "tokens", "bytes")},
    "shards": [
      {
        "file": unit.tokens_file.name,
        "tokens": c["tokens"],
        "documents": c["documents"],
      }
      for unit, c in zip(units, counts)
    ],
    "files": [{"file": n, "size": (folder / n).stat().st_size} for n in names],
  }
  write_json(folder / arrays_lib.MANIFEST, manifest)


def _check_plan(folder: pathlib.Path, plan: dict[str, Any]) -> None:
  """Notes what is being made in the folder, or that it is the same as before."""
  path = folder / arrays_lib.PLAN
  if path.is_file():
    old = json.loads(path.read_text())
    changed = [k for k in plan if old.get(k) != plan[k]]
    if changed:
      raise _other(folder, changed[0], old.get(changed[0]), plan[changed[0]])
  elif left := [p.name for p in folder.iterdir() if p.name != LOCK]:
    raise ConfigError(
      f"--output is {str(folder)!r}, which holds other files ({left[0]}); choose an"
      " empty or a new folder."
    )
  write_json(path, plan)


def _other(folder: pathlib.Path, field: str, old: Any, new: Any) -> ConfigError:
  return ConfigError(
    f"--output is {str(folder)!r}, which holds another preparation ({field}: {old!r}"
    f" -> {new!r}); repeat its options, choose another folder, or delete this one."
  )


def _npy_header(dtype: np.dtype, length: int) -> bytes:
  """The first bytes of a .npy file of one axis."""
  fields = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
  text = repr(fields).encode().ljust(_HEADER - 11) + b"\n"
  return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def convert(
  source: str, output: str | os.PathLike, data_dir: str = "", workers: int = 1
) -> pathlib.Path:
  """Rewrites a TFDS data set stored as tfrecord as array_record, or goes on with it.

  Each file becomes one file with the same records in the same order; the description
  of the data set comes last, so nobody reads half of it.

  Args:
    source: tfds:<name>:<version>.
    output: root of the new copy, not `data_dir`.
    data_dir: root of the TFDS data sets to read.
    workers: processes.

  Returns:
    The new folder, <output>/<name>[/<config>]/<version>.

  Raises:
    ConfigError: the data set is not there or not of tfrecord.
    ValueError: a file is damaged, or holds another number of records.
  """
  name = source.removeprefix("tfds:")
  builder = sources_lib.tfds_builder(name, data_dir)
  old = pathlib.Path(builder.data_path)
  folder = pathlib.Path(output) / name.replace(":", "/")
  if folder.resolve() == old.resolve():
    raise ConfigError(
      f"--output is {str(output)!r}, which is --data_dir; choose another."
    )
  if builder.info.file_format.value != "tfrecord":
    raise ConfigError(
      f"--source is {source!r}, stored as {builder.info.file_format.value} in {old};"
      " only tfrecord is converted."
    )
  pieces = [
    p
    for split in builder.info.splits
    for p in pieces_lib.make_pieces(f"tfds:{name}", split, data_dir)
  ]
  folder.mkdir(parents=True, exist_ok=True)
  with lock(folder):
    tasks = [(p, folder / _array_record_name(p.path)) for p in pieces]
    left = [task for task in tasks if not task[1].is_file()]
    done = sum(p.size for p, path in tasks if path.is_file())
    run_units(
      _convert_file, left, [p.size for p, _ in left], done, workers, f"{source} convert"
    )
    for path in old.glob("*.json"):
      if path.name != "dataset_info.json":
        write_json(folder / path.name, json.loads(path.read_text()))
    info = json.loads((old / "dataset_info.json").read_text())
    info["fileFormat"] = "array_record"
    write_json(folder / "dataset_info.json", info)
  return folder


def _array_record_name(path: str) -> str:
  return pathlib.Path(path).name.replace(".tfrecord", ".array_record")


def _convert_file(task: tuple[pieces_lib.Piece, pathlib.Path]) -> dict[str, int]:
  from array_record.python import array_record_module

  piece, path = task
  unfinished = temporary(path)
  # As TFDS writes them: each record by itself, for random access.
  writer = array_record_module.ArrayRecordWriter(str(unfinished), "group_size:1")
  size = 0
  for record in pieces_lib.read_records(piece):
    writer.write(record)
    size += len(record)
  writer.close()
  with unfinished.open("rb+") as file:
    os.fsync(file.fileno())
  unfinished.rename(path)
  return {"documents": piece.stop - piece.start, "bytes": size}
