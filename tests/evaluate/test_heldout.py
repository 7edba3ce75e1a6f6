"""The held-out loss is a mean over tokens of text, without the padding."""

import jax
import numpy as np
import pytest

from diloco.config import resolve
from diloco.data import EvalSet
from diloco.evaluate import heldout
from diloco.mesh.devices import make_mesh
from diloco.model import decoder


def test_padding_counts_neither_as_loss_nor_as_tokens(tiny):
  c = resolve(tiny)
  rng = np.random.default_rng(0)
  tokens = rng.integers(4, 2048, (2, 4, c.model.seq_len)).astype(np.int32)
  weights = np.ones(tokens.shape, np.float32)
  weights[1, 2:], weights[1, 1, 5:] = 0, 0
  params = decoder.init(c.model, jax.random.key(0))
  nll = [decoder.losses(c.model, params, batch)[0] for batch in tokens]
  total = np.sum(np.asarray(nll) * weights, dtype=float)
  count = int(weights.sum())
  assert count < tokens.size
  mesh = make_mesh(c)
  eval_set = EvalSet(tokens, weights, count, 1000)
  with jax.set_mesh(mesh):
    result = heldout.evaluate(params, eval_set, c.model, mesh)
  assert result.loss == pytest.approx(total / count, rel=1e-5)
  assert result.bits_per_byte == pytest.approx(total / np.log(2) / 1000, rel=1e-5)


def test_few_batches_are_launched_at_once(tiny, monkeypatch):
  """With hundreds, collectives between CPU devices wait for each other forever."""
  c = resolve(tiny)
  launched, fetched = 0, list[int]()

  class Sum:
    def __init__(self):
      nonlocal launched
      launched += 1

    def __float__(self) -> float:
      fetched.append(launched)
      return 1.0

  monkeypatch.setattr(heldout, "sum_of_losses", lambda *args, m: Sum())
  tokens = np.zeros((9, 4, c.model.seq_len), np.int32)
  eval_set = EvalSet(tokens, np.ones(tokens.shape, np.float32), 9, 9)
  assert heldout.evaluate({}, eval_set, c.model, make_mesh(c)).loss == 1
  assert fetched == [2, 3, 4, 5, 6, 7, 8, 9, 9]
