"""Converts SentencePiece models to the tokenizer.json of Hugging Face's tokenizers.

Ids are ours: pad 0, EOS 1, BOS 2, unknown 3 (`diloco.tokenizer.tokenizer`). Encoded
text begins with BOS, as in training, unless it is encoded without special tokens. Only
a text that contains the name of a special token, such as `</s>`, gets other ids than
from SentencePiece, because the converted tokenizer reads the name as the special token.

Needs the package tokenizers (the extra `hf`).
"""

import json
import pathlib
from typing import Any

from diloco.errors import ConfigError
from diloco.spec.shapes import BOS_ID, UNK_ID
from diloco.tokenizer.json_model import ROLES, SPECIAL, JsonModel
from diloco.tokenizer.tokenizer import Tokenizer
from diloco.util.command import optional
from diloco.util.types import Json

UNIGRAM, BPE = 1, 2
NORMAL, USER_DEFINED = 1, 4
SPACE = "▁"
# Names of ids 0 to 3 in the order of the ids, for models that lack these tokens.
NAMES = ("<pad>", "</s>", "<s>", "<unk>")


def convert(tokenizer: Tokenizer) -> dict[str, Json]:
  """Returns {file name: JSON} of the tokenizer files that transformers loads.

  Raises:
    ConfigError: the package tokenizers is missing, or has no counterpart to the model's
      algorithm.
  """
  about: Json = {"tokenizer_class": "PreTrainedTokenizerFast"}
  if isinstance(tokenizer.model, JsonModel):
    content = json.loads(tokenizer.serialized())
    about |= content.pop(SPECIAL)
    return {"tokenizer.json": content, "tokenizer_config.json": about}
  lib = optional("tokenizers", "a tokenizer.json needs", "hf")
  # This import needs protobuf, which SentencePiece itself does not need.
  from sentencepiece import sentencepiece_model_pb2

  schema: Any = sentencepiece_model_pb2
  proto = schema.ModelProto.FromString(tokenizer.serialized())
  _check(proto, tokenizer.path)
  pieces: list[Any] = [None if i < 0 else proto.pieces[i] for i in tokenizer.pieces]
  names = [x.piece if x else name for x, name in zip(pieces, NAMES)]
  names += [x.piece for x in pieces[len(NAMES) :]]
  made = lib.Tokenizer(_model(lib.models, proto, pieces, names))
  made.add_special_tokens(names[: len(NAMES)])

  rule, replace, regex = proto.normalizer_spec, lib.normalizers.Replace, lib.Regex
  steps = []
  if rule.precompiled_charsmap:
    steps += [lib.normalizers.Precompiled(rule.precompiled_charsmap)]
  if rule.remove_extra_whitespaces:
    # Not the normalizer `Strip`, because it removes newlines, too.
    steps += [replace(regex(r"\A +| +\z"), ""), replace(regex(" {2,}"), " ")]
  if rule.add_dummy_prefix:
    steps += [lib.normalizers.Prepend(SPACE)]
  steps += [replace(" ", SPACE)]
  made.normalizer = lib.normalizers.Sequence(steps)

  decoders = lib.decoders
  steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
  if rule.add_dummy_prefix:
    steps += [decoders.Strip(" ", 1, 0)]
  made.decoder = decoders.Sequence(steps)

  bos = names[BOS_ID]
  made.post_processor = lib.processors.TemplateProcessing(
    single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, BOS_ID)]
  )
  about |= {"clean_up_tokenization_spaces": False, **dict(zip(ROLES, names))}
  return {"tokenizer.json": json.loads(made.to_str()), "tokenizer_config.json": about}


def _check(proto: Any, path: pathlib.Path) -> None:
  """Refuses a model to which the package tokenizers has no counterpart."""
  trainer, rule = proto.trainer_spec, proto.normalizer_spec
  symbols = [x.piece for x in proto.pieces if x.type == USER_DEFINED]
  reason = ""
  if trainer.model_type not in (UNIGRAM, BPE):
    reason = "is neither a unigram nor a BPE model"
  elif trainer.treat_whitespace_as_suffix:
    reason = "puts spaces at the end of words"
  elif not rule.escape_whitespaces:
    reason = "does not escape spaces"
  elif symbols and rule.precompiled_charsmap:
    reason = f"normalises text except its user-defined symbol {symbols[0]!r}"
  elif trainer.model_type == BPE and max(map(len, symbols), default=1) > 1:
    reason = f"is a BPE model with the user-defined symbol {max(symbols, key=len)!r}"
  if reason:
    raise ConfigError(
      f"data.tokenizer is {str(path)!r}, which {reason}, so it cannot be converted to a"
      " tokenizer.json; export with --format=diloco."
    )


def _model(models: Any, proto: Any, pieces: list[Any], names: list[str]) -> Any:
  """Converts the vocabulary and the algorithm."""
  trainer = proto.trainer_spec
  if trainer.model_type == BPE:
    return models.BPE(
      vocab={name: i for i, name in enumerate(names)},
      merges=_merges(pieces),
      unk_token=names[UNK_ID],
      fuse_unk=True,
      byte_fallback=trainer.byte_fallback,
    )
  best = max((x.score for x in proto.pieces if x.type == NORMAL), default=0.0)
  # SentencePiece gives user-defined symbols this score: they win over other pieces.
  prefer = lambda x: len(x.piece.encode()) * best - 0.1
  scores = [
    0.0 if x is None else prefer(x) if x.type == USER_DEFINED else x.score
    for x in pieces
  ]
  return models.Unigram([*zip(names, scores)], UNK_ID, trainer.byte_fallback)


def _merges(pieces: list[Any]) -> list[tuple[str, str]]:
  """Lists the pairs that BPE joins; pairs that make likelier pieces come first."""
  scores = {x.piece: x.score for x in pieces if x is not None and x.type == NORMAL}
  pairs = [
    (-score, len(piece[:cut]), piece[:cut], piece[cut:])
    for piece, score in scores.items()
    for cut in range(1, len(piece))
    if piece[:cut] in scores and piece[cut:] in scores
  ]
  return [(left, right) for _, _, left, right in sorted(pairs)]
