"""DES-LOC (arXiv 2505.22549): averages the moments of the inner optimizer as well.

In DiLoCo every replica keeps the state of its inner optimizer for itself. DES-LOC
(Desynced Low Communication Adaptive Optimizers) averages the first and the second
moments over the replicas, each at its own period, since a moment with a longer
half-life changes more slowly: parameters every K steps, first moments every 3 K, second
moments every 6 K. Here the outer step synchronises the parameters, as without DES-LOC.
For the paper's plain mean of the parameters, set `outer.optimizer=sgd` and
`outer.learning_rate=1`. Step counts are equal on all replicas and need no average.

Source: the abstract and the notes of others; we have not read the paper itself. The
authors prove that the method converges. Their guarantees with high probability need
second moments that are averaged from time to time. They report, for language models
up to 1.7B, the loss of Local Adam (which averages all three at one period) with half of
its bytes, and 170 times fewer bytes than data-parallel.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from diloco.algorithm.optimizers import make_inner
from diloco.algorithm.plan import Plan
from diloco.algorithm.state import TrainState, abstract_params
from diloco.config import Config
from diloco.contrib._shared.rules import alone, averages_of
from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.mesh.sharding import FSDP, REPLICA
from diloco.spec import plugins, shapes
from diloco.spec.fields import Count
from diloco.spec.plugins import Average, Call
from diloco.spec.shapes import Shapes, num_params
from diloco.util.types import PyTree

FIRST, SECOND = "first_moments", "second_moments"
# Names of the moments in the states of optax's optimizers. Other state that is shaped
# like a parameter, such as the previous gradient, is not averaged.
_KINDS = {
  **dict.fromkeys(("mu", "trace", "m"), FIRST),
  **dict.fromkeys(("nu", "nu_max", "sum_of_squares", "n"), SECOND),
}


@dataclasses.dataclass(frozen=True)
class DesLoc(plugins.Extension):
  """DES-LOC: averages the inner optimizer's moments too (arXiv 2505.22549).

  An average waits for all exchanges, so inner steps overlap an exchange only up to it.
  """

  # Steps between two averages of the first moments (AdamW's mu) over the replicas, in
  # float32. The paper uses 3 * sync_every. 0: never, as in DiLoCo.
  first_every: Count = 0
  # Steps between two averages of the second moments (AdamW's nu). The paper uses
  # 6 * sync_every. 0: never.
  second_every: Count = 0

  def effects(self, c: Config) -> dict[str, tuple[bool, str]]:
    return {"des_loc.first_every": alone(c), "des_loc.second_every": alone(c)}

  def averages(self, c: Config) -> dict[str, Average]:
    """Counts one first and one second moment per parameter, as AdamW has."""
    periods = {FIRST: self.first_every, SECOND: self.second_every}
    total = num_params(c.model)
    run = lambda kind: partial(self.average, kind)
    return {k: Average(every, total, run(k)) for k, every in periods.items() if every}

  def check(self, c: Config) -> None:
    """Refuses moments that the inner optimizer does not have."""
    with_leading = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
    if not self.averages(c):
      return
    params_1 = jax.tree.map(with_leading, abstract_params(c))
    state_1 = jax.eval_shape(jax.vmap(make_inner(c).init), params_1)
    known = {moment.kind for moment in moments(shapes.parameters(c.model), state_1)}
    for kind, name in ((FIRST, "first"), (SECOND, "second")):
      every = getattr(self, f"{name}_every")
      if every and kind not in known:
        raise ConfigError(
          f"des_loc.{name}_every is {every}, but inner.optimizer is"
          f" {c.inner.optimizer!r}, which keeps no {name} moments; set it to 0."
        )

  def average(
    self, kind: str, t: int, plan: Plan, state: TrainState
  ) -> tuple[TrainState, int]:
    opt_state, values = average(plan, state.opt_state, kind)
    return dataclasses.replace(state, opt_state=opt_state), values

  def programs(self, c: Config, plan: Plan, state: TrainState) -> Iterator[Call]:
    leaves = jax.tree.leaves(state.opt_state)
    for kind in self.averages(c):
      due = moments_of(plan, state.opt_state, kind)
      arrays = [leaves[moment.leaf] for moment in due]
      places = tuple(moment.place for moment in due)
      kwargs = {"places": places, "mesh": plan.mesh}
      held = {"inner optimizer": arrays}
      yield Call(kind, held, replica_means, (arrays,), kwargs)


plugins.register("des_loc", DesLoc)
plugins.RULES += map(averages_of, ("des_loc.first_every", "des_loc.second_every"))


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


def average(plan: Plan, opt_state_M: PyTree, kind: str) -> tuple[PyTree, int]:
  """Averages moments of the inner optimizer over the replicas.

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


def moments_of(plan: Plan, opt_state_M: PyTree, kind: str) -> list[Moment]:
  """Lists the moments of one kind, FIRST or SECOND."""
  found = moments(plan.parameters, opt_state_M, plan.mesh.shape[FSDP])
  return [moment for moment in found if moment.kind == kind]


def moments(parameters: Shapes, opt_state_M: PyTree, fsdp: int = 1) -> list[Moment]:
  """Lists the leaves of an optimizer state that are shaped like parameters.

  The path of such a leaf ends in the path of its parameter, after the moment's name.

  Args:
    parameters: shapes of one replica's parameters.
    opt_state_M: leaves (M, ...), or their shapes.
    fsdp: devices that share a replica's parameters.

  Returns:
    Moments of both kinds, in the order of the leaves.
  """
  by_path, found = dict(shapes.leaves(parameters)), list[Moment]()
  for leaf, (path, x_M) in enumerate(jax.tree.leaves_with_path(opt_state_M)):
    names, shape = sharding.names(path), x_M.shape[1:]
    for i in range(1, len(names)):
      kind = _KINDS.get(names[i - 1])
      if kind and by_path.get(names[i:]) == shape:
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
