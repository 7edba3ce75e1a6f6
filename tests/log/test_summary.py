"""The summary: rarely synchronised fragments, and the loss on the test text."""

import jax
import pytest

from diloco.config import resolve
from diloco.data import make_eval_set
from diloco.evaluate import heldout
from diloco.interop.load import load
from diloco.log import summary
from diloco.train import train


@pytest.mark.parametrize(
  ("steps", "said"),
  [(7, "only 1 time in 7"), (12, "only 2 times in 12"), (14, "only 2"), (15, "")],
)
def test_fewer_than_three_syncs_of_a_fragment_are_told(tiny, steps, said):
  # 4 fragments with sync_every=4: the last is sent at steps 7, 11, 15.
  tiny.train.steps, tiny.outer.optimizer = steps, "sgd(momentum=0.5)"
  note = summary.note(resolve(tiny))
  assert said in note
  assert bool(note) == bool(said)
  assert ("final_sync" in note) == bool(said)
  tiny.outer.final_sync = True
  assert summary.note(resolve(tiny)) == ""
  tiny.outer.final_sync, tiny.algorithm = False, "data_parallel"
  assert summary.note(resolve(tiny)) == ""


@pytest.mark.parametrize(("steps", "told"), [(300, True), (500, False)])
def test_the_papers_momentum_in_a_short_run_is_told(tiny, steps, told):
  tiny.train.steps, tiny.outer.optimizer = steps, "sgd(momentum=0.9)"
  assert summary.note(resolve(tiny)).startswith("outer momentum 0.9 suits") == told
  for momentum in (0.7, None):
    tiny.outer.optimizer = f"sgd(momentum={momentum})"
    assert summary.note(resolve(tiny)) == ""


def test_a_warm_up_that_is_longer_than_the_schedule_is_told(tiny):
  tiny.outer.optimizer, tiny.inner.warmup_steps = "sgd", 16
  tiny.train.steps = 15
  said = "inner.warmup_steps is 16, but the schedule ends at step 15,"
  assert summary.note(resolve(tiny)).startswith(said)
  tiny.train.steps = 17
  assert summary.note(resolve(tiny)) == ""


def test_held_out_documents_in_the_training_text_are_told(tiny, tmp_path):
  for i in range(40):  # The files 0 and 20 are held out.
    (tmp_path / f"{i:02}.txt").write_text(f"Document {20 if i == 7 else i:02}.")
  tiny.data.source, tiny.train.steps = f"files:{tmp_path}", 16
  tiny.outer.optimizer = "sgd"
  assert summary.note(resolve(tiny)).startswith(
    "1 of 2 held-out documents (50.0% of the bytes) are also in the training text"
  )


@pytest.mark.slow("whole runs")
def test_the_test_loss_is_that_of_the_final_parameters_on_the_test_text(tiny, tmp_path):
  tiny.eval.test_tokens, tiny.log.sample_tokens = 300, 0
  found = train(tiny, tmp_path)
  model = load(tmp_path)
  with jax.set_mesh(model.mesh):
    c = model.config
    sets = [make_eval_set(c, test) for test in (False, True)]
    own, test = (heldout.evaluate(model.params, s, c.model, model.mesh) for s in sets)
  assert found["eval_loss"]["outer"] == pytest.approx(own.loss, rel=1e-6)
  assert found["test_loss"]["outer"] == pytest.approx(test.loss, rel=1e-6)
  assert abs(own.loss - test.loss) > 1e-3
  assert len({*found["test_loss"].values()}) == 3  # Outer, mean and first differ.
