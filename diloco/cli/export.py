"""Writes a trained model for other programs: safetensors weights and a config.

  python -m diloco export --workdir=runs/sample --output=runs/sample_export
  python -m diloco export --workdir=runs/qwen3 --format=hf --output=runs/qwen3_hf

The folder holds the outer parameters (model.safetensors, float32, names such as
`blocks.attention.q`), a description of the model (config.json) and the tokenizer
(tokenizer.model). diloco generate and diloco.evaluate accept the folder as --workdir,
and `diloco.interop.load.load` returns the same parameters, bit for bit.

With --format=hf, transformers loads the folder as Qwen3ForCausalLM, with its tokenizer;
for model.name=qwen3 only (docs/models.md).
"""

import argparse
import json
import pathlib
import sys

import jax
import numpy as np
from flax import traverse_util

from diloco.data import load_tokenizer
from diloco.errors import ConfigError
from diloco.interop import hf, load
from diloco.interop.public_model import CONFIG
from diloco.model import registry
from diloco.util.command import as_path, guarded, make_folder, model_parser


def export(model: load.Model, output: str | pathlib.Path) -> pathlib.Path:
  """Writes the model's parameters, config and tokenizer.

  Args:
    model: from `diloco.interop.load.load`.
    output: folder to create; if it has an export, the files are replaced.

  Returns:
    The folder.

  Raises:
    ConfigError: the tokenizer or the package safetensors is missing, or the folder is
      a run's.
  """
  folder = make_output(output)
  named = traverse_util.flatten_dict(jax.device_get(model.params), sep=".")
  # safetensors writes the buffer as it lies in memory, so it must be contiguous.
  tensors = {name: np.ascontiguousarray(x) for name, x in named.items()}
  hf.save(tensors, folder / load.WEIGHTS, {"format": "np"})
  described = {
    "step": model.step,
    "architecture": registry.get(model.config.model).DESCRIPTION,
    "config": model.config.to_dict(),
  }
  (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n")
  tokenizer = load_tokenizer(model.config.data.tokenizer)
  (folder / load.TOKENIZER).write_bytes(tokenizer.serialized())
  return folder


def export_hf(
  model: load.Model, output: str | pathlib.Path, dtype: str = "float32"
) -> tuple[pathlib.Path, list[str]]:
  """Writes the model as transformers' Qwen3ForCausalLM, with its tokenizer.

  Returns:
    The folder and the names of its files.

  Raises:
    ConfigError: the architecture or the tokenizer has no counterpart, or as `export`.
  """
  c, folder = model.config, make_output(output)
  tokenizer = load_tokenizer(c.data.tokenizer)
  return folder, hf.write(c.model, model.params, tokenizer, folder, dtype)


def make_output(output: str | pathlib.Path) -> pathlib.Path:
  """Makes the folder of an export.

  Raises:
    ConfigError: nothing can be written there, or the folder is a run's. A run's
      config.json would be lost, and its checkpoints would no longer be found.
  """
  folder = make_folder(output, "--output")
  if (folder / "checkpoints").exists():
    raise ConfigError(f"--output is {str(output)!r}, a run; give another folder.")
  return folder


def run(args: argparse.Namespace) -> None:
  """Exports a model and prints the files."""
  make_output(args.output)  # Loading is slow, so check the folder first.
  if args.dtype != "float32" and args.format != "hf":
    raise ConfigError(f"--dtype is {args.dtype}, which needs --format=hf.")
  model = load.load(args.workdir, args.step)
  if args.format == "hf":
    folder, names = export_hf(model, args.output, args.dtype)
  else:
    folder = export(model, args.output)
    names = [CONFIG, load.WEIGHTS, load.TOKENIZER]
  for name in names:
    print(f"{folder / name}  {(folder / name).stat().st_size:,} bytes")


def main(argv: list[str] | None = None) -> int:
  parser = model_parser("export", __doc__)
  parser.add_argument("--output", type=as_path, required=True, help="folder to write")
  formats = ("diloco", "hf")
  parser.add_argument("--format", choices=formats, default="diloco", help="hf: Qwen3")
  dtypes = ("float32", "bfloat16")
  parser.add_argument("--dtype", choices=dtypes, default="float32", help="for hf")
  return guarded(run, parser.parse_args(argv), mistakes=(ConfigError, OSError))


if __name__ == "__main__":
  sys.exit(main())
