r"""Prepares data once, with several processes; can go on after an interruption.

Turns text into token arrays, for data.source=arrays:/data/c4_tokens. If --split names
one split, writes it to <output> itself. If --split names two, writes the first to
<output>/train and the second to <output>/validation:
  python -m diloco prepare_data --source=tfds:c4/en:3.1.0 --data_dir=/data \
    --split=train,validation --tokenizer=c4_32k.model --output=/data/c4_tokens
  python -m diloco prepare_data --source='files:/data/c4-train.*.json.gz' \
    --split=all --tokenizer=c4_32k.model --output=/data/c4_tokens/train --workers=16

Source files are text, JSON lines, parquet or Arrow, also compressed (docs/data.md).

After an interruption, start the same command again: finished files stay, and at most
one file per process is made again. If the text has changed since the first start, the
command ends with an error. docs/data.md has the sizes of the arrays, and
docs/benchmarks.md has the speeds of this command.
"""

import argparse
import pathlib
import resource
import sys
import time
from collections.abc import Sequence

from diloco.data.prepare import pieces
from diloco.data.prepare import tokenize as prepare
from diloco.data.sources import refuse_shared
from diloco.errors import ConfigError
from diloco.spec.fields import DataConfig
from diloco.util import command


def _run(args: argparse.Namespace) -> None:
  start = time.perf_counter()
  source, data_dir, workers = args.source, args.data_dir, args.workers
  output = command.make_folder(args.output, "--output")
  lines, unit_size = list[str](), args.unit_mb << 20
  folders = _folders([name.strip() for name in args.split.split(",")], output)
  if len(folders) > 1:  # Finds errors of the second split before hours of work.
    refuse_shared(source, data_dir, *folders)
    pieces.make_pieces(source, [*folders][1], data_dir)
  for split, folder in folders.items():
    made = prepare.tokenize(
      source, split, args.tokenizer, folder, data_dir, workers, unit_size
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


def _folders(splits: list[str], output: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns {split: its folder}; two folders get the names that training looks for."""
  if len(splits) == 1:
    return {splits[0]: output}
  if len(set(splits)) != 2 or "all" in splits or splits[1] == "train":
    raise ConfigError(
      f"--split is {','.join(splits)!r}; give one split, or two that share no document,"
      " first that for training, then that for validation, separated by a comma."
    )
  default = DataConfig()
  return dict(zip(splits, (output / default.train_split, output / default.eval_split)))


def main(argv: Sequence[str] | None = None) -> int:
  parser = command.Parser(prog="python -m diloco prepare_data", description=__doc__)
  add, in_range = parser.add_argument, command.in_range
  folders = "; two, separated by a comma, go to --output's folders train and validation"
  pieces.add_options(parser, folders)
  text = "path of a SentencePiece .model, or name of a shipped one; default sotu_2048"
  add("--tokenizer", default="sotu_2048", help=text)
  add("--output", type=command.as_path, required=True, help="folder to write")
  add("--workers", type=in_range(1), default=1, help="number of processes")
  text = "MiB of the source for each array; default 0: up to 512 arrays"
  add("--unit_mb", type=in_range(0), default=0, help=text)
  return command.guarded(_run, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
