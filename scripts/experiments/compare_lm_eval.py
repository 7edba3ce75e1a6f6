"""Compares diloco.evaluate with lm-evaluation-harness, item by item.

  pip install '.[test-hf]'
  python scripts/experiments/compare_lm_eval.py --workdir=runs/qwen3 --items=50

Exports the model (model.name=qwen3) for transformers, and scores the same items by both
programs. The data sets cannot be downloaded everywhere, so the items are made from
State of the Union texts, in the formats of HellaSwag, PIQA and ARC-Easy on the hub. The
harness reads them through its own task files, with its own prompts and metrics.

The harness begins PIQA's prompt with "Question:", diloco and OLMES with "Goal:". Here
both use the harness's.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from diloco.cli import evaluate, export
from diloco.data import make_source
from diloco.errors import ConfigError
from diloco.evaluate.tasks import TASKS, Item
from diloco.interop import load
from diloco.spec.fields import DataConfig
from diloco.util.command import guarded, model_parser

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
  """Makes the item that diloco makes of the data set's record in TFDS."""
  if name == "hellaswag":
    context = f"{record['ctx_a']} {record['ctx_b']}".strip()
    record = record | {"context": context}
  item = TASKS[name].to_item(record)
  if name == "piqa":
    query = item.query.replace("Goal:", "Question:", 1)
    item = Item(query, item.choices, item.gold)
  return item


def harness(folder: pathlib.Path, data: pathlib.Path) -> dict[str, list[dict]]:
  """Scores the items by lm-evaluation-harness; returns its samples in order."""
  try:
    import lm_eval
    from lm_eval.tasks import TaskManager
  except ImportError as error:
    raise ConfigError("this needs lm-eval: pip install '.[test-hf]'.") from error
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


def compare(workdir: str, step: int | None, count: int) -> dict[str, dict[str, Any]]:
  """Scores by both programs.

  Returns:
    {task: items, largest difference of a log-likelihood in nats, and the items in
    whose two accuracies the programs differ}.
  """
  model = load.load(workdir, step)
  compared = {}
  with tempfile.TemporaryDirectory() as temporary:
    data = pathlib.Path(temporary)
    folder, _ = export.export_hf(model, data / "hf")
    plain = export.export(model, data / "diloco")
    paths = {}
    for name, made in records(count).items():
      write(data / f"{name}.jsonl", made)
      items = [item_of(name, record) for record in made]
      paths[name] = data / f"items_{name}.jsonl"
      write(paths[name], [vars(item) for item in items])
    details = data / "details.jsonl"
    chosen = ",".join(map(str, paths.values()))
    flags = [f"--workdir={plain}", f"--tasks={chosen}", f"--details={details}"]
    if evaluate.main(flags):
      raise ConfigError("diloco.evaluate cannot score the items.")
    mine = [json.loads(line) for line in details.read_text().splitlines()]
    for name, samples in harness(folder, data).items():
      own = [row for row in mine if row["task"] == str(paths[name])]
      encoded = [json.loads(line) for line in paths[name].read_text().splitlines()]
      assert len(own) == len(samples) == len(encoded) == count
      compared[name] = differences(own, encoded, samples)
  return compared


def differences(own: list[dict], items: list[dict], samples: list[dict]) -> dict:
  """Compares the scores of a task."""
  largest, other = 0.0, 0
  for row, item, sample in zip(own, items, samples):
    scores = np.array(row["scores"])
    theirs = np.array([float(r[0]) for r in sample["filtered_resps"]])
    largest = max(largest, float(np.abs(scores - theirs).max()))
    per_character = scores / [len(choice) for choice in item["choices"]]
    mine = [float(np.argmax(s) == item["gold"]) for s in (scores, per_character)]
    other += mine != [sample["acc"], sample["acc_norm"]]
  return {"items": len(own), "largest": largest, "other": other}


def write(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(args: argparse.Namespace) -> None:
  found = compare(args.workdir, args.step, args.items)
  print(f"{'task':<12}{'items':>8}{'largest difference, nats':>28}{'other choice':>16}")
  for name, r in found.items():
    print(f"{name:<12}{r['items']:>8}{r['largest']:>28.1e}{r['other']:>16}")


def main(argv: list[str] | None = None) -> int:
  parser = model_parser("compare_lm_eval", "Compares with lm-evaluation-harness.")
  parser.prog = "scripts/experiments/compare_lm_eval.py"
  parser.add_argument("--items", type=int, default=50, help="items per task")
  return guarded(run, parser.parse_args(argv), mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
