"""Scores of choices against NumPy, batches, and whole evaluations."""

import collections
import dataclasses
import errno
import functools
import json

import conftest
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy_decoder import moved, numpy_decoder
from running import refused, shown
from test_tasks import ITEMS, needs_items

from diloco import train
from diloco.cli import evaluate, export
from diloco.config import resolve
from diloco.config.comparable import HELD_OUT
from diloco.data import load_tokenizer
from diloco.evaluate import score, tasks
from diloco.evaluate.evaluation import Evaluation
from diloco.log import metrics
from diloco.mesh.devices import make_mesh
from diloco.model import decoder


@pytest.fixture(scope="module")
def tokenizer():
  return load_tokenizer("sotu_2048")


def make_config(seq_len=64, **model):
  c = conftest.tiny_config()
  c.model.seq_len, c.eval.tasks, c.eval.batch_size = seq_len, ITEMS, 2
  c.model.update(model)
  return resolve(c)


def make_params(c):
  return moved(decoder.init(c.model, jax.random.key(0)))


def numpy_score(c, params, tokenizer, query, choice):
  """Computes log P(choice | query) by the definition, in float64."""
  context = tokenizer.encode(query)
  ids = tokenizer.encode(query + " " + choice)
  assert ids[: len(context)] == context
  known = max(len(context) - max(len(ids) - c.model.seq_len, 0), 0)
  ids = ids[-c.model.seq_len :]
  x = numpy_decoder(c.model, params, [2, *ids[:-1]])
  logits = x @ np.asarray(params["embed"]["tokens"], np.float64).T
  top = logits.max(-1, keepdims=True)
  log_probs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
  return sum(log_probs[i, ids[i]] for i in range(known, len(ids)))


# All sequences fit into 128 positions. At 16, most are cut, some to their choice alone.
@pytest.mark.parametrize(("seq_len", "chunk"), [(128, 32), (16, 0)])
def test_scores_are_those_of_numpy_item_by_item(tokenizer, seq_len, chunk):
  c = make_config(seq_len, loss_chunk=chunk)
  params, mesh = make_params(c), make_mesh(c)
  details = []
  with jax.set_mesh(mesh):
    results = Evaluation(c, mesh, held_out=False).tasks(params, details)
  items = tasks.load_items(ITEMS)
  expected = [
    [numpy_score(c, params, tokenizer, item.query, choice) for choice in item.choices]
    for item in items
  ]
  for item, mine, theirs in zip(items, details, expected):
    np.testing.assert_allclose(mine["scores"], theirs, rtol=1e-5, atol=1e-4)
    assert mine["gold"] == item.gold
  right = [np.argmax(e) == item.gold for e, item in zip(expected, items)]
  assert results[ITEMS].accuracy == np.mean(right)
  encoded = [len(tokenizer.encode(f"{i.query} {x}")) for i in items for x in i.choices]
  assert results[ITEMS].truncated == sum(n > seq_len for n in encoded)
  assert (results[ITEMS].truncated > 0) == (seq_len == 16)


@pytest.mark.slow("scores whole test sets")
@needs_items
def test_an_untrained_model_is_at_chance_on_the_full_sets():
  # Takes about 80 s on one core. With -s it prints the accuracies.
  c = conftest.tiny_config()
  c.model.num_layers, c.model.seq_len, c.eval.batch_size = 1, 512, 32
  c.fragments.size, c.eval.tasks = 1, ",".join(tasks.TASKS)
  c = resolve(c)
  mesh = make_mesh(c)
  params = decoder.init(c.model, jax.random.key(0))
  with jax.set_mesh(mesh):
    results = Evaluation(c, mesh, held_out=False).tasks(params)
  for name, r in results.items():
    print(tasks.line(name, dataclasses.asdict(r)))
    assert abs(r.accuracy - r.chance) < 3 * r.stderr, name
    assert abs(r.accuracy_norm - r.chance) < 3 * r.stderr_norm, name
    assert r.truncated == 0


def test_a_progress_bar_counts_choices_over_many_batches(capsys):
  c = make_config(32)
  params, mesh = make_params(c), make_mesh(c)
  draw = lambda i: np.random.default_rng(i).integers(4, 100, 20).tolist()
  sequences = [tasks.Continuation(draw(i), 3, False) for i in range(41)]
  scores = functools.partial(score.score, params)
  rest = c.model, c.eval.batch_size, mesh
  with jax.set_mesh(mesh):
    one = [scores([s], *rest)[0] for s in sequences]
    # A machine that is busy also names what it compiles for seconds.
    assert "1/1" not in capsys.readouterr().err
    many = scores(sequences, *rest, show=True)
  np.testing.assert_allclose(many, one, rtol=1e-5)
  assert "41/41" in capsys.readouterr().err


@pytest.mark.integration("forgets all programs, then compiles")
def test_each_length_is_compiled_once(caplog):
  c = make_config(64)
  params, mesh = make_params(c), make_mesh(c)
  sequences = [tasks.Continuation([5] * n, 1, False) for n in range(2, 65)]
  jax.clear_caches()
  with jax.set_mesh(mesh), jax.log_compiles(), caplog.at_level("WARNING"):
    score.score(params, sequences, c.model, c.eval.batch_size, mesh)
  compiled = [r for r in caplog.records if "Compiling jit(_log_lik" in r.getMessage()]
  assert len(compiled) == 2  # For 64 and for 32 positions.


@given(
  sizes=st.lists(st.integers(1, 96), max_size=40),
  seq_len=st.sampled_from([96, 128, 100]),
  batch_size=st.integers(1, 4),
)
def test_batches_hold_every_continuation_once(sizes, seq_len, batch_size):
  sequences = [tasks.Continuation(list(range(4, 4 + n)), n // 3, False) for n in sizes]
  seen = collections.Counter()
  for rows, tokens, weights in score.batches(sequences, seq_len, batch_size):
    batch, length = tokens.shape
    assert length in (seq_len, seq_len // 2, seq_len // 4)
    assert batch == batch_size * (seq_len // length)
    assert len(rows) <= batch
    seen.update(rows.tolist())
    for row, (i, t, w) in enumerate(zip(rows, tokens, weights)):
      n, start = sizes[i], sequences[i].start
      assert t[:n].tolist() == sequences[i].ids, row
      assert (w[start:n] == 1).all()
      assert w.sum() == n - start
    assert not weights[len(rows) :].any()
  assert seen == dict.fromkeys(range(len(sizes)), 1)


@pytest.mark.integration("a whole run, and commands")
def test_training_and_the_command_give_the_same_results(tmp_path, capsys, monkeypatch):
  c = conftest.tiny_config()
  c.train.steps, c.eval.every, c.log.sample_tokens = 7, 4, 0
  c.fragments.pattern = "whole"  # Few programs.
  c.eval.tasks, c.eval.task_items = f"{ITEMS},{ITEMS}", 4
  summary = train.train(c, tmp_path)
  assert "length-normalised" in capsys.readouterr().out
  evals = metrics.read(tmp_path, "eval")
  assert [r["step"] for r in evals] == [4, 7]
  trained = summary["tasks"][ITEMS]
  assert trained["items"] == 4
  assert evals[-1][f"{ITEMS}_accuracy"] == trained["accuracy"]

  details = tmp_path / "details.jsonl"
  args = [f"{tmp_path}", f"--tasks={ITEMS}", "--items=4", "--heldout"]
  out = shown(evaluate.main, *args, f"--details={details}")
  assert "items.jsonl" in out
  assert "nats/token" in out
  said = json.loads((tmp_path / "evaluation_7.json").read_text())
  assert said["tasks"][ITEMS] == trained
  assert said["loss"] == pytest.approx(summary["eval_loss"]["outer"], rel=1e-6)
  rows = [json.loads(line) for line in details.read_text().splitlines()]
  found = [(r["item"], len(r["scores"])) for r in rows]
  assert found == [(0, 4), (1, 2), (2, 3), (3, 5)]
  for more, message in (
    (["--tasks=,"], "--tasks is empty"),
    (["--heldout", "--items=3"], "--details and --items need --tasks, which is empty"),
    ([f"--tasks={ITEMS}", f"--details={tmp_path}"], "a folder; give a file"),
  ):
    assert message in refused(evaluate.main, tmp_path, *more)
  assert shown(evaluate.main, tmp_path, "--heldout").startswith("held-out ")
  # Each command adds to what is known of the step.
  assert json.loads((tmp_path / "evaluation_7.json").read_text()) == said

  (tmp_path / "contents.json").write_text(json.dumps({HELD_OUT: "another text"}))
  assert export.main([f"{tmp_path}", f"--output={tmp_path / 'exported'}"]) == 0
  assert evaluate.main([f"{tmp_path / 'exported'}", "--heldout"]) == 0
  assert "was another text when the run was evaluated" in capsys.readouterr().out
  results = tmp_path / "exported" / "evaluation_7.json"
  assert results.exists()
  assert export.main([f"{tmp_path}", f"--output={tmp_path / 'exported'}"]) == 0
  assert not results.exists()  # It would belong to the first export.
  capsys.readouterr()
  note = "was another text when the run was evaluated, so this loss cannot be compared"
  assert note in shown(evaluate.main, tmp_path, "--heldout")
  assert note in json.loads((tmp_path / "evaluation_7.json").read_text())["note"]
  (tmp_path / "contents.json").unlink()

  def read_only(path, value):
    raise PermissionError(errno.EACCES, "Permission denied", str(path))

  monkeypatch.setattr(evaluate.files, "write_json", read_only)
  *_, where, content = shown(evaluate.main, tmp_path, "--heldout").splitlines()
  assert "evaluation_7.json cannot be written (Permission denied)" in where
  assert json.loads(content) == said
