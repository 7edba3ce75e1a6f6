"""The arrays that training changes, their first values, and means over replicas."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diloco.algorithm import optimizers
from diloco.algorithm.sync_metrics import Metric
from diloco.config import Config
from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.mesh.sharding import REPLICA
from diloco.model import registry
from diloco.spec import shapes
from diloco.util.types import PyTree

T = TypeVar("T")
# A fragment's theta, opt_state and codec_state, or their shapes, or their shardings.
Parts = tuple[PyTree, PyTree, PyTree]


@flax.struct.dataclass
class InFlight:
  """A fragment that was sent and is not yet updated.

  Attributes:
    payload: uint8 [M, fsdp, bytes], see `wire.exchange`.
    arrived: whether every replica already holds the payloads of all replicas, because
      the exchange overlapped with inner steps. A checkpoint does not keep this flag, so
      a resumed run sends the payload again.
  """

  payload: jax.Array
  arrived: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class OuterState:
  """The arrays that the outer step changes; see `placement` for where they lie.

  Attributes:
    theta: outer parameters of each fragment, {'blocks': (n, ...)} and/or
      {'embed': ...}, float32, sharded over fsdp, the same for every replica.
    opt_state: outer optimizer state of each fragment.
    codec_state: compressor state of each fragment, leaves (M, ...) shaped and sharded
      like the replicas' parameters; empty if the compressor has no state.
    in_flight: {p: payload} of each fragment that was sent and is not yet updated.
    own: for each fragment, {name: state} of plug-ins; see `plugins.OuterStep`.
    steps: in the library, int32 [4] on the host: finished inner steps, the step of the
      last drain (0: none), and two digests of the method. None in the trainer, whose
      checkpoints record all this.
  """

  theta: tuple[PyTree, ...]
  opt_state: tuple[PyTree, ...]
  codec_state: tuple[PyTree, ...]
  in_flight: dict[int, InFlight]
  own: tuple[dict[str, PyTree], ...] = ()
  steps: PyTree = None

  def fragment(self, p: int) -> Parts:
    """Returns theta, opt_state and codec_state of fragment p."""
    return self.theta[p], self.opt_state[p], self.codec_state[p]

  def with_fragment(self, p: int, theta: PyTree, opt_state: PyTree) -> "OuterState":
    """Returns the state with a new theta and opt_state of fragment p."""
    return dataclasses.replace(
      self,
      theta=replaced(self.theta, p, theta),
      opt_state=replaced(self.opt_state, p, opt_state),
    )

  def with_arrived(
    self, sent: Sequence[int], payloads: Sequence[jax.Array]
  ) -> "OuterState":
    """Returns the state after an exchange that overlapped with inner steps.

    Args:
      sent: the fragments in flight whose payloads were exchanged.
      payloads: for each of these fragments, the payloads of all replicas.
    """
    arrived = {p: InFlight(x, arrived=True) for p, x in zip(sent, payloads)}
    return dataclasses.replace(self, in_flight={**self.in_flight, **arrived})

  def with_own(self, p: int, name: str, own: PyTree) -> "OuterState":
    """Returns the state with new arrays `own` of the plug-in `name` for fragment p."""
    mine = {**self.own[p], name: own}
    return dataclasses.replace(self, own=replaced(self.own, p, mine))

  def with_codec_state(self, p: int, codec_state: PyTree) -> "OuterState":
    """Returns the state with a new compressor state of fragment p."""
    states = replaced(self.codec_state, p, codec_state)
    return dataclasses.replace(self, codec_state=states)

  def after_send(self, p: int, codec_state: PyTree, payload: jax.Array) -> "OuterState":
    """Returns the state with fragment p in flight."""
    flying = {**self.in_flight, p: InFlight(payload)}
    return dataclasses.replace(self.with_codec_state(p, codec_state), in_flight=flying)

  def after_update(self, p: int, theta: PyTree, opt_state: PyTree) -> "OuterState":
    """Returns the state with fragment p updated and no longer in flight."""
    flying = {k: sent for k, sent in self.in_flight.items() if k != p}
    return dataclasses.replace(
      self.with_fragment(p, theta, opt_state), in_flight=flying
    )


@flax.struct.dataclass
class TrainState:
  """The arrays of a run; M is 1 for data-parallel.

  Attributes:
    params: inner parameters of all replicas, leaves (M, N, ...) and (M, ...) of
      `model.param_dtype`. Inner steps and merges change them.
    opt_state: inner optimizer state, leaves (M, ...). No outer step changes it.
    outer: outer state; that of data-parallel has no fragments.
  """

  params: PyTree
  opt_state: PyTree
  outer: OuterState


@dataclasses.dataclass(frozen=True)
class Event:
  """An event after an inner step, such as a send, for the log and the ledger.

  Attributes:
    kind: send, receive, average, or a kind of a plug-in.
    fragment: index p of the fragment; for an average, the kind of average.
    step: number of finished inner steps.
    sent: bytes that one replica sends; 0 for a receive.
    metrics: arrays that the devices may still be computing.
  """

  kind: str
  fragment: int | str
  step: int
  sent: int
  metrics: Mapping[str, Metric]


def abstract_params(c: Config) -> PyTree:
  """Describes shapes and dtypes of one replica's parameters."""
  return sharding.abstract(shapes.parameters(c.model), c.model.param_dtype)


@functools.partial(jax.jit, static_argnames="mesh")
def replica_mean(params_M: PyTree, *, mesh: Mesh) -> PyTree:
  """Averages the parameters over the replicas; float32, sharded over fsdp."""
  mean = jax.tree.map(lambda x_M: x_M.astype(jnp.float32).mean(axis=0), params_M)
  return jax.lax.with_sharding_constraint(mean, sharding.shardings(mean, mesh))


@functools.partial(jax.jit, static_argnames="mesh")
def first_replica(params_M: PyTree, *, mesh: Mesh) -> PyTree:
  """Returns the parameters of replica 0; float32, sharded over fsdp."""
  first = jax.tree.map(lambda x_M: x_M[0].astype(jnp.float32), params_M)
  return jax.lax.with_sharding_constraint(first, sharding.shardings(first, mesh))


def init_inner(
  c: Config, key: jax.Array, params: PyTree | None = None
) -> tuple[PyTree, PyTree]:
  """Makes parameters and inner optimizer state, the same for all replicas."""
  if params is None:
    params = registry.get(c.model).init(c.model, key)
  params_M = jax.tree.map(
    lambda x: jnp.broadcast_to(x[None], (c.models, *x.shape)), params
  )
  return params_M, jax.vmap(optimizers.make_inner(c).init)(params_M)


def abstract_inner(c: Config, mesh: Mesh) -> tuple[PyTree, PyTree]:
  """Describes shapes and shardings of inner parameters and inner optimizer state.

  Raises:
    ConfigError: inner.optimizer cannot update these parameters; or it averages them,
      which needs data-parallel and float32.
  """
  optimizer, leading = optimizers.make_inner(c), (None if c.one_model else REPLICA,)
  opt_at = optimizers.state_shardings(
    "inner.optimizer", optimizer, abstract_params(c), mesh, leading
  )
  # The key is made in eval_shape too, because the devices of a dry run cannot compute.
  params_M, opt_state_M = jax.eval_shape(lambda: init_inner(c, jax.random.key(0)))
  can_average = (c.algorithm, c.model.param_dtype) == ("data_parallel", "float32")
  if optimizers.averages(opt_state_M) and not can_average:
    raise ConfigError(
      f"inner.optimizer is {c.inner.optimizer}, which averages one model in float32,"
      f" but algorithm is {c.algorithm} and model.param_dtype {c.model.param_dtype};"
      " choose data_parallel and float32."
    )
  params_at = sharding.shardings(params_M, mesh, leading)
  return sharding.structs((params_M, opt_state_M), (params_at, opt_at))


def replaced(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
  """Returns the items with `item` in place of the old item at `index`."""
  return (*items[:index], item, *items[index + 1 :])
