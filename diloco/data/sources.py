"""Opens a source of documents, with random access.

A source has `len(source)` and `source[i] -> str`. To add a kind of source, add a branch
to `make_source`.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from diloco.data import files as files_lib
from diloco.data import records as records_lib
from diloco.data.text_file import File
from diloco.errors import ConfigError
from diloco.spec.fields import DataConfig
from diloco.util.command import one_line


def make_source(d: DataConfig, split: str) -> "Source":
  """Opens the documents of `config.data.source`.

  Args:
    d: the config's group `data`.
    split: train or eval.

  Raises:
    ConfigError: the source is unknown or its data are missing.
  """
  if d.source.startswith("tfds:"):
    return TfdsText(d, d.train_split if split == "train" else d.eval_split)
  files = files_lib.list_files(d.source)
  for file in files:
    if file.compressed or file.kind == "rows":
      raise ConfigError(
        f"data.source is {d.source!r}, but {file.path.name} can only be read in order;"
        f" run `python -m diloco prepare_data --source={d.source!r}"
        " --split=train,eval --output=<folder>` and set data.source=arrays:<folder>."
      )
  return TextFiles(files, split)


class TextFiles:
  """One split of the documents in text and JSON-lines files.

  Needs 36 bytes of memory for each document.
  """

  def __init__(self, files: Sequence[File], split: str):
    self._files = files
    with files_lib.reading():
      scans = files_lib.scan(files, split)
    self._offsets = np.concatenate([rows["offset"] for rows in scans])
    self._places = np.repeat(np.arange(len(files), dtype=np.int32), [*map(len, scans)])

  def __len__(self) -> int:
    return len(self._places)

  def __getitem__(self, index: int) -> str:
    with files_lib.reading():
      return self._files[self._places[index]].document(int(self._offsets[index]))


class TfdsText:
  """The feature `text` of a TFDS data set stored as array_record."""

  def __init__(self, d: DataConfig, split: str):
    builder = tfds_builder(d.source, d.data_dir)
    if builder.info.file_format.value != "array_record":
      raise ConfigError(
        f"data.source is {d.source!r}, stored as {builder.info.file_format.value}, but"
        " random access needs array_record; prepare arrays (python -m diloco"
        " prepare_data), or convert it (tfds convert_format, which needs TensorFlow)."
      )
    tfds_split(builder, split)
    self._name = f"The split {split} of {builder.data_path}"
    # Takes the serialised records; TFDS itself would decode all features.
    self._records = builder.as_data_source(split=split).data_source

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> str:
    try:
      return records_lib.example_text(self._records[index])
    except (IndexError, RuntimeError, ValueError) as error:
      raise ConfigError(
        f"{self._name} cannot be read at document {index} ({error}); fetch the data set"
        " again."
      ) from error


Source: TypeAlias = TextFiles | TfdsText


def tfds_builder(source: str, data_dir: str) -> Any:
  """Opens <data_dir>/<name>[/<config>]/<version> as a read-only TFDS builder.

  TFDS reads only the files in this folder, so no builder class has to be registered.

  Args:
    source: tfds:<name>[/<config>]:<version>.
    data_dir: root folder of TFDS data sets; empty: TFDS's default folder.

  Raises:
    ConfigError: the data set is missing or has no feature `text`.
  """
  import tensorflow_datasets as tfds  # Slow to import.
  from etils import epath  # Also reads gs:// paths.

  dataset = source.removeprefix("tfds:")
  root = epath.Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()
  folder = root / dataset.replace(":", "/")
  try:
    is_there = (folder / "dataset_info.json").exists()
  except ImportError as error:
    raise ConfigError(
      f"data.data_dir is {data_dir!r}, which needs another package"
      f" ({one_line(error)}): pip install gcsfs for gs://, s3fs for s3://."
    ) from error
  if not is_there:
    raise ConfigError(
      f"data.source is {source!r}, but {folder}/dataset_info.json does not exist; name"
      " a version as in tfds:c4/en:3.1.0, set data.data_dir, or prepare the data set:"
      f" `tfds build {dataset} --file_format=array_record --data_dir={root}`."
    )
  try:
    builder = tfds.builder_from_directory(folder)
    features = list(builder.info.features)
  except Exception as error:  # TFDS raises many types of errors.
    raise ConfigError(
      f"data.source is {source!r}, but TFDS cannot read the description in {folder}"
      f" ({one_line(error)}); fetch or prepare the data set again."
    ) from error
  if "text" not in features:
    raise ConfigError(
      f"data.source is {source!r}, which has no feature `text` but"
      f" {', '.join(features)}; choose a data set of texts."
    )
  return builder


def refuse_shared(source: str, data_dir: str, train: str, held_out: str) -> None:
  """Refuses two splits or slices of a TFDS data set that share documents.

  Args:
    source: a data.source; only TFDS data sets have slices.
    data_dir: root folder of TFDS data sets.

  Raises:
    ConfigError: they share a document, or one of them does not exist or is empty.
  """
  if not source.startswith("tfds:"):
    return
  builder = tfds_builder(source, data_dir)
  trained = tfds_records(builder, train)
  for file, start, stop in tfds_records(builder, held_out):
    if any(file == f and start < b and a < stop for f, a, b in trained):
      raise ConfigError(
        f"{train!r} and {held_out!r} share documents of {builder.data_path}; set"
        " data.train_split and data.eval_split (or --split) to parts that do not, such"
        " as train[:99%] and train[99%:]."
      )


def tfds_records(builder: Any, split: str) -> list[tuple[str, int, int]]:
  """Returns (path, first record, record after the last) of each file of a split."""
  files = tfds_split(builder, split).file_instructions
  return [(f.filename, f.skip, f.skip + f.take) for f in files]


def tfds_split(builder: Any, split: str) -> Any:
  """Returns TFDS's SplitInfo of a split, or of a slice such as train[:99%].

  Raises:
    ConfigError: the split does not exist or is empty.
  """
  splits = builder.info.splits
  try:
    split_info = splits[split]
  except (KeyError, ValueError):
    split_info = None
  if not split_info or not split_info.num_examples:
    raise ConfigError(
      f"{builder.data_path} has no documents in the split {split!r}; set"
      f" data.train_split and data.eval_split (or --split) to {' or '.join(splits)}, or"
      " to slices such as train[:99%]."
    )
  return split_info
