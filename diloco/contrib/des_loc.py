"""DES-LOC (arXiv 2505.22549): averages parameters and inner moments.

In DiLoCo every replica keeps the state of its inner optimizer for itself. DES-LOC
(Desynced Low Communication Adaptive Optimizers) averages the first and the second
moments over the replicas. Their periods differ, because a moment with a longer
half-life changes more slowly: parameters every K steps, first moments every 3 K steps,
second moments every 6 K steps. Here the outer step synchronises the parameters, as
without DES-LOC. For the paper's plain mean of the parameters, set `outer.optimizer=sgd`
and `outer.learning_rate=1`. Step counts are equal on all replicas and need no average.

Source: the abstract and the notes of others; we have not read the paper itself. The
authors prove that the method converges. Their guarantees with high probability need an
average of the second moments from time to time. For language models up to 1.7B, they
report the loss of Local Adam (which averages parameters and both moments at one period)
with half of the bytes of Local Adam, and 170 times fewer bytes than data-parallel.

With `des_loc.format`, replicas send codes, for example of 4 bits, instead of float32;
this is not in the paper. See `coded_mean`; docs/gap.md has losses and bytes.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from diloco.algorithm.optimizers import make_inner
from diloco.algorithm.state import TrainState, abstract_params
from diloco.algorithm.streaming import Streaming
from diloco.config import Config
from diloco.contrib._rules import alone, averages_of
from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.mesh.sharding import FSDP, REPLICA
from diloco.spec import plugins, shapes, sizes
from diloco.spec.fields import Count, WireConfig
from diloco.spec.formats import PLAIN
from diloco.spec.plugins import Average, Call, Timetable
from diloco.spec.shapes import Shapes
from diloco.util.types import PyTree
from diloco.wire import exchange

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

  An average waits until all exchanges end, so fewer inner steps overlap an exchange.
  """

  # Steps between two averages of the first moments (AdamW's mu) over the replicas. The
  # paper uses 3 * sync_every. 0: never, as in DiLoCo.
  first_every: Count = 0
  # Steps between two averages of the second moments (AdamW's nu). The paper uses
  # 6 * sync_every. 0: never.
  second_every: Count = 0
  # Number format of the moments that are sent. fp32: float32 in an all-reduce, as in
  # the paper. Another format of wire.format, such as e3m0: all replicas gather codes.
  format: str = "fp32"

  rules = (averages_of("des_loc.first_every"), averages_of("des_loc.second_every"))

  def effects(self, c: Config) -> dict[str, tuple[bool, str]]:
    first, second = self.first_every, self.second_every
    format = (not (first or second), "first_every and second_every are 0")
    effects = {"first_every": alone(c), "second_every": alone(c), "format": format}
    return {f"des_loc.{name}": effect for name, effect in effects.items()}

  def schedule(self, c: Config) -> Timetable:
    """Returns the averages; `sent` counts one moment per parameter."""
    periods = {FIRST: self.first_every, SECOND: self.second_every}
    if not any(periods.values()):
      return Timetable()
    sent = self.sent(c.wire, c.replicas, shapes.parameters(c.model))
    return Timetable(
      averages={
        kind: Average(
          every,
          sent,
          partial(self.average, kind),
          partial(self.programs, kind),
          by_shard=self.format not in PLAIN,
        )
        for kind, every in periods.items()
        if every
      }
    )

  def wire(self, wire: WireConfig) -> WireConfig:
    """Returns how moments are sent; `wire` says how outer gradients are sent."""
    if self.format == "fp32":
      return WireConfig(format="fp32", exchange="psum")
    return WireConfig(format=self.format, block_size=wire.block_size)

  def sent(self, wire: WireConfig, replicas: int, moment: Shapes, fsdp: int = 1) -> int:
    """Counts the bytes that one replica sends for moments of these shapes."""
    return sizes.sync_bytes(self.wire(wire), replicas, moment, fsdp)

  def check(self, c: Config) -> None:
    """Refuses moments that the inner optimizer does not have."""
    with_leading = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
    try:
      sizes.check(self.wire(c.wire))
    except ConfigError as error:
      raise ConfigError(str(error).replace("wire.", "des_loc.")) from error
    if not (self.first_every or self.second_every):
      return
    params_1 = jax.tree.map(with_leading, abstract_params(c))
    state_1 = jax.eval_shape(jax.vmap(make_inner(c).init), params_1)
    known = {kind for kind, _ in moments(shapes.parameters(c.model), state_1)}
    for kind, name in ((FIRST, "first"), (SECOND, "second")):
      every = getattr(self, f"{name}_every")
      if every and kind not in known:
        raise ConfigError(
          f"des_loc.{name}_every is {every}, but inner.optimizer is"
          f" {c.inner.optimizer!r}, which keeps no {name} moments; set it to 0."
        )

  def average(
    self, kind: str, t: int, sync: Streaming, state: TrainState
  ) -> tuple[TrainState, int]:
    leaves, structure = jax.tree.flatten(state.opt_state)
    sent = 0
    for numbers, call in self.calls(kind, sync, state):
      new = call.function(*call.args, **call.kwargs)
      for number, x_M in zip(jax.tree.leaves(numbers), jax.tree.leaves(new)):
        leaves[number] = x_M
      moment = jax.tree.map(lambda x_M: x_M.shape[1:], new)
      sent += self.sent(sync.wire, sync.replicas, moment, sync.mesh.shape[FSDP])
    opt_state = jax.tree.unflatten(structure, leaves)
    return dataclasses.replace(state, opt_state=opt_state), sent

  def programs(self, kind: str, sync: Streaming, state: TrainState) -> Iterator[Call]:
    return (call for _, call in self.calls(kind, sync, state))

  def calls(
    self, kind: str, sync: Streaming, state: TrainState
  ) -> Iterator[tuple[PyTree, Call]]:
    """Yields the leaves of each moment of a kind, and the call that averages it."""
    leaves = jax.tree.leaves(state.opt_state)
    for moment_kind, numbers in moments(sync.parameters, state.opt_state):
      if moment_kind == kind:
        x_M = jax.tree.map(leaves.__getitem__, numbers)
        call = Call(kind, {"inner optimizer": x_M}, mean, (x_M,), {"mesh": sync.mesh})
        if self.format != "fp32":
          more = {"wire": self.wire(sync.wire), "positive": kind == SECOND}
          call = call._replace(function=coded_mean, kwargs={**call.kwargs, **more})
        yield numbers, call


plugins.register("fields", "des_loc", DesLoc)


def moments(parameters: Shapes, opt_state_M: PyTree) -> Iterator[tuple[str, PyTree]]:
  """Finds the moments in an optimizer state: leaves that are shaped like parameters.

  The path of such a leaf ends in the path of its parameter, after the moment's name.

  Args:
    parameters: shapes of one replica's parameters.
    opt_state_M: leaves (M, ...), or their shapes.

  Yields:
    (kind, numbers): FIRST or SECOND, and a tree like the parameters or a part of them.
    Its leaves are the moment's leaf numbers in the flattened state.
  """
  by_path, by_moment = dict(shapes.leaves(parameters)), dict[tuple[str, ...], PyTree]()
  for leaf, (path, x_M) in enumerate(jax.tree.leaves_with_path(opt_state_M)):
    names = sharding.names(path)
    for i in range(1, len(names)):
      if names[i - 1] in _KINDS and by_path.get(names[i:]) == x_M.shape[1:]:
        by_moment.setdefault(names[:i], {})[names[i:]] = leaf
  for (*_, name), leaves in by_moment.items():
    yield _KINDS[name], unflatten_dict(leaves)


@partial(jax.jit, static_argnames=("mesh",), donate_argnums=0)
def mean(x_M: PyTree, *, mesh: Mesh) -> PyTree:
  """Replaces arrays (M, ...) by their means over the replicas, computed in float32.

  Args:
    x_M: a moment of all replicas, a tree like the parameters; donated.
  """
  means = exchange.all_reduce(mesh, jax.tree.map(jnp.float32, x_M))
  spread = lambda mean, x_M: jnp.broadcast_to(mean, x_M.shape).astype(x_M.dtype)
  places = sharding.shardings(x_M, mesh, (REPLICA,))
  return jax.lax.with_sharding_constraint(jax.tree.map(spread, means, x_M), places)


@partial(jax.jit, static_argnames=("wire", "mesh", "positive"), donate_argnums=0)
def coded_mean(x_M: PyTree, *, wire: WireConfig, mesh: Mesh, positive: bool) -> PyTree:
  """Moves moments to the mean of their codes: x_m += mean(Q(x)) - Q(x_m).

  The mean over the replicas does not change, and equal replicas do not change: each
  keeps what Q, the rounding to codes, removes. This is the step of CHOCO-Gossip (arXiv
  1902.00340) without its memory of earlier sends.

  If Q rounds x_m up and the other replicas have smaller values, x_m may fall to 0 or
  below. For a second moment this is an error, because Adam divides by its root. So
  `positive` values do not fall below the smaller of x_m and mean(Q(x)).

  Args:
    x_M: a moment of all replicas, a tree like the parameters; donated.
    wire: how the moment is coded.
    positive: whether the moment is never negative, as second moments are.
  """
  delta_M = jax.tree.map(lambda x_M: x_M.astype(jnp.float32), x_M)
  keys_M = jax.random.split(jax.random.key(0), len(jax.tree.leaves(x_M)[0]))  # Unused.
  state = exchange.init_state(wire, delta_M)
  payload, _ = exchange.encode(wire, mesh, delta_M, state, keys_M)
  like = jax.tree.map(lambda x_M: x_M[0], delta_M)
  own_M = exchange.decode(wire, mesh, payload, like, (REPLICA,))
  payload = jax.lax.with_sharding_constraint(payload, exchange.transmitted(mesh))
  all_M = exchange.decode(wire, mesh, payload, like, (None,))

  def move(x_M: jax.Array, own_M: jax.Array, all_M: jax.Array) -> jax.Array:
    mean = all_M.mean(axis=0)
    new_M = x_M + mean - own_M
    if positive:
      new_M = jnp.maximum(new_M, jnp.minimum(x_M, mean))
    return new_M.astype(x_M.dtype)

  return jax.tree.map(move, x_M, own_M, all_M)
