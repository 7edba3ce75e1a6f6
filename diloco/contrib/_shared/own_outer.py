"""The outer step of methods in which every replica has its own outer parameters."""

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from diloco.algorithm import optimizers
from diloco.algorithm.optimizers import Outer, OuterTuned
from diloco.algorithm.slices import one_of, put
from diloco.mesh.sharding import REPLICA
from diloco.util.types import PyTree


def step_each(
  params_M: PyTree,
  state_M: tuple[PyTree, PyTree],
  grads_M: PyTree,
  layers: np.ndarray,
  tuned: OuterTuned,
  outer: Outer,
  mesh: Mesh,
) -> tuple[PyTree, tuple[PyTree, PyTree], PyTree]:
  """Steps every replica's outer optimizer; the replica continues from the result.

  Args:
    params_M: parameters of all replicas.
    state_M: the fragment's outer parameters, float32, and optimizer state, leaves
      (M, ...).
    grads_M: what each replica steps along, float32 leaves (M, ...).
    layers: int32 (n,), the fragment's layers.
    tuned: learning rate and momentum.
    outer: the outer optimizer.
    mesh: the device mesh, over which state_M is sharded: replicas, then fsdp.

  Returns:
    New params_M; new state_M; the updates of the outer parameters, leaves (M, ...).
  """
  theta_M, opt_state_M = state_M
  step = optimizers.make_outer(outer, tuned).update
  updates_M, opt_state_M = jax.vmap(step)(grads_M, opt_state_M, theta_M)
  theta_M = optax.apply_updates(theta_M, updates_M)
  places = optimizers.outer_shardings(outer, one_of(theta_M), mesh, (REPLICA,))
  state_M = jax.lax.with_sharding_constraint((theta_M, opt_state_M), places)
  cast = lambda old_M, new_M: new_M.astype(old_M.dtype)
  return put(params_M, state_M[0], layers, cast), state_M, updates_M
