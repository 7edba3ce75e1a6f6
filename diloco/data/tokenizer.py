"""SentencePiece with NanoDO's ids: pad 0, eos 1, bos 2, unk 3, whatever the model's."""

import hashlib
import pathlib
from collections.abc import Sequence

import numpy as np
import sentencepiece

from diloco.config import ConfigError

PAD_ID, EOS_ID, BOS_ID, UNK_ID = range(4)
_SHIPPED = pathlib.Path(__file__).parent / "tokenizers"


class Tokenizer:
  """Text to ids and back.

  A model with other special ids than NanoDO's, or without some of them (T5's has no
  BOS, Llama's no pad), has its ids permuted so that the special ones are 0 to 3;
  `scripts/train_tokenizer.py` makes models that need no permutation.

  Attributes:
    sha256: of the model file, in hexadecimal.
    vocab_size: ids, special ones included.
  """

  def __init__(self, path: pathlib.Path):
    proto = path.read_bytes()
    self.sha256 = hashlib.sha256(proto).hexdigest()
    self._model = sentencepiece.SentencePieceProcessor()
    try:
      self._model.load_from_serialized_proto(proto)
    except RuntimeError as error:
      raise ConfigError(
        f"data.tokenizer is {str(path)!r}, which is no SentencePiece model; give a"
        " file that scripts/train_tokenizer.py or SentencePiece wrote."
      ) from error
    m = self._model
    special = (m.pad_id(), m.eos_id(), m.bos_id(), m.unk_id())
    self._ours, self._theirs = _permutation(special, m.get_piece_size())
    self.vocab_size = len(self._theirs)
    self._same = special == (PAD_ID, EOS_ID, BOS_ID, UNK_ID)

  def serialized(self) -> bytes:
    """The SentencePiece model, as a .model file holds it."""
    return self._model.serialized_model_proto()

  def encode(self, text: str) -> list[int]:
    """Ids of a text, without BOS and EOS."""
    ids = self._model.encode(text)
    return ids if self._same else self._ours[ids].tolist()

  def decode(self, ids: Sequence[int]) -> str:
    """The text of ids; special ones and those beyond the vocabulary vanish."""
    known = [int(i) for i in ids if i < self.vocab_size]
    if not self._same:
      known = [i for i in self._theirs[known].tolist() if i >= 0]
    return self._model.decode(known)

  def prefix_bytes(self, text: str, num_tokens: int) -> int:
    """UTF-8 bytes of `text` for which its first tokens stand.

    Exact for every model, normalising ones too. A character that is several tokens,
    one for each byte, counts when its last one is in.
    """
    offsets = self._model.encode_as_offset_mapping(text)["offsets"]
    end = offsets[num_tokens][0] if num_tokens < len(offsets) else len(text)
    return len(text[:end].encode("utf-8"))


def _permutation(
  special: tuple[int, int, int, int], pieces: int
) -> tuple[np.ndarray, np.ndarray]:
  """Our id of each of the model's pieces, and the model's piece of each of our ids.

  Args:
    special: the model's ids of pad, eos, bos, unk; -1 where it has none.
    pieces: of the model.

  Returns:
    int64 [pieces] and int64 [pieces + missing special ones], where a special id that
    the model lacks has the piece -1. Pieces that stood on 0 to 3 move to the places
    that the special ones left, others stay.
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
  """A tokenizer by path to a .model, or by the name of one in this package.

  Raises:
    ConfigError: there is no such model.
  """
  path = pathlib.Path(name)
  if not name.endswith(".model"):
    path = _SHIPPED / f"{name}.model"
  if not path.is_file():
    shipped = ", ".join(sorted(p.stem for p in _SHIPPED.glob("*.model")))
    raise ConfigError(
      f"data.tokenizer is {name!r}, but there is no file {path}; give the path of a"
      " SentencePiece .model (`python scripts/train_tokenizer.py --source=<source>"
      f" --output={name.removesuffix('.model')}.model` trains one) or one of:"
      f" {shipped}."
    )
  return Tokenizer(path)
