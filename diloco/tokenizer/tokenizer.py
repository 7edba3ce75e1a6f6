"""SentencePiece with the special ids of NanoDO: pad 0, EOS 1, BOS 2, unknown 3.

A tokenizer.json of a public model serves as well (`diloco.tokenizer.json_model`).
"""

import functools
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from diloco.errors import ConfigError
from diloco.spec.shapes import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from diloco.tokenizer.json_model import JsonModel
from diloco.util.files import local_path

_SHIPPED = pathlib.Path(__file__).parent / "shipped"


class Tokenizer:
  """Converts text to ids and back.

  Some models have other special ids than NanoDO or lack some of them: T5's has no BOS,
  Llama's no pad. The ids of such a model are permuted: its special ids become 0 to 3.
  Models from `python -m diloco train_tokenizer` need no permutation.

  Attributes:
    path: the model file.
    model: the SentencePiece model, or the content of a tokenizer.json.
    sha256: hash of the model, hexadecimal.
    vocab_size: number of ids, special ids included.
    pieces: the model's piece of each id, int64 [vocab_size]; -1 for a special id that
      the model lacks.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path
    m = self.model = _load(path)
    self.sha256 = hashlib.sha256(self.serialized()).hexdigest()
    if isinstance(m, JsonModel):
      special = m.special
    else:
      special = m.pad_id(), m.eos_id(), m.bos_id(), m.unk_id()
    special = _one_role_each(special)
    self._ours, self.pieces = _permutation(special, m.get_piece_size())
    self.vocab_size = len(self.pieces)
    self._same = special == (PAD_ID, EOS_ID, BOS_ID, UNK_ID)
    # Text has no pad, EOS or BOS: in text, the pieces of these mean unknown text.
    never = [i for i in special[:UNK_ID] if i >= 0]
    self._ours[never] = UNK_ID

  def serialized(self) -> bytes:
    """Returns the model as the bytes of a file from which it can be loaded."""
    if isinstance(self.model, JsonModel):
      return self.model.serialized()
    return self.path.read_bytes()

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without BOS and EOS."""
    ids = self.model.encode(text)
    return ids if self._same else self._ours[ids].tolist()

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids. Skips special ids and ids beyond the vocabulary."""
    pieces = self.pieces[[i for i in ids if i < self.vocab_size]]
    return self.model.decode(pieces[pieces >= 0].tolist())

  def prefix_bytes(self, text: str, num_tokens: int) -> int:
    """Returns how many UTF-8 bytes of `text` its first tokens stand for.

    The number is exact for every model, even if the model normalises text. If each byte
    of a character is a token, the last of these tokens counts for the character.
    """
    offsets = self.model.encode_as_offset_mapping(text)["offsets"]
    end = offsets[num_tokens][0] if num_tokens < len(offsets) else len(text)
    return len(text[:end].encode("utf-8"))


def _one_role_each(special: tuple[int, ...]) -> tuple[int, ...]:
  """Keeps the first of a piece's several roles, and sets the other roles to -1.

  In GPT-2 one piece is EOS, BOS and unknown; others pad with EOS or with unknown.
  """
  found = list(special)
  for i, role in enumerate(order := (EOS_ID, UNK_ID, BOS_ID, PAD_ID)):
    if special[role] in [special[earlier] for earlier in order[:i]]:
      found[role] = -1
  return tuple(found)


def _permutation(
  special: tuple[int, ...], pieces: int
) -> tuple[np.ndarray, np.ndarray]:
  """Makes the maps from the model's piece ids to our ids and back.

  The special pieces get the ids 0 to 3. Pieces that had these ids move to the places
  that the special pieces left. All other ids stay.

  Args:
    special: the model's ids of pad, EOS, BOS and unknown; -1 if missing; all others
      differ.
    pieces: number of pieces in the model.

  Returns:
    our id of each piece: int64 [pieces].
    the piece of each of our ids: int64 [pieces + missing special ids]; -1 for a special
      id that the model lacks.
  """
  count = pieces + special.count(-1)
  theirs = np.arange(count)
  theirs[pieces:] = -1
  taken = [i for i in range(len(special)) if i < pieces and i not in special]
  free = [i for i in (*special, *range(pieces, count)) if i >= len(special)]
  theirs[sorted(free)[: len(taken)]] = taken
  theirs[: len(special)] = special
  ours = np.zeros(pieces, np.int64)
  ours[theirs[theirs >= 0]] = np.flatnonzero(theirs >= 0)
  return ours, theirs


def load_tokenizer(name: str) -> Tokenizer:
  """Loads a tokenizer from a path ending in .model or .json, or by its name in diloco.

  Raises:
    ConfigError: there is no such file, or it is not a SentencePiece model.
  """
  own = name.endswith((".model", ".json"))
  path = local_path(name, "data.tokenizer") if own else _SHIPPED / f"{name}.model"
  if not os.path.isfile(path):  # Also False if permission is missing.
    shipped = ", ".join(sorted(p.stem for p in _SHIPPED.glob("*.model")))
    raise ConfigError(
      f"data.tokenizer is {name!r}, but there is no file {path}; give a SentencePiece"
      " .model (`python -m diloco train_tokenizer --source=<source> --output=<path>`"
      f" trains one), a tokenizer.json, one of: {shipped}, or nothing if data.source is"
      " arrays."
    )
  return Tokenizer(path) if own else _shipped(path)


# A sweep asks for it once for each run; the files of the package do not change.
_shipped = functools.cache(Tokenizer)


def _load(path: pathlib.Path) -> Any:
  """Reads a SentencePiece model, or a tokenizer.json with the same methods.

  Raises:
    ConfigError: the file is no such model.
  """
  import sentencepiece  # Most configs need no tokenizer.

  model = sentencepiece.SentencePieceProcessor()
  try:
    content = path.read_bytes()
    if content[:1] == b"{":
      return JsonModel(path)
    model.load_from_serialized_proto(content)
  except OSError as error:
    raise ConfigError(
      f"data.tokenizer is {str(path)!r}, which cannot be read ({error.strerror}); give"
      " yourself the permission, or name another file."
    ) from error
  except RuntimeError as error:
    raise ConfigError(
      f"data.tokenizer is {str(path)!r}, which is not a SentencePiece model; give a"
      " file from python -m diloco train_tokenizer or SentencePiece."
    ) from error
  return model
