"""Averages over the replicas more or less than a fragment: DES-LOC and SPARTA.

Both run after an inner step and before the outer step, average float32 values with one
all-reduce, and leave the outer step as it is.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from diloco.algorithm.optimizers import make_inner
from diloco.algorithm.plan import Plan
from diloco.algorithm.state import Event, TrainState, abstract_params
from diloco.config import Config, ConfigError
from diloco.model import shapes, sharding
from diloco.model.shapes import Shapes
from diloco.model.sharding import FSDP, REPLICA
from diloco.wire import sizes

Tree = Any
FIRST, SECOND, SPARTA = "first_moments", "second_moments", "sparta"
# How optax calls the mean of squared gradients, and its largest value so far.
_SECOND_NAMES = ("nu", "nu_max", "sum_of_squares")
# Sends of fragments use the numbers 0, 1, ... in this place of the key.
_SPARTA_KEY = 2**32 - 1


class Moment(NamedTuple):
  """One leaf of the inner optimizer state that is shaped like a parameter.

  Attributes:
    leaf: number of the leaf in the flattened optimizer state.
    kind: FIRST or SECOND.
    place: partition spec of the leaf, with its leading axis.
    values: number of values on all devices of a replica.
  """

  leaf: int
  kind: str
  place: P
  values: int


def periods(c: Config) -> tuple[int, ...]:
  """Returns the steps between two averages of each kind in use.

  Inner steps that are launched together must end at each multiple of these.

  Raises:
    ConfigError: des_loc asks for moments that the inner optimizer does not have.
  """
  every = c.averages()
  if not every:
    return ()
  with_lead = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
  params_1 = jax.tree.map(with_lead, abstract_params(c))
  state_1 = jax.eval_shape(jax.vmap(make_inner(c).init), params_1)
  known = {moment.kind for moment in moments(shapes.parameters(c.model), state_1)}
  for kind, name in ((FIRST, "first"), (SECOND, "second")):
    if kind in every and kind not in known:
      raise ConfigError(
        f"des_loc.{name}_every is {every[kind]}, but inner.optimizer is"
        f" {c.inner.optimizer!r}, which keeps no {name} moments; set it to 0."
      )
  return tuple(every.values())


def is_due(c: Config, t: int) -> bool:
  """Returns whether anything is averaged after inner step t."""
  return any(t % n == 0 for n in c.averages().values())


def average(
  c: Config, t: int, plan: Plan, state: TrainState
) -> tuple[TrainState, list[Event]]:
  """Averages what is due after inner step t; other steps cost nothing.

  Args:
    t: number of finished inner steps.
    state: the state before the outer step; what is averaged is donated.

  Returns:
    The new state, and an event for each kind of average.
  """
  params, opt_state, events = state.params, state.opt_state, list[Event]()
  for kind, every in c.averages().items():
    if t % every:
      continue
    if kind == SPARTA:
      key = plan.key(t, _SPARTA_KEY)
      with TraceAnnotation("sparta"):
        params = sparta(params, key, share=c.sparta.share, mesh=plan.mesh)
      fsdp = plan.mesh.shape[FSDP]
      values = sizes.sparta_values(c.sparta.share, plan.parameters, fsdp)
    else:
      with TraceAnnotation("des_loc"):
        opt_state, values = des_loc(plan, opt_state, kind)
    sent = sizes.average_bytes(c.replicas, values)
    events.append(Event("average", kind, t, sent, {}))
  return TrainState(params, opt_state, state.outer), events


def des_loc(plan: Plan, opt_state_M: Tree, kind: str) -> tuple[Tree, int]:
  """Averages moments of the inner optimizer over the replicas, as in DES-LOC.

  In DiLoCo every replica keeps the state of its inner optimizer for itself. DES-LOC
  (Desynced Low Communication Adaptive Optimizers, arXiv 2505.22549) averages the first
  and the second moments as well, each at its own period, since a moment with a longer
  half-life changes more slowly: parameters every K steps, first moments every 3 K,
  second moments every 6 K. Here the outer step treats the parameters as before; the
  paper's plain mean of the parameters is `outer.optimizer=sgd` with
  `outer.learning_rate=1`. A first moment is any leaf of the optimizer state that is
  shaped like a parameter and is not called nu, nu_max or sum_of_squares; the step
  counts are equal on all replicas and stay.

  The authors prove that the method converges, and that a second moment has to be
  averaged now and then for guarantees with high probability. They report, for language
  models up to 1.7B, the loss of Local Adam (all three at one period) with half of its
  bytes, and 170 times fewer bytes than data-parallel (from the abstract and the notes
  of others; the paper itself was not at hand).

  Args:
    opt_state_M: inner optimizer state, leaves (M, ...); averaged leaves are donated.
    kind: FIRST or SECOND.

  Returns:
    The new state, and the number of values that one replica's devices average.
  """
  leaves, structure = jax.tree.flatten(opt_state_M)
  due = moments_of(plan, opt_state_M, kind)
  means = replica_means(
    [leaves[moment.leaf] for moment in due],
    places=tuple(moment.place for moment in due),
    mesh=plan.mesh,
  )
  for moment, mean in zip(due, means):
    leaves[moment.leaf] = mean
  return jax.tree.unflatten(structure, leaves), sum(moment.values for moment in due)


def moments_of(plan: Plan, opt_state_M: Tree, kind: str) -> list[Moment]:
  """Lists the moments of one kind, FIRST or SECOND."""
  found = moments(plan.parameters, opt_state_M, plan.mesh.shape[FSDP])
  return [moment for moment in found if moment.kind == kind]


def moments(parameters: Shapes, opt_state_M: Tree, fsdp: int = 1) -> list[Moment]:
  """Lists the leaves of an optimizer state that are shaped like parameters.

  The path of such a leaf ends in the path of its parameter, after the moment's name.

  Args:
    parameters: shapes of one replica's parameters.
    opt_state_M: leaves (M, ...), or their shapes.
  """
  by_path, found = dict(shapes.leaves(parameters)), list[Moment]()
  for leaf, (path, x_M) in enumerate(jax.tree.leaves_with_path(opt_state_M)):
    names, shape = tuple(map(sharding.key, path)), x_M.shape[1:]
    starts = [i for i in range(1, len(names)) if by_path.get(names[i:]) == shape]
    for i in starts[:1]:
      kind = SECOND if names[i - 1] in _SECOND_NAMES else FIRST
      place = P(REPLICA, *sharding.weight_spec(path[i:], shape, fsdp))
      values = fsdp * math.prod(shapes.shard(names[i:], shape, fsdp))
      found.append(Moment(leaf, kind, place, values))
  return found


@partial(jax.jit, static_argnames=("places", "mesh"), donate_argnums=0)
def replica_means(
  leaves_M: list[jax.Array], *, places: Sequence[P], mesh: Mesh
) -> list[jax.Array]:
  """Replaces arrays (M, ...) by their means over the replicas, computed in float32.

  Args:
    leaves_M: donated.
    places: partition spec of each array.
  """

  def local(leaves_M: list[jax.Array]) -> list[jax.Array]:
    means = [x_M.astype(jnp.float32).mean(axis=0) for x_M in leaves_M]
    means = jax.lax.pmean(means, REPLICA)
    spread = lambda mean, x_M: jnp.broadcast_to(mean, x_M.shape).astype(x_M.dtype)
    return [spread(mean, x_M) for mean, x_M in zip(means, leaves_M)]

  at = list(places)
  return jax.shard_map(local, mesh=mesh, in_specs=(at,), out_specs=at, check_vma=False)(
    leaves_M
  )


@partial(jax.jit, static_argnames=("share", "mesh"), donate_argnums=0)
def sparta(params_M: Tree, key: jax.Array, *, share: float, mesh: Mesh) -> Tree:
  """Averages a few random parameters over the replicas, as in SPARTA.

  DiLoCo's replicas drift apart for H steps. SPARTA (sparse parameter averaging, EXO
  Labs, 2025; code: github.com/exo-explore/gym, exogym/strategy/sparta.py and
  sparta_diloco.py) averages 0.05% to 0.5% of the parameters after every inner step,
  drawn anew each time, so that after some hundred steps nearly all were averaged.
  Replicas draw the same values from a shared key, so only values are sent. The code of
  EXO draws every value with the probability `share` and broadcasts the mask. Here a
  layer's tensor of S values is cut into K = ceil(share S) runs of equal length, and one
  value of each run is drawn, so that an average always has the same bytes. If fsdp
  shards a tensor, each shard is drawn like a separate tensor. The outer step follows,
  as in EXO's SPARTADiLoCoStrategy.

  The authors report that 0.1% a step keeps the replicas' parameters correlated above
  0.9, that the averages may be late by some steps, and that together with DiLoCo H may
  be 100 times longer at a perplexity 14% lower than DiLoCo's (from notes of others on
  their workshop paper, openreview.net/forum?id=stFPf3gzq1, which was not at hand).

  Args:
    params_M: parameters of all replicas, leaves (M, ...); donated.
    key: PRNG key of this step.
    share: share of every layer's tensor.
  """
  places = sharding.specs(params_M, mesh, (REPLICA,))

  def local(params_M: Tree, key: jax.Array) -> Tree:
    leaves, structure = jax.tree.flatten_with_path(params_M)
    layers, drawn = list[jax.Array](), list[Any]()
    is_place = lambda x: isinstance(x, P)
    for i, ((path, x_M), place) in enumerate(
      zip(leaves, jax.tree.leaves(places, is_leaf=is_place))
    ):
      n, s, _ = sizes.layout(tuple(map(sharding.key, path)), x_M.shape[1:])
      own = jax.random.fold_in(key, i)
      # Devices with copies of a tensor draw equal values; those with shards do not.
      if FSDP in place:
        own = jax.random.fold_in(own, jax.lax.axis_index(FSDP))
      index_NxK = draw(own, n, s, sizes.share_of(share, s))
      layers.append(x_M.reshape(-1, n, s))
      drawn.append((slice(None), jnp.arange(n)[:, None], index_NxK))
    means = [x_M[at].astype(jnp.float32).mean(axis=0) for x_M, at in zip(layers, drawn)]
    flat, unravel = ravel_pytree(means)
    means = unravel(jax.lax.pmean(flat, REPLICA))  # One all-reduce.
    put = lambda x_M, at, mean: x_M.at[at].set(
      mean.astype(x_M.dtype), unique_indices=True
    )
    found = map(put, layers, drawn, means)
    return jax.tree.unflatten(
      structure, [new_M.reshape(x_M.shape) for new_M, (_, x_M) in zip(found, leaves)]
    )

  return jax.shard_map(
    local, mesh=mesh, in_specs=(places, P()), out_specs=places, check_vma=False
  )(params_M, key)


def draw(key: jax.Array, n: int, s: int, k: int) -> jax.Array:
  """Draws k of s values in each of n layers, one of each run of s / k values.

  If k does not divide s, the first runs are one value longer.

  Returns:
    Indices int32 (n, k), ascending and different.
  """
  length, longer = divmod(s, k)
  run_K = jnp.arange(k)
  first_K = run_K * length + jnp.minimum(run_K, longer)
  return jax.random.randint(key, (n, k), first_K, first_K + length + (run_K < longer))
