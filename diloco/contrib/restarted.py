"""Outer momentum restarts: SGD that forgets its momentum every few outer updates.

  outer.optimizer = "restarted(every=10, momentum=0.9, nesterov=True)"

Outer momentum restarts (arXiv 2605.28585): a restart forgets the momentum of older
outer gradients, and keeps the parameters. We read the abstract only, so we could not
confirm the period, nor whether the update of a restart already has no momentum. Updates
of a warm start count, too.

Its authors report that periodic restarts widen the range of outer rates and momenta
with which language models train stably. They explain it by directions in which the
old momentum points against the new outer gradients.
"""

import jax
import jax.numpy as jnp
import optax

from diloco.algorithm.optimizers import OWN, TUNED
from diloco.util.types import PyTree


def restarted(
  learning_rate: optax.ScalarOrSchedule,
  every: int,
  momentum: optax.ScalarOrSchedule,
  nesterov: bool = False,
) -> optax.GradientTransformation:
  """Makes the optimizer.

  Args:
    learning_rate, momentum, nesterov: of SGD.
    every: updates of a fragment between two restarts.

  Raises:
    ValueError: `every` is no whole number of at least 1, or there is no momentum.
  """
  if not isinstance(every, int) or isinstance(every, bool) or every < 1:
    raise ValueError(f"every is {every}, but must be a whole number of at least 1")
  if isinstance(momentum, int | float) and not momentum:
    raise ValueError("without momentum there is nothing to forget")
  optimizer = optax.sgd(learning_rate, momentum, nesterov)

  def init(params: PyTree) -> PyTree:
    return jnp.zeros((), jnp.int32), optimizer.init(params)

  def update(
    updates: PyTree, state: PyTree, params: PyTree | None = None
  ) -> tuple[PyTree, PyTree]:
    count, state = state
    again = (count > 0) & (count % every == 0)
    chosen = lambda fresh, old: jnp.where(again, fresh, old)
    state = jax.tree.map(chosen, optimizer.init(params), state)
    updates, state = optimizer.update(updates, state, params)
    return updates, (count + 1, state)

  return optax.GradientTransformation(init, update)


OWN["outer.optimizer"]["restarted"] = restarted
TUNED.add("restarted")
