"""FedPart: only the fragment that is sent next is trained, and all others are frozen.

The paper of Streaming DiLoCo also measures FedPart (arXiv 2501.18512, section 3.3.1):
at 500M parameters, FedPart has a loss of 3.2145, Streaming DiLoCo of 2.6749.

Gradient clipping uses the norm of the trained layers' gradients only. Every layer has
its own optimizer state, {'blocks': leaves (N, ...), 'embed': ...}. So the step counts
of a frozen layer do not change either, as in PyTorch for parameters without a gradient.
Only its learning rate schedule advances.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco.algorithm.optimizers import is_schedule, over_layers
from diloco.config import Config
from diloco.config.combinations import OFF
from diloco.contrib._layers import chosen, in_fragments
from diloco.spec import plugins
from diloco.spec.plugins import Rule
from diloco.util.types import PyTree


@dataclasses.dataclass(frozen=True)
class FedPart(plugins.Extension):
  """FedPart: freezes fragments that are not sent next (2501.18512, section 3.3.1)."""

  # Whether only the fragment that is sent next is trained. The other fragments keep
  # their parameters and inner optimizer state. The paper finds a much higher loss.
  on: bool = False

  rules = (
    Rule("fedpart.on", None, "which freezes parameters", {"warm_start.steps": OFF}),
  )

  def effects(self, c: Config) -> dict[str, tuple[bool, str]]:
    one = len(c.make_fragments()) == 1
    return {"fedpart.on": (one, "the only fragment is always sent next")}

  def inner_optimizer(
    self,
    c: Config,
    clip: optax.GradientTransformation,
    make: Callable[[int], optax.GradientTransformation],
  ) -> optax.GradientTransformation | None:
    if not self.on or c.one_model:
      return None
    return in_part(clip, make(0), partial(trained_next, c))


plugins.register("fields", "fedpart", FedPart)


def trained_next(c: Config, t: jax.Array | int) -> PyTree:
  """Finds the layers that inner step t trains: the fragments that are sent next.

  Returns:
    {'blocks': bool [N], 'embed': bool []}.
  """
  first_P = np.array(c.make_schedule().first_sends)
  wait_P = jnp.where(t <= first_P, first_P - t, (first_P - t) % c.sync_every)
  return in_fragments(c, wait_P == wait_P.min())


def in_part(
  clip: optax.GradientTransformation,
  optimizer: optax.GradientTransformation,
  trains: Callable[[jax.Array], PyTree],
) -> optax.GradientTransformation:
  """Makes an optimizer that changes only the layers that are trained now.

  Args:
    clip: clips all gradients together.
    optimizer: updates the parameters of one layer.
    trains: maps t, int32 [], to the trained layers; see `trained_next`.
  """
  layered = over_layers(optimizer)

  def newer(mask: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return new if is_schedule(new) else chosen(mask, new, old)

  def init(params: PyTree) -> PyTree:
    count = optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))
    return count, layered.init(params)

  def update(
    grads: PyTree, state: PyTree, params: PyTree = None
  ) -> tuple[PyTree, PyTree]:
    (count,), parts = state
    masks, choose = trains(count + 1), partial(jax.tree.map, is_leaf=is_schedule)
    where_trains = lambda new, old: {
      k: choose(partial(newer, masks[k]), new[k], old[k]) for k in new
    }
    zeros = jax.tree.map(jnp.zeros_like, grads)
    grads, _ = clip.update(where_trains(grads, zeros), optax.EmptyState())
    updates, after = layered.update(grads, parts, params)
    state = optax.ScaleByScheduleState(count + 1), where_trains(after, parts)
    return where_trains(updates, zeros), state

  return optax.GradientTransformation(init, update)
