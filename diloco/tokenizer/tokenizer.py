"""SentencePiece with the special ids of NanoDO: pad 0, EOS 1, BOS 2, unknown 3.

A public model's tokenizer.json can take SentencePiece's place (`json_model.py`).
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

  Some models have other special ids than NanoDO, or lack some: T5's model has no BOS,
  and Llama's has no pad. This class permutes their ids, so that special ids are 0 to 3.
  Models from `python -m diloco train_tokenizer` need no permutation.

  Attributes:
    path: the model file.
    model: the SentencePiece model, or the `JsonModel` of a tokenizer.json.
    sha256: hash of the model, hexadecimal.
    vocab_size: number of ids, special ids included.
    pieces: for each id, the model's own id of the piece, int64 [vocab_size]; -1 for a
      special id that the model lacks.
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
    # Text has no pad, EOS or BOS. If a tokenizer.json finds their pieces in text,
    # `encode` gives the id of unknown text. SentencePiece never finds them.
    in_order = special == (PAD_ID, EOS_ID, BOS_ID, UNK_ID)
    self._same = in_order and not isinstance(m, JsonModel)
    never = [i for i in special[:UNK_ID] if i >= 0]
    self._ours[never] = UNK_ID

  def serialized(self) -> bytes:
    """Returns the bytes of a model file from which this tokenizer can be loaded."""
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
    """Returns the UTF-8 bytes that the first `num_tokens` tokens of `text` represent.

    The number is exact for every model, even if the model normalises text. If a
    character has one token per byte, its bytes count only with the last of its tokens.
    """
    offsets = self.model.encode_as_offset_mapping(text)["offsets"]
    end = offsets[num_tokens][0] if num_tokens < len(offsets) else len(text)
    return len(text[:end].encode("utf-8"))


def _one_role_each(special: tuple[int, ...]) -> tuple[int, ...]:
  """Keeps a piece's first role of EOS, unknown, BOS, pad; later roles become -1.

  In GPT-2 one piece is EOS, BOS and unknown; other models pad with EOS or unknown.
  """
  kept = list(special)
  for i, role in enumerate(order := (EOS_ID, UNK_ID, BOS_ID, PAD_ID)):
    if special[role] in [special[earlier] for earlier in order[:i]]:
      kept[role] = -1
  return tuple(kept)


def _permutation(
  special: tuple[int, ...], pieces: int
) -> tuple[np.ndarray, np.ndarray]:
  """Makes the maps from the model's piece ids to our ids and back.

  The special pieces get the ids 0 to 3. Ordinary pieces that had these ids get the ids
  that the special pieces left, or new ids at the end. All other pieces keep their ids.

  Args:
    special: the model's ids of pad, EOS, BOS and unknown, all different; -1 for each
      missing id.
    pieces: number of pieces in the model.

  Returns:
    our id of each piece of the model: int64 [pieces].
    the model's piece for each of our ids: int64 [pieces + missing special ids]; -1 for
      a special id that the model lacks.
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
  """Loads a tokenizer file (.model or .json), or a shipped tokenizer by its name.

  Raises:
    ConfigError: the file is missing, or is not a SentencePiece model or tokenizer.json.
  """
  is_path = name.endswith((".model", ".json"))
  path = local_path(name, "data.tokenizer") if is_path else _SHIPPED / f"{name}.model"
  if not os.path.isfile(path):  # Also False if permission is missing.
    shipped = ", ".join(sorted(p.stem for p in _SHIPPED.glob("*.model")))
    raise ConfigError(
      f"data.tokenizer is {name!r}, but there is no file {path}; give a SentencePiece"
      " .model (`python -m diloco train_tokenizer --source=<source> --output=<path>`"
      f" trains one), a tokenizer.json, one of: {shipped}, or nothing if data.source is"
      " arrays."
    )
  return Tokenizer(path) if is_path else _shipped(path)


# Loads a shipped file only once, because it never changes, for all runs of a sweep.
_shipped = functools.cache(Tokenizer)


def _load(path: pathlib.Path) -> Any:
  """Reads a SentencePiece model, or a tokenizer.json with SentencePiece's methods.

  Raises:
    ConfigError: the file cannot be read, or is not a model of these two kinds.
  """
  import sentencepiece  # Imported late: most configs need no tokenizer.

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
