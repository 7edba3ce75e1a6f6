"""Delayed Nesterov: an outer optimizer with momentum at every N-th sync.

Delayed Nesterov (arXiv 2401.09135) collects N outer gradients. Each takes a plain step
of g / N directly; only the N-th changes the momentum, m <- mu m + (sum of N) / N, and
takes the momentum's step mu m. With `activation` c, each of the first N - 1 steps also
takes c mu m, and the N-th takes the rest, (1 - (N - 1) c) mu m. For N = 1 this is
Nesterov momentum.

In the paper, a server receives the outer gradient of one worker at a time,
often a stale one, and momentum at every arrival would repeat stale directions. Here an
arrival is the mean of all replicas. So N arrivals move the parameters about 1 / N as
far as N rounds of DiLoCo: multiply the rate by N.

This is written from the abstract and from public implementations of the pseudo-code
(utnslab/halos, torchft). The authors also let the speed of each worker set its number
of local steps. They report that asynchronous training with both changes matches
synchronous DiLoCo per update, up to 150M parameters.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from diloco.algorithm import optimizers
from diloco.util.types import PyTree


class DelayedNesterovState(NamedTuple):
  """State of `delayed_nesterov`.

  Attributes:
    syncs: updates so far, int32 [].
    momentum: m, a tree like the parameters.
    total: sum of the outer gradients since the momentum changed.
  """

  syncs: jax.Array
  momentum: PyTree
  total: PyTree


def delayed_nesterov(
  learning_rate: optax.ScalarOrSchedule,
  every: int,
  momentum: float = 0.9,
  activation: float = 0.0,
) -> optax.GradientTransformation:
  """Makes the optimizer.

  Args:
    learning_rate: outer rate.
    every: N, updates after which the momentum changes.
    momentum: mu, the share of the momentum that stays.
    activation: c, the share of mu m in each of the first N - 1 steps, up to 1 / N.

  Returns:
    A transformation of optax; its state has a `DelayedNesterovState`.

  Raises:
    ValueError: `every` is no whole number, or `every` or `activation` is out of range.
  """
  if not isinstance(every, int) or isinstance(every, bool) or every < 1:
    raise ValueError(f"every is {every}, but must be a whole number of at least 1")
  if not 0 <= activation <= 1 / every:
    raise ValueError(f"activation is {activation}, but must lie in 0..1 / every")

  def init(params: PyTree) -> DelayedNesterovState:
    zeros = optax.tree.zeros_like
    return DelayedNesterovState(jnp.zeros((), jnp.int32), zeros(params), zeros(params))

  def update(
    updates: PyTree, state: DelayedNesterovState, params: PyTree | None = None
  ) -> tuple[PyTree, DelayedNesterovState]:
    is_last = (state.syncs + 1) % every == 0
    share = jnp.where(is_last, 1 - (every - 1) * activation, activation)
    total = jax.tree.map(jnp.add, state.total, updates)
    new = jax.tree.map(
      lambda m, s: jnp.where(is_last, momentum * m + s / every, m),
      state.momentum,
      total,
    )
    updates = jax.tree.map(lambda g, m: g / every + share * momentum * m, updates, new)
    total = jax.tree.map(lambda s: jnp.where(is_last, 0, s), total)
    return updates, DelayedNesterovState(state.syncs + 1, new, total)

  return optax.chain(
    optax.GradientTransformation(init, update),
    optax.scale_by_learning_rate(learning_rate),
  )


optimizers.OWN["outer.optimizer"]["delayed_nesterov"] = delayed_nesterov
