"""A run with diagnostics: the losses around merges, and its records after a resume."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from numpy_decoder import numpy_decoder

from diloco.algorithm.state import init_state
from diloco.config import resolve
from diloco.data import make_eval_set
from diloco.evaluate.evaluation import Evaluation
from diloco.evaluate.merges import losses
from diloco.model.shapes import BOS_ID
from diloco.run import metrics
from diloco.run.mesh import make_mesh
from diloco.train import train

KINDS = ("send", "receive", "merge")


@pytest.fixture
def run(tiny, tmp_path):
  """The config and the folder of a finished run that keeps all checkpoints."""
  tiny.checkpoint.keep, tiny.log.diagnostics_every = 9, 2
  tiny.eval.tokens = 2 * tiny.model.seq_len + 3
  train(tiny, tmp_path / "run")
  return resolve(tiny), tmp_path / "run"


def params_at(workdir, step: int):
  """The parameters of all replicas in a checkpoint."""
  folder = workdir / "checkpoints" / str(step) / "state"
  return ocp.StandardCheckpointer().restore(folder.absolute())["params"]


def numpy_loss(c, params, tokens) -> float:
  """Mean cross entropy of one sequence."""
  hidden = numpy_decoder(c.model, params, np.concatenate([[BOS_ID], tokens[:-1]]))
  logits = hidden @ np.float64(params["embed"]["tokens"]).T
  log_z = np.log(np.exp(logits).sum(axis=1))
  return float(np.mean(log_z - logits[np.arange(len(tokens)), tokens]))


def test_the_records_tell_the_same_after_a_resume(run, tiny):
  c, folder = run
  found = metrics.read_kinds(folder, *KINDS)
  # Each of four fragments is sent at 4 + p, 8 + p and 12; the first sync is measured.
  names = {"send": "replica_drift_by_layer", "receive": "outer_update_norm_by_layer"}
  for kind, name in names.items():
    measured = [(r["fragment"], r["step"]) for r in found[kind] if name in r]
    first = 4 if kind == "send" else 5
    expected = [(p, first + p) for p in range(4)] + [(0, first + 8)]
    assert measured == expected
  # The fragment in flight after the last step changes no further loss.
  assert [(r["fragment"], r["step"]) for r in found["merge"]] == [
    (p, 5 + p) for p in range(4)
  ]
  tokens = make_eval_set(c).tokens.reshape(-1, c.model.seq_len)[0]
  params_M = params_at(folder, 5)
  for m, loss in enumerate(found["merge"][0]["loss_after_merge"]):
    params = jax.tree.map(lambda x_M, m=m: np.asarray(x_M[m]), params_M)
    assert loss == pytest.approx(numpy_loss(c, params, tokens), abs=1e-4)
  # A payload is in flight at step 5.
  resumed = folder.parent / "resumed"
  shutil.copytree(folder, resumed)
  for step in (10, 12):
    shutil.rmtree(resumed / "checkpoints" / str(step))
  (resumed / "summary.json").unlink()
  lines = (resumed / "metrics.jsonl").read_text().splitlines(keepends=True)
  kept = [line for line in lines if metrics.as_record(line.encode())["step"] <= 5]
  (resumed / "metrics.jsonl").write_text("".join(kept))
  train(tiny, resumed)
  assert metrics.read_kinds(resumed, *KINDS) == found


def test_each_replica_has_its_loss_and_padding_does_not_count(tiny):
  tiny.eval.tokens = 2 * tiny.model.seq_len + 3
  c = resolve(tiny)
  mesh = make_mesh(c, jax.devices()[:1])
  evaluation = Evaluation(c, mesh)
  with jax.set_mesh(mesh):
    params = init_state(c, mesh, None).params
  move = lambda x_M: jnp.stack([x_M[0], 1.5 * x_M[0], 0 * x_M[0]])
  params_M = jax.tree.map(move, params)
  tokens, weights = evaluation.sequences(5)
  assert weights.sum(axis=1).tolist() == [16, 16, 3, 16, 16]  # Three are there.
  np.testing.assert_array_equal(tokens[:2], tokens[3:])
  batch = [np.stack([x[:3]] * 3) for x in (tokens, weights)]
  with jax.set_mesh(mesh):
    found = losses(params_M, *batch, c=c)
    expected = [
      evaluation.loss(jax.tree.map(lambda x_M, m=m: x_M[m], params_M)).loss
      for m in range(3)
    ]
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert found[2] == pytest.approx(np.log(c.model.vocab_size), abs=1e-4)
