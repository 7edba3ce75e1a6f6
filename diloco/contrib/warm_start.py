"""Pier's warm start (arXiv 2511.17849): data-parallel steps before the first sync.

In the first `warm_start.steps` inner steps, the gradients of all replicas are
averaged at every step (`inner.inner_step` with `averaged`), so the replicas stay equal
and nothing else is sent. When a fragment is due, its outer parameters follow the
replicas: theta <- theta_m. With `warm_start.momentum`, the outer optimizer first gets
the outer gradient theta - theta_m. It updates its momentum, but its step is dropped. So
the first sync already has the momentum of a sync in the middle of a run. Algorithm 2
follows the warm start; the inner optimizer keeps its state.

The sources are the paper's abstract and the authors' code (in its words, "lazy start"
and "momentum produce"). The authors report that GPT-2 XL trains 2.7 to 3.7 times as
fast on 256 A100, with the same validation loss. Their warm start takes a tenth of the
steps. Then their code raises the outer learning rate linearly for another tenth, and
lowers learning rate (1.1 to 0.9) and momentum (0.99 to 0.9) along a cosine. This
plug-in changes neither. We could not confirm in the paper that its runs had these
values, nor the step at which the values begin to change.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from diloco.algorithm import optimizers, outer
from diloco.algorithm.optimizers import Outer, OuterTuned
from diloco.algorithm.slices import take
from diloco.algorithm.state import Event, OuterState
from diloco.algorithm.streaming import Step, Streaming
from diloco.algorithm.sync_metrics import Metrics
from diloco.config import Config
from diloco.mesh.sharding import REPLICA, specs
from diloco.spec import plugins
from diloco.spec.fields import Count
from diloco.spec.plugins import OuterStep, Rule, Timetable
from diloco.util.types import PyTree


@dataclasses.dataclass(frozen=True)
class WarmStart(plugins.Extension):
  """A warm start, as in Pier (arXiv 2511.17849): data-parallel before the syncs."""

  # Steps of the warm start: the gradients of all replicas are averaged at every step,
  # as in data-parallel, so the replicas stay equal. Pier uses a tenth of all steps. 0:
  # no warm start, as in both DiLoCo papers.
  steps: Count = 0
  # Whether the outer optimizer already accumulates momentum in the warm start.
  momentum: bool = True

  rules = (
    Rule(
      "warm_start.steps",
      None,
      "which averages gradients at every step and sends nothing else",
      {"overlap.transport": ("device", "host")},
    ),
  )

  def effects(self, c: Config) -> dict[str, tuple[bool, str]]:
    return {"warm_start.momentum": (not self.steps, "warm_start.steps is 0")}

  def schedule(self, c: Config) -> Timetable:
    return Timetable(joint_steps=self.steps)

  def wrap(self, c: Config, step: OuterStep) -> OuterStep:
    run = partial(outer_step, momentum=self.momentum, step=step.run)
    return dataclasses.replace(step, run=run) if self.steps else step


plugins.register("fields", "warm_start", WarmStart)


def outer_step(
  sync: Streaming,
  t: int,
  params_M: PyTree,
  state: OuterState,
  last_send: int | None = None,
  *,
  momentum: bool,
  step: Step = outer.outer_step,
) -> tuple[PyTree, OuterState, list[Event]]:
  """Sets the outer parameters of due fragments (`follow`), then runs `step`."""
  followed = list[Event]()
  if last_send is None or t <= last_send:
    state, followed = follow(sync, t, params_M, state, momentum)
  params_M, state, events = step(sync, t, params_M, state, last_send)
  return params_M, state, followed + events


def follow(
  sync: Streaming, t: int, params_M: PyTree, state: OuterState, momentum: bool
) -> tuple[OuterState, list[Event]]:
  """Sets the outer parameters of due fragments to the replicas' parameters.

  Args:
    sync: how replicas are synchronised.
    t: number of finished inner steps.
    params_M: parameters of all replicas, which are equal.
    state: the outer state before the call.
    momentum: whether the outer optimizer sees the outer gradients.

  Returns:
    The new outer state, and an event for each fragment.
  """
  events = list[Event]()

  def line(
    theta: PyTree, opt_state: PyTree, new: PyTree
  ) -> tuple[PyTree, PyTree, Metrics]:
    opt_state, norm = _accumulate(
      theta,
      opt_state,
      new,
      sync.tuned,
      momentum=momentum,
      outer=sync.outer,
      mesh=sync.place.mesh,
    )
    return new, opt_state, {"outer_grad_mean_norm": norm}

  for p in sync.schedule.follows(t):
    new = _own(params_M, sync.layers[p], keys=tuple(sync.shapes[p]), mesh=sync.mesh)
    state, _, metrics = sync.place.update(line, p, state, new)
    events.append(Event("warm_start", p, t, 0, metrics))
  return state, events


@partial(jax.jit, static_argnames=("keys", "mesh"))
def _own(
  params_M: PyTree, layers: np.ndarray, *, keys: tuple[str, ...], mesh: Mesh
) -> PyTree:
  """Takes a fragment of one replica; each device uses a replica that it holds.

  Args:
    params_M: parameters of all replicas, which are equal.
    layers: int32 (n,), the fragment's layers.
    keys: names of the fragment's parts, such as `blocks`.

  Returns:
    Leaves (n, ...) under `blocks`, else (...), float32, sharded over fsdp.
  """
  part_M = take(params_M, keys, layers)
  led = specs(part_M, mesh, (REPLICA,))
  # Each device takes its own x_M[0]. For x_M[0] of the whole array, XLA would send
  # replica 0 to all other devices.
  return jax.shard_map(
    lambda part_M: jax.tree.map(lambda x_M: x_M[0].astype(jnp.float32), part_M),
    mesh=mesh,
    in_specs=(led,),
    out_specs=jax.tree.map(lambda spec: P(*spec[1:]), led),
    check_vma=False,
  )(part_M)


@partial(jax.jit, static_argnames=("momentum", "outer", "mesh"))
def _accumulate(
  theta: PyTree,
  opt_state: PyTree,
  new: PyTree,
  tuned: OuterTuned,
  *,
  momentum: bool,
  outer: Outer,
  mesh: Mesh,
) -> tuple[PyTree, jax.Array]:
  """Gives the outer optimizer the outer gradient theta - new, but drops its step.

  Args:
    theta: outer parameters of the fragment, float32 leaves (n, ...) or (...).
    opt_state: outer optimizer state of the fragment.
    new: the replicas' parameters, shaped like theta.
    tuned: learning rate and momentum.

  Returns:
    New opt_state, unchanged without `momentum`; the norm of the outer
    gradient, float32 [].
  """
  delta = jax.tree.map(jnp.subtract, theta, new)
  if momentum:
    _, opt_state = optimizers.make_outer(outer, tuned).update(delta, opt_state, theta)
  _, places = optimizers.outer_shardings(outer, theta, mesh)
  opt_state = jax.lax.with_sharding_constraint(opt_state, places)
  return opt_state, optax.tree.norm(delta)
