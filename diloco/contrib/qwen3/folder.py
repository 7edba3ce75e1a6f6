"""Reads and writes folders of transformers' Qwen3ForCausalLM.

Our matrices are (in, out) with all layers stacked; matrices of transformers are (out,
in), one per layer. A public model's tokenizer.json has other ids for special tokens
than we have, so the rows of embedding and head are permuted (`rows_of`).
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from diloco.contrib.qwen3.config_json import ARCHITECTURE, CONFIG, describe, fields_of
from diloco.contrib.qwen3.tokenizer_json import convert
from diloco.data import Tokenizer
from diloco.errors import ConfigError
from diloco.interop.load import WEIGHTS, Model, save
from diloco.spec import shapes
from diloco.spec.fields import ModelConfig
from diloco.tokenizer.json_model import JsonModel
from diloco.util.command import one_line, optional
from diloco.util.files import require_json
from diloco.util.types import Json

GENERATION, INDEX = "generation_config.json", f"{WEIGHTS}.index.json"
# {our name: transformers' name}, where {} is the number of the layer.
_THEIRS = {
  "embed.tokens": "model.embed_tokens.weight",
  "embed.head": "lm_head.weight",
  "embed.norm.scale": "model.norm.weight",
  "blocks.attention_norm.scale": "model.layers.{}.input_layernorm.weight",
  "blocks.attention.q": "model.layers.{}.self_attn.q_proj.weight",
  "blocks.attention.k": "model.layers.{}.self_attn.k_proj.weight",
  "blocks.attention.v": "model.layers.{}.self_attn.v_proj.weight",
  "blocks.attention.out": "model.layers.{}.self_attn.o_proj.weight",
  "blocks.attention.q_norm.scale": "model.layers.{}.self_attn.q_norm.weight",
  "blocks.attention.k_norm.scale": "model.layers.{}.self_attn.k_norm.weight",
  "blocks.ff_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
  "blocks.ff.gate": "model.layers.{}.mlp.gate_proj.weight",
  "blocks.ff.up": "model.layers.{}.mlp.up_proj.weight",
  "blocks.ff.down": "model.layers.{}.mlp.down_proj.weight",
}
_TABLES = ("embed.tokens", "embed.head")  # These matrices have one row per token.


def names_of(m: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], list[str]]]:
  """Yields each of our tensors: name, shape, and transformers' names of its layers."""
  for path, shape in shapes.leaves(shapes.parameters(m)):
    name, layers = ".".join(path), range(m.num_layers if path[0] == "blocks" else 1)
    yield name, shape, [_THEIRS[name].format(layer) for layer in layers]


def rows_of(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
  """Returns the row of each of our ids in transformers' embedding: int64 [vocab_size].

  Raises:
    ConfigError: the embedding has fewer rows than the tokenizer has ids.
  """
  if not isinstance(tokenizer.model, JsonModel):
    return np.arange(vocab_size)
  pieces = tokenizer.pieces
  if len(pieces) > vocab_size:
    raise ConfigError(
      f"model.vocab_size is {vocab_size}, but {tokenizer.path} takes {len(pieces)} ids,"
      " with pad, EOS, BOS and unknown; extend the model's embedding."
    )
  rows = np.concatenate([pieces, np.full(vocab_size - len(pieces), -1)])
  rows[rows < 0] = np.setdiff1d(np.arange(vocab_size), pieces)
  return rows


def write(
  model: Model, tokenizer: Tokenizer, folder: pathlib.Path, dtype: str
) -> list[str]:
  """Writes weights, config and tokenizer; returns the names of the files.

  Args:
    folder: an existing folder.
    dtype: type of the weights, float32 or bfloat16.

  Raises:
    ConfigError: the tokenizer cannot be converted to a tokenizer.json.
  """
  m = model.config.model
  rows = rows_of(tokenizer, m.vocab_size)
  files = convert(tokenizer)
  ids = {"pad": shapes.PAD_ID, "eos": shapes.EOS_ID, "bos": shapes.BOS_ID}
  special = {f"{role}_token_id": int(rows[i]) for role, i in ids.items()}
  files[CONFIG] = describe(m, dtype) | special
  files[GENERATION] = {"do_sample": True, "temperature": 0.8, **special}
  tensors, ours = {}, np.argsort(rows)
  flat = traverse_util.flatten_dict(model.params, sep=".")
  for name, _, theirs in names_of(m):
    whole = np.asarray(jax.device_get(flat[name])).astype(dtype)
    whole = whole[ours].T if name in _TABLES else whole  # `x.T` below undoes this `.T`.
    for layer, x in zip(theirs, whole if name.startswith("blocks.") else whole[None]):
      tensors[layer] = np.ascontiguousarray(x.T)
  save(tensors, folder / WEIGHTS, "pt")
  for file, content in files.items():
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (folder / file).write_text(text + "\n", encoding="utf-8")
  return [WEIGHTS, *sorted(files)]


def read(
  m: ModelConfig, tokenizer: Tokenizer, folder: pathlib.Path
) -> tuple[Json, Iterator[tuple[str, np.ndarray]]]:
  """Reads a folder with model.safetensors, or with an index of several files.

  Returns:
    {field: value} of the fields that its config.json fixes, and an iterator of (our
    name, tensor in m.param_dtype). The iterator works only if m has these values.

  Raises:
    ConfigError: config.json is missing or of another architecture; later, from the
      iterator: a file or a tensor is missing or has another shape, the tokenizer has
      another vocabulary, or safetensors is missing.
  """
  return fields_of(folder), _tensors(m, tokenizer, folder)


def _tensors(
  m: ModelConfig, tokenizer: Tokenizer, folder: pathlib.Path
) -> Iterator[tuple[str, np.ndarray]]:
  safe_open = optional("safetensors", "init.checkpoint needs", "export").safe_open
  where = f"init.checkpoint is {str(folder)!r}"
  config = require_json(folder / CONFIG, "init.checkpoint")
  longest = config.get("max_position_embeddings", m.seq_len)
  if m.seq_len > longest:
    raise ConfigError(
      f"model.seq_len is {m.seq_len}, but {where}, which has {longest} positions; set"
      f" model.seq_len={longest} or less."
    )
  _check_vocabulary(tokenizer, folder)
  rows, expected = rows_of(tokenizer, m.vocab_size), [*names_of(m)]
  public = isinstance(tokenizer.model, JsonModel)
  with contextlib.ExitStack() as stack:
    try:
      opened = [stack.enter_context(safe_open(path, "np")) for path in _files(folder)]
      at = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # Safetensors has its own exception class.
      reason = f"{type(error).__name__}: {one_line(error)}"
      raise ConfigError(
        f"{where}, whose weights cannot be read ({reason}); copy the folder again."
      ) from error
    known = {name for *_, theirs in expected for name in theirs}
    head, table = _THEIRS["embed.head"], _THEIRS["embed.tokens"]
    # A folder may also store a head that is tied to the embedding.
    odd = sorted((known - at.keys()) | (at.keys() - known - {head}))
    if odd:
      state = "lacks" if odd[0] in known else "has in addition"
      raise ConfigError(
        f"{where}, which {state} the tensor {odd[0]}; give the folder of a"
        f" {ARCHITECTURE}."
      )
    if head in at.keys() - known and not np.array_equal(
      at[head].get_tensor(head), at[table].get_tensor(table)
    ):
      raise ConfigError(
        f"{where}, whose {CONFIG} has tie_word_embeddings=true, but {head} is not"
        f" {table}; set it to false there, and qwen3.tie_embeddings=false."
      )
    for name, shape, theirs in expected:
      whole = np.empty(shape, m.param_dtype)
      stacked = whole if name.startswith("blocks.") else whole[None]
      for out, layer in zip(stacked, theirs):
        x = at[layer].get_tensor(layer)
        x = x if name in _TABLES else x.T
        if x.shape != out.shape:
          raise ConfigError(
            f"{where}, whose tensor {layer} has shape {x.shape} instead of {out.shape}"
            f" (or its transpose), unlike its {CONFIG}; copy the folder again."
          )
        out[...] = x[rows] if name in _TABLES else x
      if name in _TABLES and public and tokenizer.pieces[shapes.BOS_ID] < 0:
        # In models without BOS, EOS separates texts. So BOS gets the row of EOS.
        whole[shapes.BOS_ID] = whole[shapes.EOS_ID]
      yield name, whole


def _check_vocabulary(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
  """Refuses a tokenizer whose pieces are not those of a folder's tokenizer.json."""
  path = folder / "tokenizer.json"
  theirs = require_json(path, "init.checkpoint") if path.is_file() else None
  if theirs and _pieces(theirs) != _pieces(convert(tokenizer)[path.name]):
    raise ConfigError(
      f"data.tokenizer is {str(tokenizer.path)!r}, but init.checkpoint has another"
      f" vocabulary; set data.tokenizer={path}."
    )


def _pieces(content: Json) -> Any:
  vocabulary = content["model"]["vocab"]
  return vocabulary if isinstance(vocabulary, dict) else [x[0] for x in vocabulary]


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Lists the weight files."""
  if (folder / WEIGHTS).is_file():
    return [folder / WEIGHTS]
  index = json.loads((folder / INDEX).read_bytes())
  return sorted({folder / name for name in index["weight_map"].values()})
