"""Text from a model: sampling token by token with a key-value cache.

  python -m diloco.generate --workdir=/tmp/sample --prompt='My fellow citizens'

The outer parameters of the newest checkpoint continue the prompt. --temperature=0 is
greedy; --top_k=40 draws from the 40 likeliest tokens only.
"""

import argparse
import sys

import jax

from diloco.config import ConfigError
from diloco.data import load_tokenizer
from diloco.model import sampling
from diloco.run.load import load


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m diloco.generate", description="Continues a prompt."
  )
  parser.add_argument("--workdir", required=True, help="of a run, or an export")
  parser.add_argument("--step", type=int, help="default: the newest checkpoint")
  parser.add_argument("--prompt", default="", help="empty: the begin of a document")
  parser.add_argument("--tokens", type=int, default=128, help="at most")
  parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
  parser.add_argument("--top_k", type=int, default=0, help="0 keeps all tokens")
  parser.add_argument("--seed", type=int, default=0)
  return parser


def main(argv: list[str] | None = None) -> int:
  args = make_parser().parse_args(argv)
  try:
    for name in ("tokens", "temperature", "top_k"):
      if not getattr(args, name) >= 0:
        raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 0.")
    model = load(args.workdir, args.step)
    tokenizer = load_tokenizer(model.config.data.tokenizer)
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  prompt = tokenizer.encode(args.prompt)
  with jax.set_mesh(model.mesh):
    new = sampling.generate(
      model.config.model,
      model.params,
      prompt,
      args.tokens,
      args.temperature,
      args.seed,
      args.top_k,
    )
  print(tokenizer.decode([*prompt, *new]))
  return 0


if __name__ == "__main__":
  sys.exit(main())
