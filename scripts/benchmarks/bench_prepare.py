"""Measures prepare_data with one and more processes: the table of docs/benchmarks.md.

  python -m diloco train_tokenizer --source=sotu --vocab_size=28000 --output=28k.model
  python scripts/benchmarks/bench_prepare.py --tokenizer=28k.model --folder=/tmp/bench

Makes documents of the mean length of C4 (2.3 kB) from paragraphs of State of the Union
texts, as JSON lines, and as tfrecord with the features of C4 (url, timestamp, ...).
Prepares both formats with every number of processes.
"""

import json
import pathlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import make_standin
from absl import flags
from tensorflow_datasets.proto import tf_example_pb2

from diloco.config import command_line
from diloco.data import make_source
from diloco.data.records import masked_crc32c
from diloco.errors import ConfigError
from diloco.spec.fields import DataConfig
from diloco.util import command

_TOKENIZER = flags.DEFINE_string("tokenizer", "sotu_2048", "Passed to prepare_data.py.")
_FOLDER = flags.DEFINE_string(
  "folder", None, "A new or empty folder, with room for about 4 x --mb."
)
_WORKERS = flags.DEFINE_list("workers", ["1", "2"], "Numbers of processes.")
_MB = flags.DEFINE_integer("mb", 120, "Megabytes of text.", lower_bound=1)

NAME = "c4/en:3.1.0"
FILES = 8  # Number of files of each format.


def documents(size: int, seed: int) -> Iterator[str]:
  """Yields documents of random paragraphs, `size` bytes in all."""
  source, rng = make_source(DataConfig(), "train"), random.Random(seed)
  texts = (source[i] for i in range(len(source)))
  paragraphs = [p for text in texts for p in text.splitlines() if p.strip()]
  while size > 0:
    text, length = "", rng.lognormvariate(7.1, 0.9)
    while len(text) < length:
      text += rng.choice(paragraphs) + "\n"
    size -= len(text.encode())
    yield text


def write_corpus(folder: pathlib.Path, size: int) -> None:
  """Writes the same documents to <folder>/*.jsonl and to a TFDS data set (tfrecord)."""
  standin = make_standin.write(NAME, str(folder / "standin"))
  tfds = folder / "tfrecord" / NAME.replace(":", "/")
  tfds.mkdir(parents=True)
  counts = []
  for i in range(FILES):
    name = f"c4-train.tfrecord-{i:05}-of-{FILES:05}"
    texts = list(documents(size // FILES, seed=i))
    with (folder / f"{i}.jsonl").open("w") as lines, (tfds / name).open("wb") as file:
      for text in texts:
        lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        example = tf_example_pb2.Example()
        for feature in make_standin.FEATURES["c4"]:
          value = text if feature == "text" else "http://example.org"
          example.features.feature[feature].bytes_list.value.append(value.encode())
        record = example.SerializeToString()
        for block in (len(record).to_bytes(8, "little"), record):
          file.write(block + masked_crc32c(block).to_bytes(4, "little"))
    counts.append(str(len(texts)))
  info = json.loads((standin / "dataset_info.json").read_text())
  info["fileFormat"] = "tfrecord"
  info["splits"] = [{**info["splits"][0], "shardLengths": counts}]
  (tfds / "dataset_info.json").write_text(json.dumps(info))
  shutil.copy(standin / "features.json", tfds)


def measure(*args: str) -> tuple[float, float, int]:
  """Prepares data; returns the seconds, CPU seconds and MiB that were printed."""
  argv = [sys.executable, "-m", "diloco.data.prepare.prepare_data", *args]
  run = subprocess.run(argv, capture_output=True, text=True, check=False)
  found = re.search(
    r"; ([\d.]+) s, ([\d.]+) CPU seconds of the workers, (\d+) MiB", run.stdout
  )
  if not found:
    raise ConfigError(f"prepare_data.py failed: {run.stderr.strip()[-500:]}")
  return float(found[1]), float(found[2]), int(found[3])


def main(argv) -> None:
  del argv
  folder = command.make_folder(_FOLDER.value, "--folder")
  if any(folder.iterdir()):
    raise ConfigError(
      f"--folder is {str(folder)!r}, which holds files; choose an empty or a new one."
    )
  write_corpus(folder, _MB.value * 10**6)
  tokens = folder / "tokens/train"
  # (format, source, data_dir)
  ways = (
    ("JSON lines", f"files:{folder}/*.jsonl", ""),
    ("tfrecord", f"tfds:{NAME}", folder / "tfrecord"),
  )
  print(f"{'':<22} processes  seconds  CPU s  MB/s  MB per CPU s  MiB in the largest")
  for workers in _WORKERS.value:
    for way, source, data_dir in ways:
      shutil.rmtree(tokens, ignore_errors=True)
      where = [f"--source={source}", f"--data_dir={data_dir}", f"--output={tokens}"]
      how = [f"--tokenizer={_TOKENIZER.value}", f"--workers={workers}"]
      seconds, cpu, memory = measure(*where, *how)
      print(
        f"{way:<22} {workers:>9} {seconds:>8.1f} {cpu:>6.1f}"
        f" {_MB.value / seconds:>5.1f} {_MB.value / cpu:>13.1f} {memory:>10}",
        flush=True,
      )


if __name__ == "__main__":
  flags.mark_flag_as_required("folder")
  command_line.run(main)
