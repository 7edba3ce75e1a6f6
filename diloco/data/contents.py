"""Makes digests of what a run reads; they recognise its text after files have moved."""

import functools
import json
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from diloco.config import Config
from diloco.config.comparable import HELD_OUT
from diloco.data import files as files_lib
from diloco.data.sources import tfds_builder, tfds_split
from diloco.data.text_file import digest, sample
from diloco.processes.agree import made_with
from diloco.spec.fields import DataConfig
from diloco.spec.plugins import NAMES
from diloco.tokenizer.tokenizer import Tokenizer
from diloco.tokenizer.vocabulary import TOKENIZER, read_manifest, split_folder
from diloco.util.files import write


class Repeated(NamedTuple):
  """The held-out documents that are also training documents ("repeated documents").

  Attributes:
    documents: number of repeated documents.
    of: number of all held-out documents.
    share: bytes of the repeated documents / bytes of all held-out documents.
  """

  documents: int
  of: int
  share: float


def contents(
  c: Config, tokenizer: Tokenizer, held_out: str, test: str = ""
) -> dict[str, str]:
  """Returns {what: digest or version} of all that a run uses besides its config.

  The keys are `data.tokenizer`, `data.source`, the held-out tokens, the test tokens if
  there are any, the files of tasks, and the keys of `made_with`.

  For `data.source`, reads only the size, the beginning and the end of each file; for a
  TFDS data set, reads the sizes in its description. So terabytes take seconds. If only
  the middle of a file changes and its size does not, the digest stays the same.

  Args:
    held_out, test: `EvalSet.digest` of these tokens.

  Raises:
    ConfigError: a file is missing or cannot be read.
  """
  digests = {"data.tokenizer": tokenizer.sha256, HELD_OUT: held_out}
  digests |= {"the test tokens": test} if test else {}
  with files_lib.reading():
    digests["data.source"] = digest(_parts(c.data, c.data.train_split))
  for task in map(str.strip, c.eval.tasks.split(",")):
    path = pathlib.Path(NAMES["eval.tasks"].get(task, task)).expanduser()
    if path.is_file():
      digests[f"the task {task}"] = digest(sample(path))
  return digests | made_with(c)


@functools.cache
def repeated(d: DataConfig) -> Repeated | None:
  """Counts the held-out documents of text files that are also training documents.

  Repeated documents stay, because splitting by content would change the held-out text
  of all existing runs. `File.scan` defines which documents are equal.

  Returns:
    The repeated documents; None for prepared tokens and TFDS data sets.

  Raises:
    ConfigError: a file cannot be read.
  """
  held_out = d.eval_source or d.source
  if any(source.startswith(("arrays:", "tfds:")) for source in (d.source, held_out)):
    return None
  with files_lib.reading():
    train = np.concatenate(files_lib.scan(files_lib.list_files(d.source), "train"))
    held = np.concatenate(files_lib.scan(files_lib.list_files(held_out), "eval"))
  also = np.isin(held["hash"], train["hash"])
  share = held["bytes"][also].sum() / max(held["bytes"].sum(), 1)
  return Repeated(int(also.sum()), len(also), float(share))


def keep_tokenizer(workdir: pathlib.Path, tokenizer: Tokenizer) -> None:
  """Copies the tokenizer into a run's folder; readers of the run use this copy."""
  path, content = workdir / TOKENIZER, tokenizer.serialized()
  if not path.is_file() or path.read_bytes() != content:
    write(path, content)


def _parts(d: DataConfig, split: str) -> Iterable[bytes]:
  """Yields bytes that identify the text of a split, for the function `digest`."""
  if d.source.startswith("tfds:"):
    info = tfds_split(tfds_builder(d.source, d.data_dir), split)
    yield json.dumps([d.source, split, info.shard_lengths, info.num_bytes]).encode()
    return
  if d.source.startswith("arrays:"):
    folder = split_folder(d.source, split)
    manifest = read_manifest(folder)
    yield manifest["tokenizer"]["sha256"].encode()
    for file in manifest["files"]:
      yield from sample(folder / file["file"])
    return
  for text in files_lib.list_files(d.source):
    field = "" if text.field == "text" else f":{text.field}"
    yield f"{text.kind}{field}".encode()
    yield from sample(text.path)
