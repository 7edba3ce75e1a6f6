"""The config.json of a public model: from fields of a config, and to them. No JAX."""

import dataclasses
import json
import pathlib
from typing import Any

from diloco.errors import ConfigError
from diloco.spec.fields import ModelConfig
from diloco.util.command import one_line
from diloco.util.files import local_path

CONFIG = "config.json"
MODEL_TYPE, ARCHITECTURE = "qwen3", "Qwen3ForCausalLM"
# {field of the group `model`: its name in config.json}
NAMES = {
  "num_layers": "num_hidden_layers",
  "dim": "hidden_size",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "ff_dim": "intermediate_size",
  "vocab_size": "vocab_size",
  "norm_eps": "rms_norm_eps",
  "rope_theta": "rope_theta",
  "tie_embeddings": "tie_word_embeddings",
}
# Entries that have only one value here.
FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def sizes_of(m: ModelConfig) -> dict[str, Any]:
  """Returns the fields of a model; those that follow from others have their values."""
  return dataclasses.asdict(m) | {"num_kv_heads": m.kv_heads, "head_dim": m.head_size}


def read_json(path: pathlib.Path, field: str) -> dict[str, Any]:
  """Reads a JSON object of a folder with a model.

  Args:
    field: what names the folder, for error messages.

  Raises:
    ConfigError: there is no such file, or it holds something else.
  """
  try:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
      raise ValueError("it is no JSON object")
    return found
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"{field} is {str(path.parent)!r}, whose {path.name} cannot be read"
      f" ({one_line(error)}); write it again, or give another folder."
    ) from error


def describe(m: ModelConfig, dtype: str) -> dict[str, Any]:
  """Returns the config.json of a model, without the ids of special tokens.

  Args:
    dtype: type of the weights.
  """
  own = sizes_of(m)
  return {
    "architectures": [ARCHITECTURE],
    "model_type": MODEL_TYPE,
    **{theirs: own[ours] for ours, theirs in NAMES.items()},
    # Where newer versions of transformers look for rope_theta.
    "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta},
    "max_position_embeddings": m.seq_len,
    **FIXED,
    "attention_dropout": 0.0,
    "dtype": dtype,
    "torch_dtype": dtype,
  }


def fields_of(folder: str | pathlib.Path) -> dict[str, Any]:
  """Returns the fields of the group `model` that a folder's config.json fixes.

  Raises:
    ConfigError: it is another architecture, or has features that this one has not.
  """
  found = read_json(local_path(folder, "init.checkpoint") / CONFIG, "init.checkpoint")
  where = f"init.checkpoint is {str(folder)!r}, whose {CONFIG}"
  if found.get("model_type") != MODEL_TYPE:
    raise ConfigError(
      f"{where} has model_type {found.get('model_type')!r}; give a folder of"
      f" {MODEL_TYPE} or an export of diloco export."
    )
  rope = found.get("rope_parameters") or {}
  found = {"rope_theta": rope.get("rope_theta"), "tie_word_embeddings": False} | found
  scaling = found.get("rope_scaling") or rope
  found["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
  for name, value in (FIXED | {"rope_type": "default"}).items():
    if found.get(name, value) != value:
      raise ConfigError(
        f"{where} has {name} {found[name]!r}, which model.name={MODEL_TYPE} cannot"
        " compute; give another folder."
      )
  lacks = [name for name in NAMES.values() if found.get(name) is None]
  if lacks:
    raise ConfigError(f"{where} lacks {', '.join(lacks)}; download the folder again.")
  fields = {ours: found[theirs] for ours, theirs in NAMES.items()}
  fields["rope_theta"] = float(fields["rope_theta"])
  return {"name": MODEL_TYPE, **fields}
