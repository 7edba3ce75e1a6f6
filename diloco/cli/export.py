"""Writes a trained model for other programs: safetensors weights and a config.

  python -m diloco export runs/sample --output=runs/sample_export

The folder holds the outer parameters (model.safetensors, float32, names such as
`blocks.attention.q`), a description of the model (config.json) and the tokenizer
(tokenizer.model). diloco generate and diloco evaluate accept the folder as WORKDIR,
and `diloco.interop.load.load` returns the same parameters, bit for bit.

--format=NAME writes another format, if the plug-in of the model's architecture has one
(docs/models.md).
"""

import argparse
import json
import pathlib
import sys
from typing import Any

import jax
from flax import traverse_util

from diloco.data import Tokenizer, load_tokenizer
from diloco.errors import ConfigError
from diloco.interop import load
from diloco.log.metrics import CONTENTS
from diloco.log.workdir import read_contents
from diloco.model import registry
from diloco.util import files, remote
from diloco.util.command import as_path, guarded, make_folder, model_parser

DILOCO = "diloco"  # The format that every architecture has.


def export(
  model: load.Model,
  output: str | pathlib.Path,
  format: str = DILOCO,
  dtype: str = "float32",
) -> list[pathlib.Path]:
  """Writes the model's parameters, config and tokenizer; returns the files.

  Args:
    model: the result of `diloco.interop.load.load`.
    output: folder to create; if it already holds an export, the files are replaced.
    format: "diloco", or a format of the model's architecture.
    dtype: type of the weights; the format "diloco" allows only float32.

  Raises:
    ConfigError: the architecture has no such format, the tokenizer or the package
      safetensors is missing, or the folder belongs to a run.
  """
  m, tokenizer = model.config.model, load_tokenizer(model.config.data.tokenizer)
  formats = {DILOCO: write} | getattr(registry.get(m), "FORMATS", {})
  if format not in formats:
    known = ", ".join(formats)
    raise ConfigError(
      f"--format is {format!r}, but of an architecture with model.name={m.name} one can"
      f" write {known}; docs/models.md has the architectures that other programs load."
    )
  folder = make_output(output)
  names = formats[format](model, tokenizer, folder, dtype)
  for results in folder.glob("evaluation_*.json"):  # Those of an earlier export.
    results.unlink()
  return [folder / name for name in names]


def write(
  model: load.Model, tokenizer: Tokenizer, folder: pathlib.Path, dtype: str
) -> list[str]:
  """Writes the files of the format "diloco"; returns their names."""
  tensors = traverse_util.flatten_dict(jax.device_get(model.params), sep=".")
  load.save(tensors, folder / load.WEIGHTS, "np")
  config = model.config.to_dict()
  for section in ("data", "eval", "init"):
    config[section] = {k: _without_folders(v) for k, v in config[section].items()}
  described = {
    "step": model.step,
    "architecture": registry.get(model.config.model).DESCRIPTION,
    "config": config,
  }
  (folder / load.CONFIG).write_text(json.dumps(described, indent=2) + "\n")
  (folder / load.TOKENIZER).write_bytes(tokenizer.serialized())
  return [load.CONFIG, load.WEIGHTS, load.TOKENIZER]


def make_output(output: str | pathlib.Path) -> pathlib.Path:
  """Makes the folder of an export.

  Raises:
    ConfigError: the folder cannot be written, or belongs to a run. An export
      would replace the run's config.json, so that its checkpoints could not be found.
  """
  folder = make_folder(output, "--output")
  if (folder / "checkpoints").exists():
    raise ConfigError(f"--output is {str(output)!r}, a run; give another folder.")
  return folder


def run(args: argparse.Namespace) -> None:
  """Exports a model and prints the files."""
  make_output(args.output)  # Loading is slow, so check the folder first.
  if args.dtype != "float32" and args.format == DILOCO:
    raise ConfigError(f"--dtype is {args.dtype}, which --format={DILOCO} has not.")
  workdir = remote.local_copy(args.workdir, "WORKDIR")
  model = load.load(workdir, args.step)
  for path in export(model, args.output, args.format, args.dtype):
    print(f"{path}  {path.stat().st_size:,} bytes")
  if args.format == DILOCO:  # Names of files have lost their folders: digests stay.
    files.write_json(args.output / CONTENTS, read_contents(workdir))


def _without_folders(value: Any) -> Any:
  """Removes folders from names of files: files:/home/me/a.txt becomes files:a.txt."""
  if not isinstance(value, str):
    return value
  parts = []
  for part in value.split(","):
    kind, colon, path = part.rpartition(":")
    here = path.startswith(("/", "~")) and not path.startswith("//")  # No URL.
    parts.append(kind + colon + pathlib.PurePath(path).name if here else part)
  return ",".join(parts)


def main(argv: list[str] | None = None) -> int:
  parser = model_parser("export", __doc__)
  parser.add_argument("--output", type=as_path, required=True, help="folder to write")
  help_ = "diloco, or one of the model's architecture"
  parser.add_argument("--format", default=DILOCO, help=help_)
  dtypes, help_ = ("float32", "bfloat16"), "for the formats of an architecture"
  parser.add_argument("--dtype", choices=dtypes, default="float32", help=help_)
  return guarded(run, parser.parse_args(argv), mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
