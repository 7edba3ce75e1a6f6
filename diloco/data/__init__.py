"""Packs each shard of a text into token sequences. Importing it needs no JAX."""

from diloco.data.pipeline import EvalSet, TrainIterator, make_eval_set
from diloco.data.sources import make_source
from diloco.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = [
  "EvalSet",
  "Tokenizer",
  "TrainIterator",
  "load_tokenizer",
  "make_eval_set",
  "make_source",
]
