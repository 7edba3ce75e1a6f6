"""A run with diagnostics: the losses around merges, and its records after a resume."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import rewind, update
from numpy_decoder import numpy_decoder

from diloco.algorithm.method import Method
from diloco.algorithm.outer import outer_step
from diloco.algorithm.streaming import make_streaming
from diloco.config import resolve
from diloco.contrib import warm_start
from diloco.contrib.diagnostics.outer_step import MeasuredStep, losses, sequences
from diloco.data import make_eval_set
from diloco.evaluate.evaluation import Evaluation
from diloco.log import metrics
from diloco.mesh.devices import make_mesh
from diloco.spec.shapes import BOS_ID
from diloco.train import train

KINDS = ("send", "receive", "merge")


@pytest.fixture
def run(tiny, tmp_path):
  """The config and the folder of a finished run, with checkpoints of step 6 and 12."""
  update(tiny, {"diagnostics.every": 2, "checkpoint.every": 6})
  tiny.overlap.tau, tiny.overlap.alpha = 2, 0.5
  tiny.eval.tokens = 2 * tiny.model.seq_len + 3
  train(tiny, tmp_path / "run")
  return resolve(tiny), tmp_path / "run"


def around_the_merge(workdir, step: int, layer: int) -> tuple:
  """Parameters of all replicas before and after the merge of fragment 0, one layer.

  A checkpoint of that step has theta and merged = (local + theta) / 2. So local is
  2 merged - theta.
  """
  folder = workdir / "checkpoints" / str(step) / "state"
  state = ocp.StandardCheckpointer().restore(folder.absolute())
  after_M = jax.tree.map(np.asarray, state["params"])
  blocks_M = jax.tree.map(np.copy, after_M["blocks"])

  def undo(x_M, theta):
    x_M[:, layer] = 2 * x_M[:, layer] - theta[0]

  jax.tree.map(undo, blocks_M, state["theta"][0]["blocks"])
  return {**after_M, "blocks": blocks_M}, after_M


def numpy_loss(c, params, tokens) -> float:
  """Mean cross entropy of one sequence."""
  hidden = numpy_decoder(c.model, params, np.concatenate([[BOS_ID], tokens[:-1]]))
  logits = hidden @ np.float64(params["embed"]["tokens"]).T
  log_z = np.log(np.exp(logits).sum(axis=1))
  return float(np.mean(log_z - logits[np.arange(len(tokens)), tokens]))


@pytest.mark.integration("whole runs")
def test_the_records_tell_the_same_after_a_resume(run, tiny):
  c, folder = run
  found = metrics.read_kinds(folder, *KINDS)
  place = lambda kind, name: [
    (r["step"], r["fragment"]) for r in found[kind] if name in r
  ]
  # Fragment p is sent at 4 + p and 8 + p, and the first again at 12, its third sync.
  sends = [(4, 0), (5, 1), (6, 2), (7, 3), (12, 0)]
  updates = [(t + 2, p) for t, p in sends]
  assert place("send", "replica_drift_by_layer") == sends
  assert place("receive", "outer_update_norm_by_layer") == updates
  for record in (r for r in found["receive"] if "outer_update_norm_by_layer" in r):
    whole = np.linalg.norm(record["outer_update_norm_by_layer"])
    assert record["outer_update_norm"] == pytest.approx(whole, rel=1e-4)
  # The fragment in flight after the last step changes no further loss.
  assert place("merge", "loss_before_merge") == updates[:-1]
  tokens = make_eval_set(c).tokens.reshape(-1, c.model.seq_len)[0]
  # Step 6 merges layer 0 and nothing else.
  before_M, after_M = around_the_merge(folder, 6, layer=0)
  for m in range(c.replicas):
    before, after = (
      numpy_loss(c, jax.tree.map(lambda x_M, m=m: x_M[m], params_M), tokens)
      for params_M in (before_M, after_M)
    )
    assert abs(before - after) > 1e-2
    record = found["merge"][0]
    assert record["loss_before_merge"][m] == pytest.approx(before, abs=1e-4)
    assert record["loss_after_merge"][m] == pytest.approx(after, abs=1e-4)
  # Fragments 1 and 2 are in flight at step 6.
  resumed = folder.parent / "resumed"
  rewind(folder, resumed, 6)
  train(tiny, resumed)
  assert metrics.read_kinds(resumed, *KINDS) == found


def test_a_replica_that_merges_no_measured_sync_has_no_losses(tiny):
  tiny.overlap.taus = (1, 3)
  c = resolve(tiny)
  mesh = make_mesh(c, jax.devices()[:1])
  found = {}
  with jax.set_mesh(mesh):
    sync = make_streaming(c, mesh)
    state = Method(c, sync).init()
    still = lambda sync, t, params_M, outer, *_: (params_M, outer, [])
    step = MeasuredStep(c, 2, still)
    for t in range(1, c.train.steps + 1):
      for event in step(sync, t, state.params, state.outer)[2]:
        nulls = [np.isnan(x_M).tolist() for x_M in event.metrics.values()]
        assert list(event.metrics) == ["loss_before_merge", "loss_after_merge"]
        assert nulls[0] == nulls[1]
        found[t] = event.fragment, nulls[0]
  # Fragment p is sent after step 4 + p, and again, not measured, after 8 + p.
  # Replica 0 merges one step later, replica 1 three steps later.
  only_0, only_1, both = [False, True], [True, False], [False, False]
  assert found == {
    5: (0, only_0),
    6: (1, only_0),
    7: (0, both),  # Replica 0 merges fragment 2.
    8: (1, both),
    9: (2, only_1),
    10: (3, only_1),
  }


def test_the_outer_step_of_another_plugin_is_measured_in_any_order(tiny):
  update(tiny, {"diagnostics.every": 2, "warm_start.steps": 3})

  def step_of(*names):
    tiny.plugins = names
    c = resolve(tiny)
    return make_streaming(c, make_mesh(c, jax.devices()[:1])).outer_step.run

  for names in (("warm_start", "diagnostics"), ("diagnostics", "warm_start")):
    measured = step_of(*names)
    assert isinstance(measured, MeasuredStep)
    assert measured.step.func is warm_start.outer_step
    assert measured.step.keywords["step"] is outer_step


@pytest.mark.slow("compiles for each replica")
def test_each_replica_has_its_loss_and_padding_does_not_count(tiny):
  tiny.eval.tokens = 2 * tiny.model.seq_len + 3
  tiny.train.batch_size = 2 * 8 * 5  # Two replicas, and five of each 8 sequences.
  c = resolve(tiny)
  mesh = make_mesh(c, jax.devices()[:1])
  evaluation = Evaluation(c, mesh)
  with jax.set_mesh(mesh):
    params = Method(c, make_streaming(c, mesh)).init().params
  move = lambda x_M: jnp.stack([x_M[0], 1.5 * x_M[0], 0 * x_M[0]])
  params_M = jax.tree.map(move, params)
  tokens, weights = (np.asarray(x) for x in sequences(c, mesh))
  # Three are there.
  assert weights.sum(axis=2).tolist() == [[16, 16, 3, 16, 16]] * c.replicas
  np.testing.assert_array_equal(tokens[:, :2], tokens[:, 3:])
  np.testing.assert_array_equal(tokens[0], tokens[1])
  batch = [np.stack([x[0, :3]] * 3) for x in (tokens, weights)]
  with jax.set_mesh(mesh):
    found = losses(params_M, *batch, c=c)
    expected = [
      evaluation.loss(jax.tree.map(lambda x_M, m=m: x_M[m], params_M)).loss
      for m in range(3)
    ]
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert found[2] == pytest.approx(np.log(c.model.vocab_size), abs=1e-4)
