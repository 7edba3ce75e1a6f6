"""Trains a SentencePiece unigram model on the training documents of a source.

The model that the sample run uses was made with
  python scripts/train_tokenizer.py --config=configs/sample.py --vocab_size=2048 \
    --output=diloco/data/tokenizers/sotu_2048.model

Text is taken as it is (identity normalisation, line breaks kept) and what no piece
covers falls back to bytes, so every text is representable and comes back exactly.
The result is a function of text and options: one thread, no sampling.
"""

import io
import pathlib

import sentencepiece
from absl import app, flags
from ml_collections import config_flags

from diloco import config as config_lib
from diloco.data import make_source

_CONFIG = config_flags.DEFINE_config_file("config", None, "Names data.source.")
_VOCAB = flags.DEFINE_integer("vocab_size", 32_000, "Pieces, special ones included.")
_OUTPUT = flags.DEFINE_string("output", None, "Path of the .model to write.")
_MAX_BYTES = flags.DEFINE_integer(
  "max_bytes", 100_000_000, "Text to train on, at most."
)


def paragraphs(source, max_bytes: int):
  """Non-empty lines of the source's documents, up to `max_bytes`."""
  total = 0
  for i in range(len(source)):
    for line in source[i].splitlines():
      if line.strip():
        total += len(line.encode("utf-8"))
        if total > max_bytes:
          return
        yield line


def main(argv) -> None:
  del argv
  c = config_lib.resolve(_CONFIG.value)
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=paragraphs(make_source(c, "train"), _MAX_BYTES.value),
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
    num_threads=1,
    minloglevel=1,
  )
  path = pathlib.Path(_OUTPUT.value)
  path.write_bytes(model.getvalue())
  print(f"{path}: {_VOCAB.value} pieces, {len(model.getvalue()):,} bytes")


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "output"])
  app.run(main)
