"""Continues a prompt with a trained model.

  python -m diloco generate runs/sample --prompt='My fellow citizens'

The command uses the outer parameters of the newest checkpoint. --temperature=0 always
takes the most likely token; --top_k=40 draws only from the 40 most likely tokens.
"""

import argparse
import sys

import jax

from diloco.data import load_tokenizer
from diloco.errors import ConfigError
from diloco.interop.load import load
from diloco.mesh.modes import plain_modes
from diloco.model import sampling
from diloco.util.command import guarded, in_range, model_parser


@plain_modes()
def run(args: argparse.Namespace) -> None:
  """Prints the prompt with its continuation."""
  try:
    args.prompt.encode()
  except UnicodeEncodeError as error:
    raise ConfigError(f"--prompt is {args.prompt!r}, which is not UTF-8.") from error
  model = load(args.workdir, args.step)
  tokenizer = load_tokenizer(model.config.data.tokenizer)
  prompt = tokenizer.encode(args.prompt)
  with jax.set_mesh(model.mesh):
    how = (args.tokens, args.temperature, args.seed, args.top_k)
    new = sampling.generate(model.config.model, model.params, prompt, *how)
  print(tokenizer.decode([*prompt, *new]))


def main(argv: list[str] | None = None) -> int:
  parser = model_parser("generate", __doc__)
  parser.add_argument("--prompt", default="", help="empty: begins a document")
  add = parser.add_argument
  add("--tokens", type=in_range(0), default=128, help="new tokens at most")
  add("--temperature", type=in_range(0.0, 1e9), default=0.8, help="0: greedy")
  add("--top_k", type=in_range(0), default=0, help="0: all tokens")
  add("--seed", type=in_range(-(2**63), 2**63 - 1), default=0)
  return guarded(run, parser.parse_args(argv), mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
