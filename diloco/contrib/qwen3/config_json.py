"""Reads and writes the config.json of transformers' Qwen3ForCausalLM. No JAX."""

import pathlib

from diloco.contrib.qwen3 import NAME, Qwen3
from diloco.errors import ConfigError
from diloco.spec.fields import ModelConfig
from diloco.util.files import local_path, require_json
from diloco.util.types import Json

CONFIG, ARCHITECTURE = "config.json", "Qwen3ForCausalLM"
# {field: its name in config.json}
NAMES = {
  "model.num_layers": "num_hidden_layers",
  "model.dim": "hidden_size",
  "model.num_heads": "num_attention_heads",
  "qwen3.kv_heads": "num_key_value_heads",
  "qwen3.head_dim": "head_dim",
  "model.ff_dim": "intermediate_size",
  "model.vocab_size": "vocab_size",
  "qwen3.norm_eps": "rms_norm_eps",
  "qwen3.rope_theta": "rope_theta",
  "qwen3.tie_embeddings": "tie_word_embeddings",
}
# Entries of config.json for which only one value is possible here.
FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def describe(m: ModelConfig, dtype: str) -> Json:
  """Returns the config.json of a model, without the ids of special tokens.

  Args:
    dtype: type of the weights.
  """
  q = m.of(Qwen3)
  value = lambda group, name: getattr(q if group == NAME else m, name)
  return {
    "architectures": [ARCHITECTURE],
    "model_type": NAME,
    **{theirs: value(*field.split(".")) for field, theirs in NAMES.items()},
    # Newer versions of transformers read rope_theta from here.
    "rope_parameters": {"rope_type": "default", "rope_theta": q.rope_theta},
    "max_position_embeddings": m.seq_len,
    **FIXED,
    "attention_dropout": 0.0,
    "dtype": dtype,
    "torch_dtype": dtype,
  }


def fields_of(folder: str | pathlib.Path) -> Json:
  """Returns the fields that a folder's config.json fixes, by name.

  Raises:
    ConfigError: config.json is of another architecture, has features that model.name
      qwen3 lacks, or lacks an entry.
  """
  field = "init.checkpoint"
  config = require_json(local_path(folder, field) / CONFIG, field)
  where = f"{field} is {str(folder)!r}, whose {CONFIG}"
  if config.get("model_type") != NAME:
    raise ConfigError(
      f"{where} has model_type {config.get('model_type')!r}; give a folder of {NAME} or"
      " an export of diloco export."
    )
  rope = config.get("rope_parameters") or {}
  config = {"rope_theta": rope.get("rope_theta"), "tie_word_embeddings": False} | config
  scaling = config.get("rope_scaling") or rope
  config["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
  for name, value in (FIXED | {"rope_type": "default"}).items():
    if config.get(name, value) != value:
      raise ConfigError(
        f"{where} has {name} {config[name]!r}, which model.name={NAME} cannot compute;"
        " give another folder."
      )
  lacks = [name for name in NAMES.values() if config.get(name) is None]
  if lacks:
    raise ConfigError(f"{where} lacks {', '.join(lacks)}; download the folder again.")
  config["rope_theta"] = float(config["rope_theta"])
  return {"model.name": NAME} | {ours: config[theirs] for ours, theirs in NAMES.items()}
