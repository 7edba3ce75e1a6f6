"""Reads the parameters with which a run starts, from the folder of init.checkpoint."""

import pathlib
from typing import Any

from jax.sharding import Mesh

from diloco.config import Config
from diloco.data import Tokenizer, load_tokenizer
from diloco.errors import ConfigError
from diloco.interop import hf, load
from diloco.interop.public_model import CONFIG, fields_of, read_json, sizes_of
from diloco.spec.fields import ModelConfig
from diloco.tokenizer.tokenizer_json import convert
from diloco.util.files import local_path

# Fields of ModelConfig that say how to compute, and not what the parameters are.
_FREE = {"z_loss", "dtype", "param_dtype", "remat", "attention", "loss_chunk"}
_FREE |= {"segment_masks", "unroll"}


def first_params(c: Config, mesh: Mesh) -> Any:
  """Reads init.checkpoint, one tensor after another.

  Args:
    mesh: replica x fsdp.

  Returns:
    One replica's parameters in model.param_dtype, sharded over fsdp; None if
    init.checkpoint is empty.

  Raises:
    ConfigError: the folder holds another model, is damaged, or safetensors is missing.
  """
  if not c.init.checkpoint:
    return None
  folder = local_path(c.init.checkpoint, "init.checkpoint")
  tokenizer = load_tokenizer(c.data.tokenizer)
  described = read_json(folder / CONFIG, "init.checkpoint")
  if "model_type" in described:
    _check(c, fields_of(folder))
    longest = described.get("max_position_embeddings", c.model.seq_len)
    if c.model.seq_len > longest:
      raise ConfigError(
        f"model.seq_len is {c.model.seq_len}, but init.checkpoint is {str(folder)!r},"
        f" which has {longest} positions; set model.seq_len={longest} or less."
      )
    _check_vocabulary(tokenizer, folder)
    tensors = hf.read(c.model, tokenizer, folder, c.model.param_dtype)
  else:
    _, exported = load.export_config(folder, "init.checkpoint")
    _check(c, _fixed(exported.model))
    _check_tokenizer(tokenizer, folder)
    tensors = load.export_tensors(c.model, folder, "init.checkpoint")
  own = ((name, x.astype(c.model.param_dtype, copy=False)) for name, x in tensors)
  return load.place(own, mesh)


def _check(c: Config, fields: dict[str, Any]) -> None:
  """Names the first field in which the config differs from the folder."""
  own = sizes_of(c.model)
  for field, value in fields.items():
    if own[field] != value:
      raise ConfigError(
        f"model.{field} is {own[field]}, but init.checkpoint is {c.init.checkpoint!r},"
        f" which has {value}; set model.{field}={value}."
      )


def _fixed(m: ModelConfig) -> dict[str, Any]:
  """Returns the fields of an exported model that say what its parameters are."""
  free = _FREE | ({"seq_len"} if m.name == "qwen3" else set())
  return {field: value for field, value in sizes_of(m).items() if field not in free}


def _check_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
  """Refuses a tokenizer that differs from the one in the folder of an export."""
  own = folder / load.TOKENIZER
  if own.is_file() and load_tokenizer(str(own)).sha256 != tokenizer.sha256:
    raise ConfigError(
      f"data.tokenizer is {str(tokenizer.path)!r}, but init.checkpoint was trained with"
      f" another; set data.tokenizer={own}."
    )


def _check_vocabulary(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
  """Refuses a tokenizer whose pieces are not those of a folder's tokenizer.json."""
  path = folder / "tokenizer.json"
  if not path.is_file():
    return
  theirs = read_json(path, "init.checkpoint")
  ours = convert(tokenizer)[path.name]
  if _pieces(theirs) != _pieces(ours):
    raise ConfigError(
      f"data.tokenizer is {str(tokenizer.path)!r}, but init.checkpoint has another"
      f" vocabulary; set data.tokenizer={path}."
    )


def _pieces(content: dict[str, Any]) -> Any:
  vocabulary = content["model"]["vocab"]
  return vocabulary if isinstance(vocabulary, dict) else [x[0] for x in vocabulary]
