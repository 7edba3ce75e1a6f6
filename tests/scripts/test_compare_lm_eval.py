"""lm-evaluation-harness on an export scores every item as diloco.evaluate does."""

import importlib.util
import pathlib

import jax
import pytest

from diloco.cli import export
from diloco.config import resolve
from diloco.interop import load
from diloco.mesh.devices import make_inference_mesh
from diloco.model import qwen3

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / "scripts" / "experiments")
  import compare_lm_eval

  return compare_lm_eval


def test_items_have_the_prompts_of_the_harness(script):
  made = script.records(4)
  first = {name: script.item_of(name, rows[0]) for name, rows in made.items()}
  record = made["hellaswag"][0]
  query = (
    f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
  )
  assert first["hellaswag"].query == query
  assert "[" not in "".join(first["hellaswag"].choices)
  assert first["piqa"].query == f"Question: {made['piqa'][0]['goal']}\nAnswer:"
  question = made["arc_easy"][0]["question"]
  assert first["arc_easy"].query == f"Question: {question}\nAnswer:"


def test_differences_are_found(script):
  own = [{"scores": [-3.0, -2.0]}, {"scores": [-1.0, -2.0]}]
  items = [{"choices": ["abcd", "b"], "gold": 1}] * 2
  sample = lambda acc, norm, *scores: {
    "filtered_resps": [(s, False) for s in scores],
    "acc": acc,
    "acc_norm": norm,
  }
  same = [sample(1.0, 0.0, -3.0, -2.0), sample(0.0, 0.0, -1.0, -2.5)]
  found = script.differences(own, items, same)
  assert found == {"items": 2, "largest": 0.5, "other": 0}
  other = [same[0], sample(0.0, 1.0, -1.0, -2.0)]
  assert script.differences(own, items, other)["other"] == 1


@pytest.mark.slow("imports PyTorch and lm-eval")
@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="extra test-hf")
def test_every_score_and_choice_is_that_of_the_harness(script, tiny, tmp_path):
  tiny.model.update({"name": "qwen3", "num_kv_heads": 1, "head_dim": 8})
  tiny.model.seq_len = 256
  c = resolve(tiny)
  params = jax.tree.map(
    lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
    qwen3.init(c.model, jax.random.key(0)),
  )
  model = load.Model(c, 1, params, make_inference_mesh())
  found = script.compare(str(export.export(model, tmp_path)), None, 8)
  assert set(found) == {"hellaswag", "piqa", "arc_easy"}
  for result in found.values():
    assert result["largest"] < 1e-3
    assert (result["items"], result["other"]) == (8, 0)
