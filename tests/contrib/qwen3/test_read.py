"""A start from a folder of transformers, in one file or several."""

import dataclasses
import json
import shutil

import conftest
import jax
import ml_dtypes
import numpy as np
import pytest
import test_folder
from safetensors import numpy as safetensors

from diloco import train
from diloco.cli import export
from diloco.config import resolve
from diloco.contrib.qwen3 import folder as folder_lib
from diloco.contrib.qwen3 import model as qwen3
from diloco.contrib.qwen3.config_json import fields_of
from diloco.errors import ConfigError
from diloco.interop import init as start
from diloco.interop import load
from diloco.log import metrics
from diloco.mesh.devices import make_inference_mesh, make_mesh
from diloco.spec.shapes import BOS_ID


def make_folder(tiny, folder, fields=()):
  """Exports a model that was not trained; sets its sizes in the config."""
  own = {"model.name": "qwen3", "qwen3.kv_heads": 1, "qwen3.head_dim": 8}
  conftest.update(tiny, own | {"qwen3.tie_embeddings": False} | dict(fields))
  c = resolve(tiny)
  params = qwen3.init(c.model, jax.random.key(5))
  model = load.Model(c, 3, params, make_inference_mesh())
  export.export(model, folder, "hf", "bfloat16")
  tiny.init.checkpoint = str(folder)
  return params


def cut(folder):
  """Divides the weights into two files with an index, as large public models have."""
  whole = safetensors.load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  names = sorted(whole)
  index = {}
  for i, part in enumerate((names[::2], names[1::2])):
    file = f"model-{i + 1:05}-of-00002.safetensors"
    safetensors.save_file({n: whole[n] for n in part}, folder / file)
    index |= dict.fromkeys(part, file)
  text = json.dumps({"metadata": {}, "weight_map": index})
  (folder / "model.safetensors.index.json").write_text(text)


def assert_equal(tree, other):
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), dict(tree), other)


def first_params(config):
  c = resolve(config)
  return start.first_params(c, make_mesh(c))


@pytest.mark.parametrize("sharded", [False, True])
def test_bfloat16_weights_of_transformers_are_read(tiny, tmp_path, sharded):
  params = make_folder(tiny, tmp_path)
  if sharded:
    cut(tmp_path)
  rounded = lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)
  assert_equal(first_params(tiny), jax.tree.map(rounded, params))


def test_a_stored_head_that_the_config_ties_must_be_the_embedding(tiny, tmp_path):
  params = make_folder(tiny, tmp_path, {"qwen3.tie_embeddings": True})
  path = tmp_path / "model.safetensors"
  tensors = safetensors.load_file(path)
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
  safetensors.save_file(tensors, path)
  assert first_params(tiny)["embed"].keys() == params["embed"].keys()
  tensors["lm_head.weight"][7, 3] += 1
  safetensors.save_file(tensors, path)
  with pytest.raises(ConfigError, match="word_embeddings=true, but lm_head"):
    first_params(tiny)


@pytest.mark.slow("whole runs")
def test_training_starts_there_and_a_resumed_run_does_not_read_it(tiny, tmp_path):
  tiny.overlap.tau, tiny.checkpoint.keep = 2, 9
  make_folder(tiny, tmp_path / "hf")
  fresh = tiny.copy_and_resolve_references()
  fresh.init.checkpoint = ""
  train.train(tiny, tmp_path / "whole")
  train.train(fresh, tmp_path / "fresh")
  shutil.rmtree(tmp_path / "hf")
  conftest.rewind(tmp_path / "whole", tmp_path / "resumed", 5)
  train.train(tiny, tmp_path / "resumed")
  losses = lambda run: [r["loss"] for r in metrics.read(tmp_path / run)]
  assert losses("whole") == losses("resumed") != losses("fresh")
  whole, resumed = (load.load(tmp_path / run).params for run in ("whole", "resumed"))
  assert_equal(whole, resumed)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"model.num_layers": 2}, r"model.num_layers is 2, but .* has 3; set .*_layers=3"),
    ({"qwen3.kv_heads": 0}, r"qwen3.kv_heads is 2, but .*; set qwen3.kv_heads=1"),
    ({"qwen3.rope_theta": 1e4}, r"rope_theta is 10000.0, but .*rope_theta=1000000.0"),
    ({"model.seq_len": 32}, r"model.seq_len is 32, but .* which has 16 positions"),
    ({"init.checkpoint": "/nowhere"}, r"'/nowhere', whose config.json cannot be read"),
  ],
)
def test_another_architecture_is_told_before_compiling(tiny, tmp_path, fields, message):
  make_folder(tiny, tmp_path)
  conftest.update(tiny, fields)
  with pytest.raises(ConfigError, match=message):
    first_params(tiny)


def test_another_model_learns_which_plug_in_reads_the_folder(tiny, tmp_path):
  make_folder(tiny.copy_and_resolve_references(), tmp_path)
  tiny.init.checkpoint = str(tmp_path)
  message = r"config.json is none of diloco export .*; the plug-in qwen3 has it: set pl"
  with pytest.raises(ConfigError, match=message):
    first_params(tiny)
  with pytest.raises(ConfigError, match=message):
    load.load(tmp_path)


def rewrite(path, **entries):
  path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_folders_that_cannot_be_used_are_explained(tiny, tmp_path):
  make_folder(tiny, tmp_path)
  read = lambda: first_params(tiny)
  weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
  tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
  tokenizer["model"]["vocab"][100][0] = "another"
  text = (tmp_path / "tokenizer.json").read_text()
  (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
  with pytest.raises(ConfigError, match="has another vocabulary; set data"):
    read()
  (tmp_path / "tokenizer.json").write_text(text)
  whole = safetensors.load_file(weights)
  for name, x, message in (
    ("model.norm.weight", None, "which lacks the tensor model.norm.weight"),
    ("a.bias", np.zeros(3), "which has in addition the tensor a.bias"),
    ("lm_head.weight", np.zeros((9, 16)), r"lm_head.weight has shape \(9, 16\) in"),
  ):
    tensors = {n: v for n, v in (whole | {name: x}).items() if v is not None}
    safetensors.save_file(tensors, weights)
    with pytest.raises(ConfigError, match=message):
      read()
  weights.write_bytes(b"cut short")
  with pytest.raises(ConfigError, match=r"weights cannot be read \(.*; copy"):
    read()
  for entry, value, message in (
    ("rope_scaling", {"rope_type": "yarn"}, "has rope_type 'yarn', which model.name"),
    ("attention_bias", True, "has attention_bias True, which model.name=qwen3 cannot"),
    ("head_dim", None, "config.json lacks head_dim"),
    ("model_type", "llama", "has model_type 'llama'; give a folder of qwen3"),
  ):
    before = config.read_text()
    rewrite(config, **{entry: value})
    with pytest.raises(ConfigError, match=message):
      read()
    config.write_text(before)


@pytest.mark.slow("imports PyTorch and transformers")
def test_a_folder_that_transformers_wrote_gives_its_logits(tiny, tmp_path):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  tokenizer = test_folder.public_tokenizer(tmp_path)
  sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
  sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
  theirs = transformers.Qwen3ForCausalLM(
    transformers.Qwen3Config(vocab_size=408, tie_word_embeddings=False, **sizes)
  )
  theirs.save_pretrained(tmp_path, max_shard_size="20KB")
  assert len(list(tmp_path.glob("*.safetensors"))) > 2
  tiny.fragments.size = 1
  conftest.update(tiny, fields_of(tmp_path))
  tiny.init.checkpoint, tiny.data.tokenizer = str(tmp_path), str(tokenizer.path)
  c, params = resolve(tiny), first_params(tiny)
  public = transformers.AutoTokenizer.from_pretrained(tmp_path)
  text = 'Some "quoted", naïve words!'  # Their ids 0 and 1 are ! and ".
  ours, ids = tokenizer.encode(text), public(text).input_ids
  rows = folder_lib.rows_of(tokenizer, 408)
  assert rows[ours].tolist() == ids != ours
  with torch.no_grad():
    expected = theirs(torch.tensor([ids])).logits[0].numpy()
  cache = qwen3.init_cache(dataclasses.replace(c.model, seq_len=64), 1)
  for at, after in enumerate(expected):
    found, _ = qwen3.logits(c.model, params, np.array([ours]), cache, 0, at)
    kept = np.arange(408) != BOS_ID  # A row that the folder does not use.
    np.testing.assert_allclose(found[0][kept], after[rows][kept], rtol=1e-4, atol=1e-4)
