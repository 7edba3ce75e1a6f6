"""Reads the initial parameters of a run from the folder init.checkpoint."""

import os
import pathlib

from jax.sharding import Mesh

from diloco.config import Config
from diloco.config.resolve import leaves
from diloco.data import Tokenizer, load_tokenizer
from diloco.errors import ConfigError
from diloco.interop import load
from diloco.model import registry
from diloco.spec import shapes
from diloco.util import files, remote
from diloco.util.types import PyTree

# Fields of `model` that change how the model is computed, but not its parameters.
_FREE = "z_loss dtype param_dtype remat attention loss_chunk segment_masks unroll"


def first_params(c: Config, mesh: Mesh) -> PyTree:
  """Reads the parameters in init.checkpoint, one tensor after another.

  Args:
    mesh: mesh with the axes replica x fsdp.

  Returns:
    One replica's parameters in model.param_dtype, sharded over fsdp; None if
    init.checkpoint is empty.

  Raises:
    ConfigError: the folder holds another model or tokenizer than the config, the folder
      is damaged, or the package safetensors is missing.
  """
  if not c.init.checkpoint:
    return None
  field = "init.checkpoint"
  folder = remote.local_copy(c.init.checkpoint, field)
  tokenizer, config = load_tokenizer(c.data.tokenizer), folder / load.CONFIG
  read = getattr(registry.get(c.model), "read", None)
  # isfile also returns False if permission is missing.
  known = files.require_json(config, field) if os.path.isfile(config) else {}
  if read and "config" not in known:
    fields, tensors = read(c.model, tokenizer, folder)
  else:
    _, exported = load.export_config(folder, field)
    fields = _fixed(exported)
    _check_tokenizer(tokenizer, folder)
    tensors = load.export_tensors(c.model, folder, field)
  values = leaves(c.to_dict())
  for name, value in fields.items():
    if values[name] != value:
      raise ConfigError(
        f"{name} is {values[name]}, but {field} is {c.init.checkpoint!r}, which has"
        f" {value}; set {name}={value}."
      )
  cast = ((name, x.astype(c.model.param_dtype, copy=False)) for name, x in tensors)
  return load.place(cast, mesh)


def _fixed(c: Config) -> dict[str, object]:
  """Returns the fields of an export's config that define its parameters."""
  free = {f"model.{name}" for name in _FREE.split()}
  if "positions" not in shapes.parameters(c.model)["embed"]:
    free.add("model.seq_len")
  groups = ("model.", f"{c.model.name}.")
  fields = leaves(c.to_dict()).items()
  return {f: x for f, x in fields if f.startswith(groups) and f not in free}


def _check_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
  """Refuses a tokenizer that differs from the one in the folder of an export."""
  exported = folder / load.TOKENIZER
  if exported.is_file() and load_tokenizer(str(exported)).sha256 != tokenizer.sha256:
    raise ConfigError(
      f"data.tokenizer is {str(tokenizer.path)!r}, but init.checkpoint was trained with"
      f" another; set data.tokenizer={exported}."
    )
