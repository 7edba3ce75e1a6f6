"""Everything that training changes, in one dataclass, and how it begins."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from diloco import config as config_lib
from diloco.algorithm.outer import Outer, OuterState
from diloco.model import decoder as model_lib
from diloco.model import sharding as mesh_lib


@flax.struct.dataclass
class TrainState:
  """The arrays of a run; M is 1 for data-parallel.

  Attributes:
    params: inner parameters of all replicas, leaves (M, N, ...) and (M, ...) of
      `model.param_dtype`; changed by the inner step and by merges.
    opt_state: inner optimizer state, every leaf leading with M; never synchronised.
    outer: outer parameters, outer optimizer state and payloads in flight; None for
      data-parallel.
  """

  params: Any
  opt_state: Any
  outer: OuterState | None


def abstract_params(c) -> dict:
  """Shapes and types of one replica's parameters."""
  dims = model_lib.ModelDims.from_config(c)
  return jax.eval_shape(lambda: model_lib.init_params(dims, jax.random.key(0)))


def abstract_state(c, mesh, optimizer, outer: Outer | None) -> TrainState:
  """Shapes, types and shardings of a fresh state; nothing is computed.

  Outer state is given where programs use it, on the devices.
  """

  def placed(params, opt_state, replicated: bool):
    return jax.tree.map(
      lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
      (params, opt_state),
      mesh_lib.state_shardings(
        params, opt_state, mesh, replicated, c.algorithm == "data_parallel"
      ),
    )

  init = _make_init(c, optimizer)
  params_M, opt_state_M = jax.eval_shape(lambda: init(jax.random.key(0)))
  outer_state = None
  if outer:
    fresh = jax.eval_shape(outer.fresh, params_M)
    pairs = [
      placed(theta, opt_state, replicated=False)
      for theta, opt_state in zip(fresh.theta, fresh.opt_state)
    ]
    thetas, opt_states = zip(*pairs)
    outer_state = OuterState(tuple(thetas), tuple(opt_states), {})
  params_M, opt_state_M = placed(params_M, opt_state_M, replicated=True)
  return TrainState(params_M, opt_state_M, outer_state)


def init_state(
  c, mesh, optimizer: optax.GradientTransformation, outer: Outer | None
) -> TrainState:
  """Replicas that share one initialisation, drawn from the seed where it will lie."""
  init = _make_init(c, optimizer)
  params_M, opt_state_M = jax.eval_shape(init, jax.random.key(0))
  places = mesh_lib.state_shardings(
    params_M, opt_state_M, mesh, True, c.algorithm == "data_parallel"
  )
  params_M, opt_state_M = jax.jit(init, out_shardings=places)(jax.random.key(c.seed))
  return TrainState(params_M, opt_state_M, outer.init(params_M) if outer else None)


def replica_mean(params_M, mesh):
  """Parameters averaged over the replicas, float32, sharded over fsdp."""
  return _of_replicas(_mean, params_M, mesh)


def first_replica(params_M, mesh):
  """Parameters of replica 0, float32, sharded over fsdp."""
  return _of_replicas(_first, params_M, mesh)


def _of_replicas(reduce, params_M, mesh):
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params_M)
  return jax.jit(reduce, out_shardings=mesh_lib.shardings(one, mesh))(params_M)


def _mean(params_M):
  return jax.tree.map(lambda x_M: x_M.astype(jnp.float32).mean(axis=0), params_M)


def _first(params_M):
  return jax.tree.map(lambda x_M: x_M[0].astype(jnp.float32), params_M)


def _make_init(c, optimizer):
  """A function from a key to the parameters and optimizer state of all replicas."""
  replicas = config_lib.trained_replicas(c)
  dims = model_lib.ModelDims.from_config(c)

  def init(key):
    params = model_lib.init_params(dims, key)
    params_M = jax.tree.map(
      lambda x: jnp.broadcast_to(x[None], (replicas, *x.shape)), params
    )
    return params_M, jax.vmap(optimizer.init)(params_M)

  return init
