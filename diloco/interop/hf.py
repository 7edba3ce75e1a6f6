"""Folders of transformers' Qwen3ForCausalLM: names, sizes, reading and writing.

Our matrices are (in, out) with all layers stacked; theirs are (out, in), one by one. A
tokenizer.json of a public model has its special tokens elsewhere than ours, so the rows
of embedding and head are permuted (`rows_of`).
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from diloco.data import Tokenizer
from diloco.errors import ConfigError
from diloco.interop.public_model import ARCHITECTURE, CONFIG, MODEL_TYPE, describe
from diloco.spec import shapes
from diloco.spec.fields import ModelConfig
from diloco.tokenizer.json_model import JsonModel
from diloco.tokenizer.tokenizer_json import convert
from diloco.util.command import one_line, optional

WEIGHTS, GENERATION = "model.safetensors", "generation_config.json"
INDEX = f"{WEIGHTS}.index.json"
# {our name: their name}, where {} is the layer.
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
_TABLES = ("embed.tokens", "embed.head")  # Their rows are tokens.


def names_of(m: ModelConfig) -> Iterator[tuple[str, list[str]]]:
  """Yields our names of all tensors, each with their names of its layers."""
  for path, _ in shapes.leaves(shapes.parameters(m)):
    name = ".".join(path)
    layers = range(m.num_layers if path[0] == "blocks" else 1)
    yield name, [_THEIRS[name].format(layer) for layer in layers]


def rows_of(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
  """Returns their row of the embedding for each of our ids, int64 [vocab_size].

  Raises:
    ConfigError: the embedding has no row for a special id that the tokenizer lacks.
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
  m: ModelConfig,
  params: Any,
  tokenizer: Tokenizer,
  folder: pathlib.Path,
  dtype: str = "float32",
) -> list[str]:
  """Writes weights, config and tokenizer; returns the names of the files.

  Args:
    params: one replica's parameters.
    folder: exists.
    dtype: type of the weights, float32 or bfloat16.

  Raises:
    ConfigError: the architecture or the tokenizer has no counterpart.
  """
  if m.name != MODEL_TYPE:
    raise ConfigError(
      f"--format is hf, but model.name is {m.name}, which transformers does not have;"
      f" train with model.name={MODEL_TYPE}, or export with --format=diloco."
    )
  rows = rows_of(tokenizer, m.vocab_size)
  files = convert(tokenizer)
  special = {
    "pad_token_id": int(rows[shapes.PAD_ID]),
    "eos_token_id": int(rows[shapes.EOS_ID]),
    "bos_token_id": int(rows[shapes.BOS_ID]),
  }
  files[CONFIG] = describe(m, dtype) | special
  files[GENERATION] = {"do_sample": True, "temperature": 0.8, **special}
  tensors = {}
  flat = traverse_util.flatten_dict(params, sep=".")
  for name, theirs in names_of(m):
    whole = np.asarray(jax.device_get(flat[name])).astype(dtype)
    if name in _TABLES:
      by_row = np.empty_like(whole)
      by_row[rows] = whole
      tensors[theirs[0]] = by_row
      continue
    layers = whole if name.startswith("blocks.") else whole[None]
    for layer, x in zip(theirs, layers):
      tensors[layer] = np.ascontiguousarray(x.T)
  save(tensors, folder / WEIGHTS, {"format": "pt"}, "hf")
  for file, content in files.items():
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (folder / file).write_text(text + "\n", encoding="utf-8")
  return [WEIGHTS, *sorted(files)]


def save(
  tensors: dict[str, np.ndarray],
  path: pathlib.Path,
  metadata: dict[str, str],
  extra: str = "export",
) -> None:
  """Writes a safetensors file.

  Args:
    extra: the extra of pyproject.toml that has all that the export needs.

  Raises:
    ConfigError: safetensors is missing, or the disk is full.
  """
  save_file = optional("safetensors.numpy", "exports need", extra).save_file
  try:
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode  # safetensors makes a file that only its owner reads.
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)
  except Exception as error:  # Of safetensors, also around an OSError.
    path.unlink(missing_ok=True)
    raise ConfigError(
      f"--output is {str(path.parent)!r}, where no more can be written"
      f" ({one_line(error)}); make room."
    ) from error


def read(
  m: ModelConfig, tokenizer: Tokenizer, folder: pathlib.Path, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields our names and tensors, one after another.

  Args:
    m: has the fields of `fields_of`.
    folder: with model.safetensors, or with an index of several files.
    dtype: type of the tensors.

  Raises:
    ConfigError: a file or a tensor is missing or has another shape, or safetensors is
      missing.
  """
  safe_open = optional("safetensors", "init.checkpoint needs", "export").safe_open
  where = f"init.checkpoint is {str(folder)!r}"
  rows = rows_of(tokenizer, m.vocab_size)
  public = isinstance(tokenizer.model, JsonModel)
  expected = dict(names_of(m))
  with contextlib.ExitStack() as stack:
    try:
      open_ = lambda file: stack.enter_context(safe_open(folder / file, "np"))
      files = {file: open_(file) for file in _files(folder)}
      at = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors has an exception of its own.
      reason = f"{type(error).__name__}: {one_line(error)}"
      raise ConfigError(
        f"{where}, whose weights cannot be read ({reason}); copy the folder again."
      ) from error
    known = {name for theirs in expected.values() for name in theirs}
    head, table = _THEIRS["embed.head"], _THEIRS["embed.tokens"]
    # A tied head may be stored, too.
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
        f" {table}; set it to false there, and model.tie_embeddings=false."
      )
    for path, shape in shapes.leaves(shapes.parameters(m)):
      name = ".".join(path)
      whole = np.empty(shape, dtype)
      stacked = whole if path[0] == "blocks" else whole[None]
      for out, theirs in zip(stacked, expected[name]):
        x = at[theirs].get_tensor(theirs)
        x = x if path[0] == "embed" else x.T
        if x.shape != out.shape:
          raise ConfigError(
            f"{where}, whose tensor {theirs} has shape {x.shape} instead of {out.shape}"
            f" (or its transpose), unlike its {CONFIG}; copy the folder again."
          )
        out[...] = x[rows] if name in _TABLES else x
      if name in _TABLES and public and tokenizer.pieces[shapes.BOS_ID] < 0:
        # A tokenizer without BOS: EOS, too, separates texts.
        whole[shapes.BOS_ID] = whole[shapes.EOS_ID]
      yield name, whole


def _files(folder: pathlib.Path) -> list[str]:
  """Returns the names of the weight files."""
  if (folder / WEIGHTS).is_file():
    return [WEIGHTS]
  index = json.loads((folder / INDEX).read_bytes())
  return sorted(set(index["weight_map"].values()))
