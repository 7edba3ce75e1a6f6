"""Writes a trained model for other programs: safetensors weights and a config.

  python -m diloco.export --workdir=/tmp/sample --output=/tmp/sample_export

The folder holds the outer parameters (model.safetensors, float32, names such as
`blocks.attention.q`), what is needed to build the model around them (config.json) and
the tokenizer (tokenizer.model). diloco.generate and diloco.evaluate take it as their
--workdir; `diloco.run.load.load` gives the very same bits.
"""

import argparse
import json
import pathlib
import sys

import jax
import numpy as np

from diloco.config import ConfigError, command_line
from diloco.data import load_tokenizer
from diloco.run import load

# Copied into config.json, for who rebuilds the model elsewhere.
ARCHITECTURE = {
  "embedding": "embed.tokens (V, D) + embed.positions (L, D); BOS (id 2) comes first",
  "blocks": (
    "tensors `blocks.*` lead with the layer; x += out(attention(norm(x))), then"
    " x += down(gelu_tanh(up(norm(x)))); matrices are (in, out), there are no biases"
  ),
  "attention": (
    "causal, num_heads heads of dim / num_heads, scores over sqrt(head size); with"
    " qk_norm, LayerNorm over each head of queries and keys (q_norm, k_norm)"
  ),
  "norm": "LayerNorm with mean and scale, without bias, epsilon 1e-6",
  "head": "logits = norm(x) @ embed.tokens^T, with embed.norm; float32",
}


def export(model: load.Model, output: str | pathlib.Path) -> pathlib.Path:
  """Writes the model's parameters, config and tokenizer.

  Args:
    model: from `diloco.run.load.load`.
    output: folder to create; an earlier export in it is replaced.

  Returns:
    The folder.

  Raises:
    ConfigError: the tokenizer or the package safetensors is missing.
  """
  save_file = load.import_safetensors().save_file
  folder = pathlib.Path(output)
  folder.mkdir(parents=True, exist_ok=True)
  named = load.leaf_names(jax.device_get(model.params))
  # safetensors writes the buffer as it lies in memory.
  tensors = {name: np.ascontiguousarray(x) for name, x in named.items()}
  save_file(tensors, folder / load.WEIGHTS, metadata={"format": "np"})
  described = {
    "step": model.step,
    "architecture": ARCHITECTURE,
    "config": model.config.to_dict(),
  }
  (folder / load.CONFIG).write_text(json.dumps(described, indent=2) + "\n")
  tokenizer = load_tokenizer(model.config.data.tokenizer)
  (folder / load.TOKENIZER).write_bytes(tokenizer.serialized())
  return folder


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m diloco.export", description=(__doc__ or "").splitlines()[0]
  )
  parser.add_argument("--workdir", required=True, help="of the run")
  parser.add_argument("--step", type=int, help="default: the newest checkpoint")
  parser.add_argument("--output", required=True, help="folder to write")
  return parser


def main(argv: list[str] | None = None) -> int:
  args = make_parser().parse_args(argv)
  try:
    command_line.make_folder(args.output, "--output")
    folder = export(load.load(args.workdir, args.step), args.output)
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  for path in sorted(folder.iterdir()):
    print(f"{path}  {path.stat().st_size:,} bytes")
  return 0


if __name__ == "__main__":
  sys.exit(main())
