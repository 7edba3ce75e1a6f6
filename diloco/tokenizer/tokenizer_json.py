"""Converts SentencePiece models to the tokenizer.json of Hugging Face's tokenizers.

Ids are ours: pad 0, EOS 1, BOS 2, unknown 3, as `tokenizer.py` permutes them.
Encoded text begins with BOS, as in training, unless it is encoded without special
tokens. Only a text that has the name of a special token in it, such as `</s>`, gets
other ids than SentencePiece gives: they are special there.
"""

import base64
from typing import Any

from diloco.errors import ConfigError
from diloco.tokenizer.json_model import ROLES, JsonModel
from diloco.tokenizer.tokenizer import Tokenizer

UNIGRAM, BPE = 1, 2
NORMAL, USER_DEFINED = 1, 4
SPACE = "▁"
# Names of ids 0 to 3 in the order of the ids, for models that lack them.
NAMES = ("<pad>", "</s>", "<s>", "<unk>")


def convert(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
  """Returns {file name: JSON} of the tokenizer files that transformers loads.

  Raises:
    ConfigError: tokenizers have no counterpart to the model's algorithm.
  """
  if isinstance(tokenizer.model, JsonModel):
    return tokenizer.model.files()
  # Takes protobuf, which SentencePiece itself does not need.
  from sentencepiece import sentencepiece_model_pb2

  schema: Any = sentencepiece_model_pb2
  proto = schema.ModelProto.FromString(tokenizer.serialized())
  pieces: list[Any] = [None if i < 0 else proto.pieces[i] for i in tokenizer.pieces]
  names = [x.piece if x else name for x, name in zip(pieces, NAMES)]
  names += [x.piece for x in pieces[len(NAMES) :]]
  rule = proto.normalizer_spec
  normalizers: list[dict[str, Any]] = []
  if rule.precompiled_charsmap:
    table = base64.b64encode(rule.precompiled_charsmap).decode()
    normalizers += [{"type": "Precompiled", "precompiled_charsmap": table}]
  if rule.remove_extra_whitespaces:
    normalizers += [_replace({"Regex": r"\A +| +\z"}, "")]  # `Strip` strips newlines.
    normalizers += [_replace({"Regex": " {2,}"}, " ")]
  if rule.add_dummy_prefix:
    normalizers += [{"type": "Prepend", "prepend": SPACE}]
  normalizers += [_replace({"String": " "}, SPACE)]
  decoders = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}]
  decoders += [{"type": "Fuse"}]
  if rule.add_dummy_prefix:
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
  special = dict(zip(ROLES, names))
  whole = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [_added(i, name) for i, name in enumerate(names[: len(NAMES)])],
    "normalizer": {"type": "Sequence", "normalizers": normalizers},
    "pre_tokenizer": None,
    "post_processor": _begin(special["bos_token"]),
    "decoder": {"type": "Sequence", "decoders": decoders},
    "model": _model(proto, pieces, names, tokenizer.path),
  }
  about = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    **special,
  }
  return {"tokenizer.json": whole, "tokenizer_config.json": about}


def _model(proto: Any, pieces: list[Any], names: list[str], path: Any) -> dict:
  """Converts the vocabulary and the algorithm.

  Raises:
    ConfigError: there is no counterpart.
  """
  trainer = proto.trainer_spec
  own = [x.piece for x in proto.pieces if x.type == USER_DEFINED]
  reason = ""
  if trainer.model_type not in (UNIGRAM, BPE):
    reason = "is neither a unigram nor a BPE model"
  elif trainer.treat_whitespace_as_suffix:
    reason = "puts spaces at the end of words"
  elif not proto.normalizer_spec.escape_whitespaces:
    reason = "does not escape spaces"
  elif own and proto.normalizer_spec.precompiled_charsmap:
    reason = f"normalises text except its user-defined symbol {own[0]!r}"
  elif trainer.model_type == BPE and max(map(len, own), default=1) > 1:
    reason = f"is a BPE model with the user-defined symbol {max(own, key=len)!r}"
  if reason:
    raise ConfigError(
      f"data.tokenizer is {str(path)!r}, which {reason}, so it cannot be converted to a"
      " tokenizer.json; export with --format=diloco."
    )
  if trainer.model_type == UNIGRAM:
    best = max((x.score for x in proto.pieces if x.type == NORMAL), default=0.0)
    # SentencePiece prefers user-defined symbols by this score.
    prefer = lambda x: len(x.piece.encode()) * best - 0.1
    scores = [
      0.0 if x is None else prefer(x) if x.type == USER_DEFINED else x.score
      for x in pieces
    ]
    return {
      "type": "Unigram",
      "unk_id": NAMES.index("<unk>"),
      "byte_fallback": trainer.byte_fallback,
      "vocab": [list(pair) for pair in zip(names, scores)],
    }
  return {
    "type": "BPE",
    "dropout": None,
    "unk_token": names[NAMES.index("<unk>")],
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": True,
    "byte_fallback": trainer.byte_fallback,
    "vocab": {name: i for i, name in enumerate(names)},
    "merges": _merges(pieces),
  }


def _merges(pieces: list[Any]) -> list[list[str]]:
  """Lists the pairs that BPE joins; pairs that make likelier pieces come first."""
  scores = {x.piece: x.score for x in pieces if x is not None and x.type == NORMAL}
  found = [
    (-score, len(piece[:cut]), piece[:cut], piece[cut:])
    for piece, score in scores.items()
    for cut in range(1, len(piece))
    if piece[:cut] in scores and piece[cut:] in scores
  ]
  return [[left, right] for _, _, left, right in sorted(found)]


def _begin(bos: str) -> dict[str, Any]:
  """Puts BOS before every text."""
  special = lambda kind: {"SpecialToken": {"id": bos, "type_id": kind}}
  text = lambda name, kind: {"Sequence": {"id": name, "type_id": kind}}
  ids = {"id": bos, "ids": [NAMES.index("<s>")], "tokens": [bos]}
  return {
    "type": "TemplateProcessing",
    "single": [special(0), text("A", 0)],
    "pair": [special(0), text("A", 0), special(1), text("B", 1)],
    "special_tokens": {bos: ids},
  }


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
  return {"type": "Replace", "pattern": pattern, "content": content}


def _added(i: int, name: str) -> dict[str, Any]:
  flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
  return {"id": i, "content": name, **flags, "special": True}
