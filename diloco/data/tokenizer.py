"""SentencePiece with NanoDO's ids: pad 0, eos 1, bos 2, unk 3."""

import hashlib
import pathlib
from collections.abc import Sequence

import sentencepiece

from diloco.config import ConfigError

PAD_ID, EOS_ID, BOS_ID, UNK_ID = range(4)
_SHIPPED = pathlib.Path(__file__).parent / "tokenizers"


class Tokenizer:
  """Text to ids and back.

  Attributes:
    sha256: of the model file, in hexadecimal.
  """

  def __init__(self, path: pathlib.Path):
    proto = path.read_bytes()
    self.sha256 = hashlib.sha256(proto).hexdigest()
    try:
      self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    except RuntimeError as error:
      raise ConfigError(
        f"data.tokenizer is {str(path)!r}, which is no SentencePiece model; give a"
        " file that scripts/train_tokenizer.py or SentencePiece wrote."
      ) from error
    m = self._model
    ids = (m.pad_id(), m.eos_id(), m.bos_id(), m.unk_id())
    if ids != (PAD_ID, EOS_ID, BOS_ID, UNK_ID):
      raise ConfigError(
        f"data.tokenizer is {str(path)!r}, whose ids of pad, eos, bos, unk are {ids};"
        " train one with 0, 1, 2, 3, see scripts/train_tokenizer.py."
      )

  @property
  def vocab_size(self) -> int:
    """Pieces, special ones included."""
    return self._model.get_piece_size()

  def encode(self, text: str) -> list[int]:
    """Ids of a text, without BOS and EOS."""
    return self._model.encode(text)

  def decode(self, ids: Sequence[int]) -> str:
    """The text of ids; special ones vanish."""
    return self._model.decode([int(i) for i in ids])

  def prefix_bytes(self, text: str, num_tokens: int) -> int:
    """UTF-8 bytes of `text` for which its first tokens stand.

    Exact for every model, normalising ones too. A character that is several tokens,
    one for each byte, counts when its last one is in.
    """
    offsets = self._model.encode_as_offset_mapping(text)["offsets"]
    end = offsets[num_tokens][0] if num_tokens < len(offsets) else len(text)
    return len(text[:end].encode("utf-8"))


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
      f" SentencePiece .model or one of: {shipped}."
    )
  return Tokenizer(path)
