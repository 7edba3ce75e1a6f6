"""Delayed averaging: a replica keeps the inner steps that it took during an exchange.

A fragment arrives tau inner steps after its send. With alpha = 0, line 12 of Algorithm
2 drops these steps: theta_m <- theta. Delayed averaging adds them to theta instead:

  theta_m <- theta + theta_m(t) - theta_m(t - tau)

So the next outer gradient covers all H steps, and nothing more is sent. To compute
theta_m(t - tau), each fragment keeps the outer gradient of its last send: one more copy
of the parameters in float32.

Delayed Gradient Averaging (Zhu et al., NeurIPS 2021) does this without an outer
optimizer: when the mean of the updates arrives, a replica replaces its own update by
the mean and keeps its later steps. We read the abstract and a description of the
formula.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from diloco.algorithm.slices import outer_gradient, put, take
from diloco.algorithm.state import Event, OuterState
from diloco.algorithm.streaming import Step, Streaming
from diloco.config import Config
from diloco.contrib._rules import check_equal_taus
from diloco.spec import plugins
from diloco.spec.plugins import OuterStep, Rule
from diloco.util.types import PyTree

NAME = "delayed_averaging"
# Makes the outer gradient that a fragment keeps before its first send.
zeros = partial(jax.tree.map, jnp.zeros_like)


@dataclasses.dataclass(frozen=True)
class DelayedAveraging(plugins.Extension):
  """Delayed averaging: keeps the inner steps that an arriving fragment would drop."""

  # Whether a replica keeps the inner steps that it took during an exchange.
  on: bool = False

  rules = (
    Rule(
      f"{NAME}.on",
      None,
      "which adds the inner steps during an exchange to the outer parameters",
      {"overlap.alpha": (0,), "overlap.transport": ("device", "host")},
    ),
  )

  def check(self, c: Config) -> None:
    if self.on:
      check_equal_taus(c, f"{NAME}.on is true")

  def effects(self, c: Config) -> dict[str, tuple[bool, str]]:
    reason = "overlap.tau is 0: no inner step runs during an exchange"
    return {f"{NAME}.on": (not any(c.overlap.taus), reason)}

  def wrap(self, c: Config, step: OuterStep) -> OuterStep:
    if not self.on:
      return step
    run = partial(outer_step, step=step.run)
    return OuterStep(run, {**step.states, NAME: zeros})


plugins.register("fields", NAME, DelayedAveraging)


def outer_step(
  sync: Streaming,
  t: int,
  params_M: PyTree,
  state: OuterState,
  last_send: int | None = None,
  *,
  step: Step,
) -> tuple[PyTree, OuterState, list[Event]]:
  """Runs `step`; adds the inner steps since its send to each arrived fragment."""
  kept = dict[int, PyTree]()
  sent = sync.schedule.sends(t, last_send)
  for p, _ in sync.schedule.arrivals(t, last_send):
    # With tau = 0, a fragment arrives at its send: there is no inner step to keep.
    if p not in sent:
      theta = sync.place.fetch(state.theta[p])
      kept[p] = steps_since(params_M, theta, state.own[p][NAME], sync.layers[p])
  for p in sent:
    theta = sync.place.fetch(state.theta[p])
    gradient_M = gradient(params_M, theta, sync.layers[p])
    state = state.with_own(p, NAME, gradient_M)
  params_M, state, events = step(sync, t, params_M, state, last_send)
  for p, steps_M in kept.items():
    params_M = keep(params_M, steps_M, sync.layers[p])
  return params_M, state, events


@jax.jit
def gradient(params_M: PyTree, theta: PyTree, layers: np.ndarray) -> PyTree:
  """Returns the outer gradient of a fragment, float32 leaves (M, ...).

  Args:
    params_M: parameters of all replicas.
    theta: outer parameters of the fragment.
    layers: int32 (n,), the fragment's layers.
  """
  return jax.tree.map(outer_gradient, theta, take(params_M, theta, layers))


@jax.jit
def steps_since(
  params_M: PyTree, theta: PyTree, sent_M: PyTree, layers: np.ndarray
) -> PyTree:
  """Returns theta_m(t) - theta_m(t - tau) of a fragment that was sent at t - tau.

  Args:
    params_M, theta, layers: see `gradient`; theta has not changed since the send.
    sent_M: the outer gradient at the send, from `gradient`.
  """
  return jax.tree.map(jnp.subtract, sent_M, gradient(params_M, theta, layers))


@partial(jax.jit, donate_argnums=0)
def keep(params_M: PyTree, steps_M: PyTree, layers: np.ndarray) -> PyTree:
  """Adds inner steps to a fragment of the replicas' parameters, which are donated."""
  return put(params_M, steps_M, layers, lambda x_M, s_M: (x_M + s_M).astype(x_M.dtype))
