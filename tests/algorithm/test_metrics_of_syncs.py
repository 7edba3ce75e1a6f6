"""Norms and cosine similarities, against sums over replicas and pairs in float64."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from diloco.algorithm.sync_metrics import mean_cosine, products


def draw_M(m: int, shift: float = 0.0) -> tuple[dict, np.ndarray]:
  """Returns a tree of m replicas with unequal norms, and its rows, float64 (m, 17).

  A common shift makes the replicas point in similar directions.
  """
  rng = np.random.default_rng(m)
  scale_M = np.arange(1, m + 1)
  rows = (rng.normal(size=(m, 17)) + shift) * scale_M[:, None]
  rows = rows.astype(np.float32)
  tree_M = {"w": jnp.asarray(rows[:, :12].reshape(m, 3, 4)), "b": rows[:, 12:]}
  return tree_M, rows.astype(np.float64)


@pytest.mark.parametrize("shift", [0.0, 3.0])
@pytest.mark.parametrize("m", [2, 3, 5])
def test_the_mean_cosine_is_the_mean_over_all_pairs(m, shift):
  tree_M, rows = draw_M(m, shift)
  cosines = [
    a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in itertools.combinations(rows, 2)
  ]
  assert float(mean_cosine(products(tree_M))) == pytest.approx(
    np.mean(cosines), abs=1e-6
  )


@pytest.mark.parametrize(("m", "zeros"), [(2, 1), (2, 2), (4, 2)])
def test_a_zero_gradient_is_orthogonal_to_all_others(m, zeros):
  tree_M, rows = draw_M(m, shift=3.0)
  tree_M = {
    name: x * (np.arange(m) >= zeros).reshape(-1, *[1] * (x.ndim - 1))
    for name, x in tree_M.items()
  }
  cosine = lambda a, b: a @ b / np.sqrt((a @ a) * (b @ b))
  others = itertools.combinations(rows[zeros:], 2)
  expected = sum(cosine(a, b) for a, b in others) / (m * (m - 1) / 2)
  assert float(mean_cosine(products(tree_M))) == pytest.approx(expected, abs=1e-6)


def test_one_replica_has_no_cosine():
  assert mean_cosine(products(draw_M(1)[0])) is None
