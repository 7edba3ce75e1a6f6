"""Text in, tokens out: sources, tokenizer, packing, per-replica shards. No JAX."""

from diloco.data.pipeline import (
  EvalSet,
  TrainIterator,
  make_eval_set,
  make_train_iterator,
)
from diloco.data.sources import make_source
from diloco.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
  "EvalSet",
  "Tokenizer",
  "TrainIterator",
  "load_tokenizer",
  "make_eval_set",
  "make_source",
  "make_train_iterator",
]
