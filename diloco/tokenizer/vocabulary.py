"""Sets the tokenizer and the vocabulary size if a config has not set them. No JAX.

Reads the manifest of prepared data (`diloco.data.arrays`) or the tokenizer's file.
"""

import pathlib
from typing import Any

from diloco.errors import ConfigError
from diloco.tokenizer.tokenizer import load_tokenizer
from diloco.util.files import local_path, read_json
from diloco.util.types import Json

MANIFEST, PLAN, TOKENIZER = "manifest.json", "plan.json", "tokenizer.model"
VERSION = 1
_DEFAULT = "sotu_2048"
# Keys and types that a manifest must have. A list here shows the type of all its items.
_CONTENT = {
  "tokenizer": {"name": str, "sha256": str, "vocab_size": int},
  "dtype": str,
  "documents": int,
  "shards": [{"file": str, "tokens": int}],
  "files": [{"file": str, "size": int}],
}


def fill_in(v: Json) -> None:
  """Sets `data.tokenizer` if it is empty, and `model.vocab_size` if it is 0.

  Prepared data use the tokenizer in their folder. Text uses the shipped tokenizer. Only
  an unknown vocabulary size is read: without the data, a dry run and a report work.

  Args:
    v: a config's fields by name; the function changes this dict.

  Raises:
    ConfigError: the prepared data or the tokenizer's file are missing or damaged.
  """
  if v["data.tokenizer"] and v["model.vocab_size"]:
    return
  if v["data.source"].startswith("arrays:"):
    folder = split_folder(v["data.source"], v["data.train_split"])
    v["data.tokenizer"] = v["data.tokenizer"] or str(folder / TOKENIZER)
    if not v["model.vocab_size"]:
      v["model.vocab_size"] = read_manifest(folder)["tokenizer"]["vocab_size"]
  else:
    v["data.tokenizer"] = v["data.tokenizer"] or _DEFAULT
    if not v["model.vocab_size"]:
      v["model.vocab_size"] = load_tokenizer(v["data.tokenizer"]).vocab_size


def check_data(data: Json) -> None:
  """Refuses prepared training data that are not there; `data` is a config's group."""
  if data["source"].startswith("arrays:"):
    read_manifest(split_folder(data["source"], data["train_split"]))


def split_folder(source: str, split: str) -> pathlib.Path:
  """Returns the folder of a split of `arrays:<folder>`.

  The folder has the split's name. If no folder has this name, the function returns the
  folder whose manifest names the split: Dolma's train[:99%] is in the folder train.
  """
  root = local_path(source.removeprefix("arrays:"), "data.source")
  if not (root / split).is_dir():
    for path in sorted(root.glob(f"*/{MANIFEST}")):
      if (read_json(path) or {}).get("split") == split:
        return path.parent
  return root / split


def read_manifest(folder: pathlib.Path) -> Json:
  """Reads the manifest of a finished split.

  Raises:
    ConfigError: the split is missing, not finished, damaged or has another version.
  """
  path = folder / MANIFEST
  if not path.is_file():
    raise ConfigError(_missing(folder))
  manifest = read_json(path) or {}
  if manifest.get("version") != VERSION or not _fits(manifest, _CONTENT):
    raise ConfigError(
      f"data.source is arrays, but {path} is damaged or not of version {VERSION}; copy"
      " the file again, or delete the folder and tokenize again."
    )
  return manifest


def _missing(folder: pathlib.Path) -> str:
  """Explains why a folder has no manifest, and what the user can do."""
  path = folder / MANIFEST
  if (folder.parent / MANIFEST).is_file():
    return (
      f"data.source is arrays:{folder.parent}, which is one split; give"
      f" arrays:{folder.parent.parent}, and set data.train_split and data.eval_split"
      " to the names of its splits."
    )
  state = "is not finished" if (folder / PLAN).is_file() else "does not exist"
  return (
    f"data.source is arrays, but {path} {state}; run `python -m diloco prepare_data"
    " --source=<source> --split=<split> --tokenizer=<tokenizer>"
    f" --output={folder}`, or set data.train_split and data.eval_split to the names of"
    " prepared folders."
  )


def _fits(value: Any, content: Any) -> bool:
  """Returns whether a value from JSON has the keys and types of `content`."""
  if isinstance(content, dict):
    return isinstance(value, dict) and all(
      key in value and _fits(value[key], kind) for key, kind in content.items()
    )
  if isinstance(content, list):
    return isinstance(value, list) and all(_fits(item, content[0]) for item in value)
  return isinstance(value, content)
