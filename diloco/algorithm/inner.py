"""The inner step: every replica trains alone, and one jitted program runs all replicas.

DrJAX maps the inner step over the leading axis, which is the axis of the replicas.
Replicas exchange nothing here, except gradients in joint steps. If every device has one
whole replica, each device runs the step of its own replica without the leading axis.
For data-parallel the leading axis has size 1: one model, whose gradient is averaged
over the whole mesh.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar, TypeVarTuple

import drjax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from diloco.algorithm.optimizers import Tuned, make_inner
from diloco.config import Config
from diloco.mesh.sharding import FSDP, REPLICA, on_each_device
from diloco.model import registry
from diloco.spec.shapes import microbatches
from diloco.util.types import PyTree

Result = TypeVar("Result")
More = TypeVarTuple("More")


class InnerMetrics(NamedTuple):
  """Metrics of one inner step; each is float32[M], sharded by replica."""

  loss: jax.Array  # Mean cross entropy over the replica's tokens, nats.
  grad_norm: jax.Array  # Global L2 norm of the gradient before clipping.
  update_norm: jax.Array  # Global L2 norm of the parameters' change.


@functools.partial(jax.jit, static_argnames=("c", "averaged"), donate_argnums=(0, 1))
def inner_step(
  params_M: PyTree,
  opt_state_M: PyTree,
  tokens_MxBxL: jax.Array,
  tuned: Tuned,
  *,
  c: Config,
  averaged: bool = False,
) -> tuple[PyTree, PyTree, InnerMetrics]:
  """Runs one inner step of all replicas; M is 1 for data-parallel.

  Args:
    params_M: parameters, leaves (M, ...); donated.
    opt_state_M: inner optimizer state, leaves (M, ...); donated.
    tokens_MxBxL: int32, B sequences for each replica.
    tuned: learning rate and weight decay.
    averaged: whether all replicas use their mean gradient (joint steps).

  Returns:
    New parameters, new optimizer state, metrics.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not c.one_model and mesh.shape[FSDP] == 1 and mesh.shape[REPLICA] == c.models:
    # Each device has one whole replica. The placement of the other replicas changes
    # neither the device's program nor any bit of the result.
    spec = P(REPLICA)
    alone = functools.partial(_whole_step, c, averaged)
    arrays = (params_M, opt_state_M, tokens_MxBxL)
    return on_each_device(alone, (spec, P()), spec)(arrays, tuned)
  grads_M, nll_M = _gradients_of_all(c, params_M, tokens_MxBxL)
  if averaged:
    grads_M = mean_of_all(c, grads_M)
  args = (params_M, opt_state_M, grads_M, nll_M)
  step = functools.partial(_step, c, tuned)
  if c.one_model:  # There is one model, so DrJAX has nothing to map.
    return jax.vmap(step)(*args)
  return each_replica(c, step, *args)


def _whole_step(
  c: Config,
  averaged: bool,
  arrays_1: tuple[PyTree, PyTree, jax.Array],
  tuned: Tuned,
) -> tuple[PyTree, PyTree, InnerMetrics]:
  """Runs the inner step of a device's only replica, without the leading axis."""
  params, opt_state, tokens_BxL = jax.tree.map(lambda x: x[0], arrays_1)
  grads, nll = _gradients(c, params, tokens_BxL)
  if averaged:
    (grads,) = _all_reduced(c, grads)
  return jax.tree.map(lambda x: x[None], _step(c, tuned, params, opt_state, grads, nll))


def _step(
  c: Config,
  tuned: Tuned,
  params: PyTree,
  opt_state: PyTree,
  grads: PyTree,
  nll: jax.Array,
) -> tuple[PyTree, PyTree, InnerMetrics]:
  """Updates one model by its inner optimizer."""
  optimizer = make_inner(c, tuned)
  updates, opt_state = optimizer.update(grads, opt_state, params)
  metrics = InnerMetrics(nll, _norm(grads), _norm(updates))
  return optax.apply_updates(params, updates), opt_state, metrics


def _gradients_of_all(
  c: Config, params_M: PyTree, tokens_MxBxL: jax.Array
) -> tuple[PyTree, jax.Array]:
  """Returns gradients and mean cross entropy of all models, leaves (M, ...)."""
  gradients = _mean_gradients if c.one_model else _gradients
  args = (params_M, tokens_MxBxL)
  if c.models == 1:  # With the leading axis, XLA for CPU fuses less.
    one = gradients(c, *jax.tree.map(lambda x: x[0], args))
    return jax.tree.map(lambda x: x[None], one)
  return each_replica(c, functools.partial(gradients, c), *args, in_turn=True)


def each_replica(
  c: Config, f: Callable[..., Result], *args_M: PyTree, in_turn: bool = False
) -> Result:
  """Maps a function over the replicas, which are sharded over the mesh.

  With `in_turn` and a mesh of one row, replicas run one by one. Then memory
  holds the activations of one replica only, and no matrix product is batched: XLA for
  CPU is slow at batched products.
  """
  if in_turn and jax.sharding.get_abstract_mesh().shape[REPLICA] == 1:
    return jax.lax.map(lambda args: f(*args), args_M)
  program = drjax.program(placements={REPLICA: c.replicas})
  return program(lambda *args: drjax.map_fn(f, args))(*args_M)


def _norm(tree: PyTree) -> jax.Array:
  """Returns the global L2 norm; sums in float32 even if the values are bfloat16."""
  return optax.tree.norm(optax.tree.cast(tree, jnp.float32))


def _gradients(
  c: Config, params: PyTree, tokens_BxL: jax.Array
) -> tuple[PyTree, jax.Array]:
  """Returns gradient and mean cross entropy over one replica's tokens."""
  # batch_axes is empty if the batch is not sharded here: a useless sharding constraint
  # makes XLA fuse less.
  mesh = jax.sharding.get_abstract_mesh()
  batch_axes = () if mesh.size == 1 or FSDP in mesh.manual_axes else (FSDP,)

  def loss(params: PyTree, tokens_BxL: jax.Array) -> tuple[jax.Array, jax.Array]:
    model = registry.get(c.model)
    return model.objective(c.model, params, tokens_BxL, batch_axes)

  grad = jax.grad(loss, has_aux=True)
  here = len(tokens_BxL) // (mesh.shape[FSDP] if batch_axes else 1)
  accumulate = microbatches(c.train.accumulate, here)
  if accumulate == 1:
    return grad(params, tokens_BxL)
  # Microbatch i takes the sequences i, i + accumulate, ...; so every fsdp shard of B
  # gives the same number of sequences to each microbatch.
  micro = tokens_BxL.reshape(-1, accumulate, tokens_BxL.shape[1]).swapaxes(0, 1)

  def body(total: PyTree, tokens: jax.Array) -> tuple[PyTree, None]:
    return jax.tree.map(jnp.add, total, grad(params, tokens)), None

  # The sum is float32, because a sum in bfloat16 loses small terms.
  like = jax.eval_shape(grad, params, micro[0])
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
  total, _ = jax.lax.scan(body, zeros, micro)
  return jax.tree.map(lambda x, like: (x / accumulate).astype(like.dtype), total, like)


def _mean_gradients(
  c: Config, params: PyTree, tokens_BxL: jax.Array
) -> tuple[PyTree, jax.Array]:
  """Averages `_gradients` over the mesh in inner.gradient_dtype (data-parallel).

  The all-reduce is explicit. If XLA inserted it, a parameter that is used twice, such
  as a tied embedding, would need two all-reduces.
  """

  return jax.shard_map(
    lambda params, tokens_BxL: _all_reduced(c, *_gradients(c, params, tokens_BxL)),
    in_specs=(P(), P(REPLICA)),
    out_specs=P(),
    axis_names={REPLICA},
    check_vma=False,
  )(params, tokens_BxL)


def mean_of_all(c: Config, grads_M: PyTree) -> PyTree:
  """Gives every replica the mean gradient; a device averages its own replicas first."""

  def mean(grads_M: PyTree) -> PyTree:
    device_mean = jax.tree.map(lambda x_M: x_M.mean(axis=0), grads_M)
    (means,) = _all_reduced(c, device_mean)
    return jax.tree.map(lambda x, like: jnp.broadcast_to(x, like.shape), means, grads_M)

  return jax.shard_map(
    mean,
    in_specs=P(REPLICA),
    out_specs=P(REPLICA),
    axis_names={REPLICA},
    check_vma=False,
  )(grads_M)


def _all_reduced(c: Config, grads: PyTree, *more: *More) -> tuple[PyTree, *More]:
  """Averages gradients, in inner.gradient_dtype, and `more` over the axis REPLICA."""

  def mean_of(sent: PyTree, *more: *More) -> tuple[PyTree, *More]:
    # XLA refuses an all-reduce over an axis of one device if another axis is sharded.
    alone = jax.sharding.get_abstract_mesh().shape[REPLICA] == 1
    means, *others = (sent, *more) if alone else jax.lax.pmean((sent, *more), REPLICA)
    return jax.tree.map(lambda x: x.astype(c.model.param_dtype), means), *others

  def mean_widened(sent: PyTree, *more: *More) -> tuple[PyTree, *More]:
    # XLA for CPU aborts when it has to widen this 16-bit reduction itself.
    return mean_of(jax.tree.map(jnp.float32, sent), *more)

  sent = jax.tree.map(lambda g: g.astype(c.inner.gradient_dtype), grads)
  return jax.lax.platform_dependent(sent, *more, cpu=mean_widened, default=mean_of)
