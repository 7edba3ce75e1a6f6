"""The special tokens of public tokenizers: which pieces have which roles, and where.

The vocabularies are made here: each byte, and special tokens at the place and in the
order that the public model has.
"""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.tokenizer.tokenizer import load_tokenizer

ROLES = ("pad", "eos", "bos", "unk")
END = "<|endoftext|>"
# {model: (special tokens before the bytes, after the bytes, {role: token})}
LAYOUTS = {
  "gpt2": ([], [END], {"eos": END, "bos": END, "unk": END}),
  "pythia": ([END, "<|padding|>"], [], {"eos": END, "bos": END, "unk": END}),
  "llama3": ([], ["<|begin|>", "<|end|>"], {"eos": "<|end|>", "bos": "<|begin|>"}),
  "smollm2": (
    [END, "<|im_start|>", "<|im_end|>"],
    [],
    {"eos": "<|im_end|>", "bos": "<|im_start|>", "unk": END, "pad": "<|im_end|>"},
  ),
  "qwen": ([], [END, "<|im_end|>"], {"eos": "<|im_end|>", "pad": END}),
  "qwen base": ([], [END, "<|im_end|>"], {"eos": END, "pad": END}),
  "gemma": (
    ["<pad>", "<eos>", "<bos>", "<unk>"],
    [],
    {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"},
  ),
  "bos is pad": (["<s>"], ["</s>"], {"eos": "</s>", "bos": "<s>", "pad": "<s>"}),
  "pads with text": ([], [END], {"eos": END, "bos": END, "pad": "!"}),
}


def make(folder, before, after, roles):
  """Writes a tokenizer.json of bytes and special tokens, as public models have it."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocab = {piece: i for i, piece in enumerate([*before, *alphabet, *after])}
  unk = {"unk_token": roles["unk"]} if "unk" in roles else {}
  model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], **unk))
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  model.add_special_tokens([*before, *after])
  model.save(str(folder / "tokenizer.json"))
  about = {f"{role}_token": roles.get(role) for role in ROLES}
  (folder / "tokenizer_config.json").write_text(json.dumps(about))
  return load_tokenizer(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=LAYOUTS)
def tokenizer(request, tmp_path_factory):
  return make(tmp_path_factory.mktemp("layout"), *LAYOUTS[request.param])


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8")))
def test_every_text_comes_back(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode([2, *ids, 1, 0]) == text
  assert all(3 < i < tokenizer.vocab_size for i in ids)


def test_every_ordinary_piece_keeps_an_id_of_its_own(tokenizer):
  text = "".join(map(chr, range(32, 127)))
  assert len(set(tokenizer.encode(text))) == len(text)
  pieces = tokenizer.pieces[tokenizer.pieces >= 0]
  assert len(set(pieces.tolist())) == len(pieces)


def test_what_is_unknown_is_no_end_of_a_document(tmp_path):
  vocab = {END: 0, "a": 1, "b": 2}
  model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token=END))
  model.decoder = tokenizers.decoders.Fuse()
  model.add_special_tokens([END])
  model.save(str(tmp_path / "tokenizer.json"))
  about = {"eos_token": END, "unk_token": END}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
  tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
  a, unknown, b = tokenizer.encode("a?b")
  assert unknown == 3
  assert min(a, b) > 3
  assert tokenizer.decode([a, unknown, b, 1]) == "ab"


def unigram(folder, special):
  """Writes a Unigram tokenizer.json with the ids 0 to 3 of ours, and byte pieces."""
  pieces = [*special, *(f"<0x{i:02X}>" for i in range(256)), "a", "b"]
  model = tokenizers.models.Unigram([(p, -1.0) for p in pieces], 3, byte_fallback=True)
  model = tokenizers.Tokenizer(model)
  model.add_special_tokens(special)
  model.save(str(folder / "tokenizer.json"))
  about = {f"{role}_token": token for role, token in zip(ROLES, special)}
  (folder / "tokenizer_config.json").write_text(json.dumps(about))
  return load_tokenizer(str(folder / "tokenizer.json"))


def test_names_of_special_tokens_in_text_are_no_special_tokens(tmp_path):
  tokenizer = unigram(tmp_path, ["<pad>", "</s>", "<s>", "<unk>"])
  ids = tokenizer.encode("a<s>b</s>a<pad>b")
  assert min(ids) == 3


def test_bytes_of_unknown_characters_count_with_their_last_token(tmp_path):
  tokenizer = unigram(tmp_path, ["<pad>", "</s>", "<s>", "<unk>"])
  text = "a東京b"
  ends = [tokenizer.prefix_bytes(text, n) for n in range(9)]
  assert ends == [0, 1, 1, 1, 4, 4, 4, 7, 8]


def test_an_end_that_is_text_is_refused(tmp_path):
  with pytest.raises(ConfigError, match=r"no tokenizer_config.json beside it names an"):
    make(tmp_path, [], [], {"eos": "!"})


def test_special_tokens_are_not_guessed(tmp_path):
  make(tmp_path, *LAYOUTS["gemma"])
  (tmp_path / "tokenizer_config.json").unlink()
  with pytest.raises(ConfigError, match=r"names an eos_token .* as in \{\"eos_token"):
    load_tokenizer(str(tmp_path / "tokenizer.json"))
