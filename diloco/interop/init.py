"""Reads the parameters with which a run starts, from the folder of init.checkpoint."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding

from diloco.config import Config, complete
from diloco.data import Tokenizer, load_tokenizer
from diloco.errors import ConfigError
from diloco.interop import hf, load
from diloco.interop.public_model import CONFIG, fields_of, read_json
from diloco.mesh import sharding
from diloco.spec import shapes
from diloco.spec.fields import ModelConfig
from diloco.tokenizer.tokenizer_json import convert
from diloco.util.command import one_line, optional

# Fields of ModelConfig that say how to compute, and not what the parameters are.
_FREE = {"z_loss", "dtype", "param_dtype", "remat", "attention", "loss_chunk"}
_FREE |= {"segment_masks"}


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
  optional("safetensors", "init.checkpoint needs", "export")
  folder = pathlib.Path(c.init.checkpoint).expanduser()
  tokenizer = load_tokenizer(c.data.tokenizer)
  described = read_json(folder / CONFIG)
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
    _check(c, _exported(described, folder))
    _check_tokenizer(tokenizer, folder)
    tensors = _read_export(c.model, folder)
  found = {}
  for name, x in tensors:
    path = tuple(name.split("."))
    spec = sharding.weight_spec(path, x.shape, mesh.shape[sharding.FSDP])
    found[path] = sharding.place(x, NamedSharding(mesh, spec))
  return traverse_util.unflatten_dict(found)


def _check(c: Config, fields: dict[str, Any]) -> None:
  """Names the first field in which the config differs from the folder."""
  own = _sizes(c.model)
  for field, value in fields.items():
    if own[field] != value:
      raise ConfigError(
        f"model.{field} is {own[field]}, but init.checkpoint is {c.init.checkpoint!r},"
        f" which has {value}; set model.{field}={value}."
      )


def _exported(described: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
  """Returns the fields of the model of an export."""
  try:
    m = complete(described["config"]).model
  except (KeyError, TypeError, AttributeError, ConfigError) as error:
    raise ConfigError(
      f"init.checkpoint is {str(folder)!r}, whose {CONFIG} is none of diloco export"
      f" ({one_line(error)}); export again."
    ) from error
  free = _FREE | ({"seq_len"} if m.name == "qwen3" else set())
  return {field: value for field, value in _sizes(m).items() if field not in free}


def _sizes(m: ModelConfig) -> dict[str, Any]:
  """Returns all fields; those that follow from others have their values."""
  return dataclasses.asdict(m) | {"num_kv_heads": m.kv_heads, "head_dim": m.head_size}


def _read_export(
  m: ModelConfig, folder: pathlib.Path
) -> Iterator[tuple[str, np.ndarray]]:
  from safetensors import safe_open

  where = f"init.checkpoint is {str(folder)!r}, whose {load.WEIGHTS}"
  try:
    with safe_open(folder / load.WEIGHTS, "np") as file:
      for path, shape in shapes.leaves(shapes.parameters(m)):
        x = file.get_tensor(".".join(path))
        if x.shape != shape:
          raise ValueError(f"{'.'.join(path)} has shape {x.shape}")
        yield ".".join(path), x.astype(m.param_dtype)
  except Exception as error:  # safetensors has an exception of its own.
    raise ConfigError(
      f"{where} cannot be read ({one_line(error)}); export again."
    ) from error


def _check_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
  """Refuses another tokenizer than that of an export."""
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
  theirs, ours = read_json(path), convert(tokenizer)[path.name]
  if _pieces(theirs) != _pieces(ours):
    raise ConfigError(
      f"data.tokenizer is {str(tokenizer.path)!r}, but init.checkpoint has another"
      f" vocabulary; set data.tokenizer={path}."
    )


def _pieces(content: dict[str, Any]) -> Any:
  vocabulary = content["model"]["vocab"]
  return vocabulary if isinstance(vocabulary, dict) else [x[0] for x in vocabulary]
