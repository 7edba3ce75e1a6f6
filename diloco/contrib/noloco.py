"""NoLoCo (arXiv 2506.10911): a replica exchanges with one random peer, not with all.

There is no all-reduce. Every replica m has outer parameters phi_m and outer optimizer
state of its own. When a fragment is due, the replicas form random pairs, the same in
every process, and a pair exchanges its inner parameters theta. Replica m then steps its
outer optimizer along `phi_m - (theta_m + theta_peer) / 2`, and goes on from the result.
So the step follows the mean of the pair's outer gradients, and pulls phi_m towards the
mean of the pair's outer parameters: it equals
`(phi_m - theta_m + phi_peer - theta_peer) / 2 + (phi_m - phi_peer) / 2`, which the
authors call a modified Nesterov momentum. A run is evaluated at the mean of the outer
parameters.

The authors' code multiplies both terms by the outer rate and sends both; here one
message, theta, is enough. It uses momentum 0.5 without look-ahead, a rate of 0.7 and
H = 50. It pairs replicas by a random permutation. Here each sync draws one of the M - 1
rounds of a tournament, in which every replica meets every other once. The authors'
random routing between pipeline stages is not implemented.

Source: the authors' code (github.com/gensyn-ai/noloco, sparse_optimizer_c.py and
configs/no_reduce_exp/C4) and the abstract, not the paper's text; there the two terms
may have rates of their own. The authors report, from 125M to 6.8B parameters, up to 4%
faster convergence than DiLoCo. They estimate that a sync of a few hundred replicas is
ten times faster.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh

from diloco.algorithm.optimizers import Outer, OuterTuned
from diloco.algorithm.plan import Plan
from diloco.algorithm.slices import as_merged, take
from diloco.algorithm.state import Event, OuterState, TrainState
from diloco.algorithm.sync_metrics import Metrics, norms
from diloco.config import Config
from diloco.config.combinations import OFF
from diloco.contrib._shared.own_outer import step_each
from diloco.contrib._shared.rules import NEEDS
from diloco.errors import ConfigError
from diloco.mesh.sharding import REPLICA, specs
from diloco.spec import plugins
from diloco.spec.plugins import Call, Exchange, Rule
from diloco.util.types import PyTree


def rounds(replicas: int) -> np.ndarray:
  """Returns the peer of each replica in each round of a tournament, int [M - 1, M].

  Args:
    replicas: M, an even number.
  """
  n = replicas - 1
  peers = (2 * np.arange(n)[:, None] - np.arange(replicas)) % n
  each = np.arange(n)
  # In round r the formula pairs replica r with itself: it meets the last replica.
  peers[each, each], peers[:, n] = n, each
  return peers


@partial(jax.jit, static_argnames=("outer", "mesh"), donate_argnums=(0, 1, 2))
def update(
  params_M: PyTree,
  theta_M: PyTree,
  opt_state_M: PyTree,
  layers: np.ndarray,
  key: jax.Array,
  tuned: OuterTuned,
  *,
  outer: Outer,
  mesh: Mesh,
) -> tuple[PyTree, PyTree, PyTree, Metrics, Metrics]:
  """Exchanges a fragment in pairs, and steps the outer optimizer of every replica.

  Args:
    params_M: parameters of all replicas; donated.
    theta_M: the replicas' outer parameters of the fragment; donated.
    opt_state_M: their outer optimizer state; donated.
    layers: int32 (n,), the fragment's layers.
    key: PRNG key of this step and fragment, which draws the pairs.

  Returns:
    New params_M, theta_M and opt_state_M; metrics of the send and of the update.
  """
  part_M = take(params_M, theta_M, layers)
  merged_M = jax.tree.map(as_merged, theta_M, part_M)
  own_M = jax.tree.map(jnp.float32, part_M)
  peers_M = peers_of(own_M, key, mesh)
  grad = lambda t_M, own_M, peer_M: t_M - (own_M + peer_M) / 2
  grads_M = jax.tree.map(grad, merged_M, own_M, peers_M)
  sent: Metrics = {
    "outer_grad_norm": norms(jax.tree.map(jnp.subtract, merged_M, own_M))
  }
  state = (theta_M, opt_state_M)
  params_M, state, updates_M = step_each(
    params_M, state, grads_M, layers, tuned, outer, mesh
  )
  # One value per replica: a mean over the replicas would be one more exchange.
  metrics: Metrics = {
    "outer_grad_mean_norm": norms(grads_M),
    "outer_update_norm": norms(updates_M),
  }
  return params_M, *state, sent, metrics


def peers_of(x_M: PyTree, key: jax.Array, mesh: Mesh) -> PyTree:
  """Returns the values of each replica's peer, float32 leaves (M, ...).

  If each group of devices has one replica, each replica sends its values once.
  Otherwise the values of all replicas are gathered.
  """
  replicas = len(jax.tree.leaves(x_M)[0])
  table = rounds(replicas)
  drawn = jax.random.randint(key, (), 0, len(table))
  if mesh.shape[REPLICA] != replicas:
    return jax.tree.map(lambda x: x[jnp.asarray(table)[drawn]], x_M)

  def swap(x_M: PyTree, drawn: jax.Array) -> PyTree:
    swaps = [
      partial(jax.lax.ppermute, axis_name=REPLICA, perm=list(enumerate(row)))
      for row in table.tolist()
    ]
    return jax.lax.switch(drawn, swaps, x_M)

  places = specs(x_M, mesh, (REPLICA,))
  at = (places, jax.sharding.PartitionSpec())
  return jax.shard_map(swap, mesh=mesh, in_specs=at, out_specs=places, check_vma=False)(
    x_M, drawn
  )


def outer_step(
  plan: Plan, t: int, params_M: PyTree, state: OuterState, last_send: int | None = None
) -> tuple[PyTree, OuterState, list[Event]]:
  """Exchanges the fragments that are due after step t in pairs; nothing is in flight.

  Donates params_M and the outer state of these fragments.
  """
  events = list[Event]()
  for p in plan.schedule.sends(t, last_send):
    key = plan.key(t, p)
    own = (state.theta[p], state.opt_state[p], plan.layers[p], key, plan.tuned)
    with TraceAnnotation("exchange"):
      params_M, theta_M, opt_state_M, sent, metrics = update(
        params_M, *own, outer=plan.outer, mesh=plan.mesh
      )
    state = state.after_update(p, theta_M, opt_state_M)
    events.append(Event("send", p, t, plan.sync_bytes(p), sent))
    events.append(Event("receive", p, t, 0, metrics))
  return params_M, state, events


def programs(c: Config, plan: Plan, state: TrainState) -> Iterator[Call]:
  """Yields the program of a sync, for the dry run; see `Extension.programs`."""
  p, params, outer = plan.largest, state.params, state.outer
  theta, opt_state = outer.theta[p], outer.opt_state[p]
  key = jax.eval_shape(lambda: jax.random.key(0))
  held = {"outer parameters": theta, "outer optimizer": opt_state, "parameters": params}
  args = (params, theta, opt_state, plan.layers[p], key, plan.tuned)
  kwargs = {"outer": plan.outer, "mesh": plan.mesh}
  yield Call("update", held, update, args, kwargs)


class NoLoCo(plugins.Extension):
  """NoLoCo has no fields of its own; wire.exchange=pair chooses it."""

  def check(self, c: Config) -> None:
    if c.wire.exchange == "pair" and c.replicas % 2:
      raise ConfigError(
        f"replicas is {c.replicas}, but wire.exchange is pair; choose an even number."
      )


plugins.EXCHANGES["pair"] = Exchange(
  lambda replicas: 1, own_outer=True, outer_step=outer_step, programs=programs
)
plugins.register("noloco", NoLoCo)
plugins.RULES.append(
  Rule(
    "wire.exchange",
    "pair",
    "where replicas exchange parameters and wait",
    {
      **NEEDS,
      "eager.on": OFF,  # First, because eager updates set tau to H.
      "overlap.tau": (0,),
      "overlap.alpha": OFF,
      "wire.compressor": ("quantize",),
      "wire.format": ("fp32",),
    },
  )
)
