"""Tokenizers of public models: a tokenizer.json, with SentencePiece's methods. No JAX.

Needs the package tokenizers (the extra `hf`). The names of EOS and its like are in
tokenizer_config.json, in the same folder.
"""

import json
import pathlib
from typing import Any

from diloco.errors import ConfigError
from diloco.util.command import optional

ROLES = ("pad_token", "eos_token", "bos_token", "unk_token")
# A copy of the file has the special tokens under this key.
_KEY = "diloco_special_tokens"


class JsonModel:
  """A tokenizer.json, with those methods of a SentencePieceProcessor that we call.

  Attributes:
    special: ids of pad, EOS, BOS and unknown; -1 if missing.
  """

  def __init__(self, path: pathlib.Path):
    """Reads the file.

    Raises:
      ConfigError: the file is damaged, or the package tokenizers is missing.
    """
    needs = f"data.tokenizer is {str(path)!r}, which needs"
    tokenizers = optional("tokenizers", needs, "hf")
    try:
      self._content = json.loads(path.read_bytes())
      content = dict(self._content)
      if _KEY not in content:
        beside = path.with_name("tokenizer_config.json")
        self._content[_KEY] = _special(json.loads(beside.read_bytes()))
      content.pop(_KEY, None)
      self._model = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # tokenizers raises only Exception.
      raise ConfigError(
        f"data.tokenizer is {str(path)!r}, but it or the tokenizer_config.json beside"
        f" it cannot be read ({error}); download both again."
      ) from error
    self._model.encode_special_tokens = True  # The text </s> is no EOS.
    self._model.no_truncation()
    self._model.no_padding()
    found = [self._content[_KEY].get(role) for role in ROLES]
    known = [None if x is None else self._model.token_to_id(x) for x in found]
    ids = [-1 if i is None else i for i in known]
    if ids[0] == ids[1]:
      ids[0] = -1  # Qwen pads with EOS; ours must differ.
    if ids[2] == ids[1]:
      ids[2] = -1
    self.special: tuple[int, ...] = tuple(ids)
    if ids[1] < 0:
      raise ConfigError(
        f"data.tokenizer is {str(path)!r}, whose tokenizer_config.json names no"
        " eos_token of its vocabulary; name one."
      )

  def get_piece_size(self) -> int:
    return max(self._model.get_vocab().values()) + 1

  def encode(self, text: str) -> list[int]:
    return self._model.encode(text, add_special_tokens=False).ids

  def decode(self, ids: list[int]) -> str:
    return self._model.decode(ids)

  def encode_as_offset_mapping(self, text: str) -> dict[str, Any]:
    return {"offsets": self._model.encode(text, add_special_tokens=False).offsets}

  def serialized(self) -> bytes:
    """Returns the file with the special tokens in it."""
    return json.dumps(self._content, ensure_ascii=False).encode()

  def files(self) -> dict[str, dict[str, Any]]:
    """Returns {file name: JSON} of the files that transformers loads."""
    special = self._content[_KEY]
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    whole = {name: x for name, x in self._content.items() if name != _KEY}
    return {"tokenizer.json": whole, "tokenizer_config.json": about}


def _special(config: dict[str, Any]) -> dict[str, str]:
  """Returns {role: text} from a tokenizer_config.json."""
  found = {role: config.get(role) for role in ROLES}
  text = lambda x: x["content"] if isinstance(x, dict) else x
  return {role: text(x) for role, x in found.items() if x}
