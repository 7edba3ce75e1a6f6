"""The models in a state, apart from the outer parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.algorithm.state import first_replica, replica_mean
from diloco.config import resolve
from diloco.mesh.devices import make_mesh


@pytest.fixture
def mesh(tiny):
  return make_mesh(resolve(tiny), jax.devices()[:1])


def replicas(m: int, dtype: str) -> dict:
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=(m, *shape)), dtype)
  return {"blocks": {"w": draw(4, 4, 4)}, "embed": {"tokens": draw(4, 4)}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mean_and_the_first_of_three_replicas(mesh, dtype):
  params_M = replicas(3, dtype)
  exact_M = jax.tree.map(lambda x: np.asarray(x, np.float64), params_M)
  mean = replica_mean(params_M, mesh=mesh)
  first = first_replica(params_M, mesh=mesh)
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
  jax.tree.map(close, mean, jax.tree.map(lambda x: x.mean(axis=0), exact_M))
  jax.tree.map(
    np.testing.assert_array_equal, first, jax.tree.map(lambda x: x[0], exact_M)
  )
  assert {x.dtype for x in jax.tree.leaves((mean, first))} == {np.dtype("float32")}
