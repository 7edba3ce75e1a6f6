"""Everything that training changes, how it begins, and which models it stands for."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.algorithm import fragments, optimizers
from diloco.algorithm.plan import Plan
from diloco.config import Config
from diloco.config.fields import OuterConfig, WireConfig
from diloco.model import registry, shapes, sharding
from diloco.model.sharding import REPLICA
from diloco.wire import exchange

Tree = Any


@flax.struct.dataclass
class OuterState:
  """The outer state, at home (`diloco.algorithm.home`); the outer step changes it.

  Attributes:
    theta: per fragment, its outer parameters: {'blocks': (n, ...)} and/or
      {'embed': ...}, float32, sharded over fsdp, the same on every replica.
    opt_state: per fragment, its outer optimizer's state.
    codec_state: per fragment, the compressor's state: leaves (M, ...) shaped and
      sharded like the replicas' parameters; empty without state.
    in_flight: {str(p): payload} of the fragments sent and not yet updated, uint8
      [M, fsdp, bytes].
  """

  theta: tuple[Tree, ...]
  opt_state: tuple[Tree, ...]
  codec_state: tuple[Tree, ...]
  in_flight: dict[str, Any]

  def after_send(
    self, p: int, theta: Tree, opt_state: Tree, codec_state: Tree, payload: jax.Array
  ) -> "OuterState":
    """With fragment p in flight."""
    return OuterState(
      _with(self.theta, p, theta),
      _with(self.opt_state, p, opt_state),
      _with(self.codec_state, p, codec_state),
      {**self.in_flight, str(p): payload},
    )

  def after_update(self, p: int, theta: Tree, opt_state: Tree) -> "OuterState":
    """With fragment p updated, and no longer in flight."""
    return OuterState(
      _with(self.theta, p, theta),
      _with(self.opt_state, p, opt_state),
      self.codec_state,
      {k: payload for k, payload in self.in_flight.items() if k != str(p)},
    )


@flax.struct.dataclass
class TrainState:
  """The arrays of a run; M is 1 for data-parallel.

  Attributes:
    params: inner parameters of all replicas, leaves (M, N, ...) and (M, ...) of
      `model.param_dtype`; changed by inner steps and merges.
    opt_state: inner optimizer state, every leaf leading with M; never synchronised.
    outer: outer state; None for data-parallel.
  """

  params: Tree
  opt_state: Tree
  outer: OuterState | None


@dataclasses.dataclass(frozen=True)
class Event:
  """A send or a receive of one fragment.

  Attributes:
    kind: send or receive.
    fragment: which one.
    step: finished inner steps.
    sent: bytes that one replica sends; 0 for a receive.
    metrics: arrays, not waited for.
  """

  kind: str
  fragment: int
  step: int
  sent: int
  metrics: dict[str, Any]


def init_state(c: Config, mesh: Mesh, plan: Plan | None) -> TrainState:
  """Replicas that share one initialisation, drawn from the seed where it will lie."""
  places = jax.tree.map(lambda x: x.sharding, _inner_structs(c, mesh))
  init = jax.jit(functools.partial(_init_inner, c), out_shardings=places)
  params_M, opt_state_M = init(jax.random.key(c.seed))
  outer = init_outer(plan, params_M) if plan else None
  return TrainState(params_M, opt_state_M, outer)


def init_outer(plan: Plan, params_M: Tree) -> OuterState:
  """The first outer state, at home; the outer parameters are the first replica's."""
  parts = []
  for p, layers in enumerate(plan.layers):
    theta, opt_state, codec_state = _init_fragment(params_M, layers, **plan.kind(p))
    parts.append((*plan.home.keep((theta, opt_state)), codec_state))
  thetas, opt_states, codec_states = zip(*parts)
  return OuterState(thetas, opt_states, codec_states, {})


def abstract_state(
  c: Config,
  mesh: Mesh,
  plan: Plan | None,
  in_flight: Iterable[int] = (),
  fsdp: int | None = None,
) -> TrainState:
  """Shapes, types and shardings of a state; nothing is computed.

  Args:
    c: the config.
    mesh: the device mesh.
    plan: how replicas are synchronised.
    in_flight: fragments whose payloads the state holds.
    fsdp: axis of the mesh that encoded them; None: that of this mesh.
  """
  params_M, opt_state_M = _inner_structs(c, mesh)
  if plan is None:
    return TrainState(params_M, opt_state_M, None)
  parts = []
  for p, layers in enumerate(plan.layers):
    init = functools.partial(_init_fragment, **plan.kind(p))
    state = jax.eval_shape(init, params_M, layers)
    theta_at, opt_at, codec_at = _outer_shardings(state, plan.outer, mesh)
    places = (*plan.home.shardings((theta_at, opt_at)), codec_at)
    parts.append(sharding.structs(state, places))
  payloads = {str(p): plan.payload(p, fsdp) for p in in_flight}
  thetas, opt_states, codec_states = zip(*parts)
  outer = OuterState(thetas, opt_states, codec_states, payloads)
  return TrainState(params_M, opt_state_M, outer)


def abstract_params(c: Config) -> Tree:
  """Shapes and types of one replica's parameters."""
  return sharding.abstract(shapes.parameters(c.model), c.model.param_dtype)


def outer_params(plan: Plan, state: OuterState) -> Tree:
  """The outer parameters of the whole model, each fragment as of its own last sync.

  Returns:
    One replica's tree, float32, sharded over fsdp.
  """
  plan.jobs.settle()  # What follows may use all processes' devices.
  thetas = map(plan.home.fetch, state.theta)
  return fragments.join(thetas, plan.layers, plan.parameters, plan.mesh)


def final_params(plan: Plan | None, state: TrainState, mesh: Mesh) -> Tree:
  """The parameters that a run stands for (2501.18512, Table 3).

  The outer parameters, float32; for data-parallel the model's.
  """
  if plan is None or state.outer is None:
    return first_replica(state.params, mesh=mesh)
  return outer_params(plan, state.outer)


@functools.partial(jax.jit, static_argnames="mesh")
def replica_mean(params_M: Tree, *, mesh: Mesh) -> Tree:
  """Parameters averaged over the replicas, float32, sharded over fsdp."""
  mean = jax.tree.map(lambda x_M: x_M.astype(jnp.float32).mean(axis=0), params_M)
  return jax.lax.with_sharding_constraint(mean, sharding.shardings(mean, mesh))


@functools.partial(jax.jit, static_argnames="mesh")
def first_replica(params_M: Tree, *, mesh: Mesh) -> Tree:
  """Parameters of replica 0, float32, sharded over fsdp."""
  first = jax.tree.map(lambda x_M: x_M[0].astype(jnp.float32), params_M)
  return jax.lax.with_sharding_constraint(first, sharding.shardings(first, mesh))


def _init_inner(c: Config, key: jax.Array) -> tuple[Tree, Tree]:
  """Parameters and inner optimizer state of all replicas, all alike."""
  params = registry.get(c.model).init(c.model, key)
  params_M = jax.tree.map(
    lambda x: jnp.broadcast_to(x[None], (c.models, *x.shape)), params
  )
  return params_M, jax.vmap(optimizers.make_inner(c).init)(params_M)


def _inner_structs(c: Config, mesh: Mesh) -> tuple[Tree, Tree]:
  """Parameters and inner optimizer state as shapes with shardings."""
  lead, optimizer = sharding.lead(c), optimizers.make_inner(c)
  # The key inside: devices of a dry run can compute nothing.
  params_M, opt_state_M = jax.eval_shape(lambda: _init_inner(c, jax.random.key(0)))
  params_at = sharding.shardings(params_M, mesh, lead)
  opt_at = optimizers.state_shardings(
    "inner.optimizer", optimizer, abstract_params(c), mesh, lead
  )
  return sharding.structs((params_M, opt_state_M), (params_at, opt_at))


@functools.partial(jax.jit, static_argnames=("keys", "wire", "outer", "mesh"))
def _init_fragment(
  params_M: Tree,
  layers: np.ndarray,
  *,
  keys: tuple[str, ...],
  wire: WireConfig,
  outer: OuterConfig,
  mesh: Mesh,
) -> tuple[Tree, Tree, Tree]:
  """A fragment's theta, opt_state and codec_state, from replicas that are all alike."""
  part_M = fragments.take(params_M, keys, layers)
  theta = jax.tree.map(lambda x_M: x_M[0].astype(jnp.float32), part_M)
  opt_state = optimizers.make_outer(outer).init(theta)
  codec_state = exchange.init_state(wire, jax.tree.map(jnp.float32, part_M))
  state = (theta, opt_state, codec_state)
  return jax.lax.with_sharding_constraint(state, _outer_shardings(state, outer, mesh))


def _outer_shardings(state: tuple, outer: OuterConfig, mesh: Mesh) -> tuple:
  """Of a fragment's theta, opt_state and codec_state on the devices."""
  theta, _, codec_state = state
  theta_at, opt_at = optimizers.outer_shardings(outer, theta, mesh)
  led = jax.tree.map(lambda at: NamedSharding(mesh, P(REPLICA, *at.spec)), theta_at)
  codec_at = jax.tree.map(
    lambda at, tensor: jax.tree.map(lambda _: at, tensor), led, codec_state
  )
  return theta_at, opt_at, codec_at


def _with(items: tuple, index: int, item) -> tuple:
  return (*items[:index], item, *items[index + 1 :])
