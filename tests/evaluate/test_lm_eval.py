"""lm-evaluation-harness on an export scores every item as diloco.evaluate does.

The data sets cannot be downloaded everywhere, so the items are made from State of the
Union texts, in the formats of HellaSwag, PIQA and ARC-Easy on the hub. The harness
reads them through its own task files, with its own prompts and metrics.

The harness begins PIQA's prompt with "Question:", diloco and OLMES with "Goal:". Here
both use the harness's.
"""

import importlib.util
import json
import pathlib
import re
from typing import Any

import conftest
import jax
import numpy as np
import pytest
from numpy_decoder import moved

from diloco.cli import evaluate, export
from diloco.config import resolve
from diloco.contrib.qwen3 import model as qwen3
from diloco.data import make_source
from diloco.evaluate.tasks import Item
from diloco.interop import load
from diloco.mesh.devices import make_inference_mesh
from diloco.spec.fields import DataConfig

# The harness's task files, in its folder `tasks`.
FILES = {
  "hellaswag": "hellaswag/hellaswag.yaml",
  "piqa": "piqa/piqa.yaml",
  "arc_easy": "arc/arc_easy.yaml",
}


def records(count: int) -> dict[str, list[dict[str, Any]]]:
  """Makes items from the texts, in the formats of the three data sets."""
  rng = np.random.default_rng(0)
  source = make_source(DataConfig(), "train")
  text = " ".join(source[i] for i in range(4)).split()
  words = lambda n: " ".join(text[(at := rng.integers(len(text) - n)) : at + n])
  found: dict[str, list[dict[str, Any]]] = {name: [] for name in FILES}
  for i in range(count):
    gold = int(rng.integers(4))
    endings = [f"{words(rng.integers(3, 9))} [substeps]  x." for _ in range(4)]
    net = i % 2 == 0
    record = {"activity_label": words(2), "endings": endings, "label": str(gold)}
    record["ctx_a"] = f"{words(12)}." if net else f"{words(4)} [title] {words(9)}."
    # Without a full stop, as in ActivityNet.
    record["ctx_b"] = f"the {words(3)}".lower().replace(".", "") if net else ""
    record["source_id"] = "activitynet~v_1" if net else "wikihow~1"
    found["hellaswag"].append(record)
    pair = {"sol1": words(rng.integers(2, 12)), "sol2": words(rng.integers(2, 12))}
    found["piqa"].append({"goal": words(8), **pair, "label": gold % 2})
    options = [words(rng.integers(1, 5)) for _ in range(4)]
    labels = ["A", "B", "C", "D"] if net else ["1", "2", "3", "4"]
    choices = {"text": options, "label": labels}
    question = {"question": f"{words(10)}?", "choices": choices}
    found["arc_easy"].append(question | {"answerKey": labels[gold]})
  return found


def item_of(name: str, record: dict[str, Any]) -> Item:
  """Makes the item of a record, with the prompts of the harness."""
  if name == "hellaswag":
    context = f"{record['ctx_a']} {record['ctx_b'].capitalize()}".strip()
    query = clean(f"{record['activity_label']}: {context}")
    return Item(query, tuple(map(clean, record["endings"])), int(record["label"]))
  if name == "piqa":
    choices = (record["sol1"], record["sol2"])
    query = f"Question: {record['goal']}\nAnswer:"
    return Item(query, choices, int(record["label"]))
  choices = record["choices"]
  gold = choices["label"].index(record["answerKey"])
  query = f"Question: {record['question']}\nAnswer:"
  return Item(query, tuple(choices["text"]), gold)


def clean(text: str) -> str:
  """Removes WikiHow's markup: [title] becomes a full stop, other tags are deleted."""
  text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
  return text.replace("  ", " ")


def write(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def harness(folder: pathlib.Path, data: pathlib.Path) -> dict[str, list[dict]]:
  """Scores the items by lm-evaluation-harness; returns its samples in order."""
  import lm_eval
  from lm_eval.tasks import TaskManager

  tasks = pathlib.Path(lm_eval.__file__).parent / "tasks"
  for name, file in FILES.items():
    own = dict.fromkeys(("dataset_name", "training_split", "test_split"))
    own |= {"include": str(tasks / file), "task": f"local_{name}"}
    files = {"data_files": {"validation": str(data / f"{name}.jsonl")}}
    own |= {"dataset_path": "json", "dataset_kwargs": files}
    (data / f"local_{name}.yaml").write_text(json.dumps(own))
  found = lm_eval.simple_evaluate(
    model="hf",
    model_args=f"pretrained={folder},dtype=float32",
    tasks=[f"local_{name}" for name in FILES],
    task_manager=TaskManager(include_path=str(data), include_defaults=False),
    device="cpu",
    batch_size=8,
    bootstrap_iters=0,
  )
  by_id = lambda sample: sample["doc_id"]
  samples = found["samples"]
  return {name: sorted(samples[f"local_{name}"], key=by_id) for name in FILES}


def differences(own: list[dict], items: list[Item], samples: list[dict]) -> dict:
  """Compares the scores of a task.

  Returns:
    The largest difference of a log-likelihood in nats, and the number of items in whose
    two accuracies the programs differ.
  """
  largest, other = 0.0, 0
  for row, item, sample in zip(own, items, samples, strict=True):
    scores = np.array(row["scores"])
    theirs = np.array([float(r[0]) for r in sample["filtered_resps"]])
    largest = max(largest, float(np.abs(scores - theirs).max()))
    per_character = scores / [len(choice) for choice in item.choices]
    mine = [float(np.argmax(s) == item.gold) for s in (scores, per_character)]
    other += mine != [sample["acc"], sample["acc_norm"]]
  return {"largest": largest, "other": other}


@pytest.mark.slow("imports PyTorch and lm-eval")
@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="extra test-hf")
def test_every_score_and_choice_is_that_of_the_harness(tiny, tmp_path):
  own = {"model.name": "qwen3", "qwen3.kv_heads": 1, "qwen3.head_dim": 8}
  conftest.update(tiny, own)
  tiny.model.seq_len = 256
  c = resolve(tiny)
  params = moved(qwen3.init(c.model, jax.random.key(0)))
  model = load.Model(c, 1, params, make_inference_mesh())
  folder, plain = tmp_path / "hf", tmp_path / "diloco"
  export.export(model, folder, "hf")
  export.export(model, plain)
  details, items, paths = tmp_path / "details.jsonl", {}, {}
  for name, made in records(8).items():
    write(tmp_path / f"{name}.jsonl", made)
    items[name] = [item_of(name, record) for record in made]
    paths[name] = str(tmp_path / f"items_{name}.jsonl")
    write(pathlib.Path(paths[name]), [vars(item) for item in items[name]])
  flags = [f"{plain}", f"--tasks={','.join(paths.values())}"]
  assert evaluate.main([*flags, f"--details={details}"]) == 0
  rows = [json.loads(line) for line in details.read_text().splitlines()]
  for name, samples in harness(folder, tmp_path).items():
    own = [row for row in rows if row["task"] == paths[name]]
    found = differences(own, items[name], samples)
    assert len(own) == 8
    assert found["largest"] < 1e-3
    assert found["other"] == 0
