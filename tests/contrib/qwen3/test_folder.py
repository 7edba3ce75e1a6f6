"""Folders of transformers: weights, sizes, tokenizers, and a start from them."""

import io
import json

import conftest
import jax
import numpy as np
import pytest
import sentencepiece
from jax.sharding import Mesh
from numpy_decoder import moved
from numpy_qwen3 import MODEL
from running import ROOT
from safetensors import numpy as safetensors

from diloco.cli import export
from diloco.config import resolve
from diloco.config.resolve import leaves
from diloco.contrib.qwen3 import Qwen3, folder
from diloco.contrib.qwen3 import model as qwen3
from diloco.contrib.qwen3.tokenizer_json import convert
from diloco.data import load_tokenizer
from diloco.data.sources import make_source
from diloco.errors import ConfigError
from diloco.interop import load
from diloco.model import sampling
from diloco.spec.fields import DataConfig
from diloco.spec.shapes import BOS_ID, UNK_ID


def make_model(tiny, fields=()) -> load.Model:
  """A model that was not trained; norms away from one."""
  own = {f"qwen3.{k}": v for k, v in vars(MODEL.of(Qwen3)).items()}
  own |= {f"model.{k}": v for k, v in vars(MODEL).items() if k != "extensions"}
  own |= {"model.vocab_size": 0, "model.seq_len": 64}
  conftest.update(tiny, own | dict(fields))
  c = resolve(tiny)
  params = moved(qwen3.init(c.model, jax.random.key(0)), 0.1)
  mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("replica", "fsdp"))
  return load.Model(c, 7, params, mesh)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_names_shapes_and_values_are_those_of_transformers(tiny, tmp_path, dtype):
  model = make_model(tiny, {"qwen3.tie_embeddings": False})
  paths = export.export(model, tmp_path, "hf", dtype)
  assert sorted(tmp_path.iterdir()) == sorted(paths)
  found = safetensors.load_file(tmp_path / "model.safetensors")
  m, blocks = model.config.model, model.params["blocks"]
  assert len(found) == 3 + 11 * m.num_layers
  assert {x.dtype.name for x in found.values()} == {dtype}
  q = found["model.layers.1.self_attn.q_proj.weight"]
  assert q.shape == (m.num_heads * 6, m.dim)
  np.testing.assert_array_equal(q, blocks["attention"]["q"][1].T.astype(dtype))
  norm = found["model.layers.2.post_attention_layernorm.weight"]
  np.testing.assert_array_equal(norm, blocks["ff_norm"]["scale"][2].astype(dtype))
  head = found["lm_head.weight"]
  np.testing.assert_array_equal(head, model.params["embed"]["head"].astype(dtype))
  config = json.loads((tmp_path / "config.json").read_text())
  assert config["architectures"] == ["Qwen3ForCausalLM"]
  assert (config["num_key_value_heads"], config["head_dim"]) == (2, 6)


def test_what_was_written_is_read_again(tiny, tmp_path):
  model = make_model(tiny)
  paths = export.export(model, tmp_path, "hf")
  m, tokenizer = model.config.model, load_tokenizer("sotu_2048")
  # Who may read one file may read all.
  assert len({path.stat().st_mode for path in paths}) == 1
  fields, tensors = folder.read(m, tokenizer, tmp_path)
  own = leaves(model.config.to_dict())
  assert fields.items() <= own.items()
  assert len(fields) == 11
  found = dict(tensors)
  np.testing.assert_array_equal(found["embed.tokens"], model.params["embed"]["tokens"])
  down = model.params["blocks"]["ff"]["down"]
  np.testing.assert_array_equal(found["blocks.ff.down"], down)


def trained_tokenizer(folder, **options):
  """Trains a SentencePiece model on one speech."""
  model = io.BytesIO()
  lines = make_source(DataConfig(), "train")[3].splitlines()
  options |= {"vocab_size": 600, "hard_vocab_limit": False, "minloglevel": 2}
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_writer=model, **options
  )
  path = folder / "made.model"
  path.write_bytes(model.getvalue())
  return load_tokenizer(str(path))


SYMBOL = {"user_defined_symbols": ["<a>"]}
IDENTITY = {"normalization_rule_name": "identity"}
TEXTS = (
  *("", " "),
  "  two  spaces \n\n new line\tand tab ",
  "naïve café – “quotes” ½ 漢字 🙂 \u00a0 x",
  "Hello world",
)


@pytest.mark.parametrize(
  "options",
  [
    None,
    {"model_type": "unigram", "byte_fallback": True},
    {"model_type": "bpe", "byte_fallback": True, "split_digits": True},
    {"model_type": "bpe", "pad_id": 3, "user_defined_symbols": ["\n"], **IDENTITY},
    {"model_type": "unigram", "add_dummy_prefix": False, "bos_id": -1},
    {"model_type": "unigram", **IDENTITY},
  ],
  ids=["shipped", "unigram", "bpe", "bpe-pad", "no-bos", "identity"],
)
def test_a_converted_tokenizer_gives_equal_ids(tmp_path, options):
  tokenizers = pytest.importorskip("tokenizers")
  mine = load_tokenizer("sotu_2048")
  if options:
    mine = trained_tokenizer(tmp_path, **options)
  theirs = tokenizers.Tokenizer.from_str(json.dumps(convert(mine)["tokenizer.json"]))
  source = make_source(DataConfig(), "train")
  # Lines, because SentencePiece adds the scores of a whole text in float32: in a long
  # one, the rounding decides between two splits whose scores hardly differ.
  long = [(ROOT / "README.md").read_text(), *(source[i] for i in range(3))]
  texts = [*TEXTS, *(line for text in long for line in text.splitlines())]
  if options and options["model_type"] == "bpe":  # It adds no scores.
    texts += long
  for text in texts:
    ids = mine.encode(text)
    found = theirs.encode(text, add_special_tokens=False).ids
    assert found == ids, text[:80]
    assert theirs.encode(text).ids == [2, *ids]
    if UNK_ID not in ids:  # SentencePiece writes " ⁇ ", tokenizers nothing.
      assert theirs.decode(ids) == mine.decode(ids)


@pytest.mark.parametrize(
  ("options", "reason"),
  [
    ({"model_type": "char"}, "is neither a unigram nor a BPE model"),
    ({"treat_whitespace_as_suffix": True}, "puts spaces at the end of words"),
    ({"model_type": "bpe", **SYMBOL, **IDENTITY}, "is a BPE model with the user-defin"),
    ({"model_type": "unigram", **SYMBOL}, "normalises text except its user-defined s"),
  ],
)
def test_a_tokenizer_that_cannot_be_converted_is_named(tmp_path, options, reason):
  with pytest.raises(ConfigError, match=f"made.model', which {reason}.*, so it cannot"):
    convert(trained_tokenizer(tmp_path, **options))


@pytest.mark.slow("imports PyTorch and transformers")
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_the_same_logits_ids_and_text(tiny, tmp_path, tied):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  model = make_model(tiny, {"qwen3.tie_embeddings": tied})
  export.export(model, tmp_path, "hf")
  theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, output_loading_info=True
  )
  assert type(theirs).__name__ == "Qwen3ForCausalLM"
  assert not any(report.values())
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  mine, m = load_tokenizer("sotu_2048"), model.config.model
  source = make_source(DataConfig(), "train")
  for text in [*TEXTS, *(source[i] for i in range(3))]:
    ids = [BOS_ID, *mine.encode(text)]
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == mine.decode(ids)
    ids = ids[: m.seq_len]
    with torch.no_grad():
      expected = theirs(torch.tensor([ids])).logits[0].numpy()
    x_BxLxD, _ = qwen3.Decoder(m).apply({"params": model.params}, np.array([ids]))
    embed = model.params["embed"]
    found = x_BxLxD[0] @ embed.get("head", embed["tokens"]).T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  special = tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id
  assert special == (0, 1, 2)
  prompt = mine.encode("The state of the union")
  made = sampling.generate(m, model.params, prompt, 12, temperature=0.0)
  out = theirs.generate(
    torch.tensor([[BOS_ID, *prompt]]), max_length=64, do_sample=False, max_new_tokens=12
  )
  assert out[0, 1 + len(prompt) :].tolist() == made


def public_tokenizer(folder, eos="<|end|>"):
  """Trains a tokenizer as Qwen has it: bytes, EOS at the end, no BOS, pad is EOS."""
  tokenizers = pytest.importorskip("tokenizers")
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=400, initial_alphabet=alphabet, show_progress=False
  )
  model.train([str(ROOT / "README.md")], trainer)
  model.add_special_tokens([eos, "<|im_end|>"])
  model.save(str(folder / "tokenizer.json"))
  about = {"eos_token": eos, "pad_token": eos, "bos_token": None}
  (folder / "tokenizer_config.json").write_text(json.dumps(about))
  return load_tokenizer(str(folder / "tokenizer.json"))


def test_the_tokenizer_of_a_public_model_keeps_text_and_counts_bytes(tmp_path):
  mine = public_tokenizer(tmp_path)
  assert mine.vocab_size == 402 + 3  # Neither pad, BOS nor unknown.
  assert mine.pieces[:4].tolist() == [-1, 400, -1, -1]
  copy = tmp_path / "copy.model"
  copy.write_bytes(mine.serialized())
  again = load_tokenizer(str(copy))
  assert again.sha256 == mine.sha256
  for text in TEXTS:
    ids = mine.encode(text)
    assert min(ids, default=4) > 3
    assert again.encode(text) == ids
    assert mine.decode([2, *ids, 1]) == text
    assert mine.prefix_bytes(text, len(ids)) == len(text.encode())
  assert 1 not in mine.encode("text with <|end|> in it")


def test_rows_of_a_public_model_come_back_in_their_order(tiny, tmp_path):
  mine = public_tokenizer(tmp_path)
  tiny.data.tokenizer = str(mine.path)
  fields = {"model.vocab_size": 410, "qwen3.tie_embeddings": False}
  model = make_model(tiny, fields)
  rows = folder.rows_of(mine, 410)
  assert sorted(rows) == list(range(410))
  out = tmp_path / "out"
  export.export(model, out, "hf")
  config = json.loads((out / "config.json").read_text())
  assert (config["eos_token_id"], config["vocab_size"]) == (400, 410)
  theirs = safetensors.load_file(out / "model.safetensors")
  ours = model.params["embed"]
  ids, pieces = np.array([1, 20, 300]), mine.pieces[[1, 20, 300]]
  np.testing.assert_array_equal(theirs["lm_head.weight"][pieces], ours["head"][ids])
  found = dict(folder.read(model.config.model, mine, out)[1])
  kept = np.arange(410) != 2
  np.testing.assert_array_equal(found["embed.tokens"][kept], ours["tokens"][kept])
  np.testing.assert_array_equal(found["embed.tokens"][2], ours["tokens"][1])  # BOS.
  again = load_tokenizer(str(out / "tokenizer.json"))
  assert again.encode("Some text.") == mine.encode("Some text.")
  with pytest.raises(ConfigError, match=r"vocab_size is 402, but .* takes 405 ids"):
    folder.rows_of(mine, 402)
