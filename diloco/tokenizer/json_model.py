"""Reads a public model's tokenizer.json; gives it SentencePiece's methods. No JAX.

Needs the package tokenizers (the extra `hf`). tokenizer_config.json, in the same
folder, names the special tokens, such as EOS.
"""

import itertools
import json
import pathlib
from typing import Any

from diloco.errors import ConfigError
from diloco.spec.shapes import EOS_ID
from diloco.util.command import optional

ROLES = ("pad_token", "eos_token", "bos_token", "unk_token")
# diloco's copy of a tokenizer.json has the special tokens, too, under this key.
SPECIAL = "diloco_special_tokens"


class JsonModel:
  """A tokenizer.json with the methods of a SentencePieceProcessor that diloco calls.

  Attributes:
    special: ids of pad, EOS, BOS and unknown; -1 for a missing token.
  """

  def __init__(self, path: pathlib.Path):
    """Reads a tokenizer.json.

    Raises:
      ConfigError: a file is damaged, no EOS is named, or the package tokenizers is
        missing.
    """
    needs = f"data.tokenizer is {str(path)!r}, which needs"
    tokenizers = optional("tokenizers", needs, "hf")
    try:
      self._content = json.loads(path.read_bytes())
      self._special = self._content.pop(SPECIAL, None)
      if self._special is None:
        beside = path.with_name("tokenizer_config.json")
        named = beside.is_file()
        self._special = _special(json.loads(beside.read_bytes())) if named else {}
      self._model = tokenizers.Tokenizer.from_str(json.dumps(self._content))
    except Exception as error:  # tokenizers raises only Exception.
      raise ConfigError(
        f"data.tokenizer is {str(path)!r}, but it or the tokenizer_config.json beside"
        f" it cannot be read ({error}); download both again."
      ) from error
    self._model.encode_special_tokens = True  # In text, "</s>" is not EOS.
    self._model.no_truncation()
    self._model.no_padding()
    self.special = tuple(map(self._id, ROLES))
    if self.special[EOS_ID] < 0:
      raise ConfigError(
        f"data.tokenizer is {str(path)!r}, but no tokenizer_config.json beside it names"
        " an eos_token that is a special token of it; name one there, as in"
        ' {"eos_token": "</s>"}.'
      )

  def _id(self, role: str) -> int:
    """Returns the id of the token with a role such as eos_token; -1 if missing."""
    i = self._model.token_to_id(self._special.get(role, ""))
    # Some models pad with an ordinary piece, such as `!`. Such a piece stays text.
    added = self._model.get_added_tokens_decoder().get(i)
    is_text = not (added and added.special)
    return -1 if i is None or (is_text and role != "unk_token") else i

  def get_piece_size(self) -> int:
    return max(self._model.get_vocab().values()) + 1

  def encode(self, text: str) -> list[int]:
    return self._model.encode(text, add_special_tokens=False).ids

  def decode(self, ids: list[int]) -> str:
    return self._model.decode(ids)

  def encode_as_offset_mapping(self, text: str) -> dict[str, Any]:
    offsets = list[tuple[int, int]]()
    spans = self._model.encode(text, add_special_tokens=False).offsets
    for span, tokens in itertools.groupby(spans):
      same = list(tokens)
      # Unknown characters in a row: the tokens of their bytes all have the row's span.
      of_byte = [(i, i + 1) for i in range(*span) for _ in text[i].encode()]
      offsets += of_byte if len(of_byte) == len(same) else same
    return {"offsets": offsets}

  def serialized(self) -> bytes:
    """Returns the bytes of a tokenizer.json that also has the special tokens."""
    whole = {**self._content, SPECIAL: self._special}
    return json.dumps(whole, ensure_ascii=False).encode()


def _special(config: dict[str, Any]) -> dict[str, str]:
  """Returns {role: text} from a tokenizer_config.json."""
  special = {role: config.get(role) for role in ROLES}
  text = lambda x: x["content"] if isinstance(x, dict) else x
  return {role: text(x) for role, x in special.items() if x}
