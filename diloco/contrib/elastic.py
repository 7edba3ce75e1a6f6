"""An elastic pull: every inner step draws a replica back to the outer parameters.

Between two syncs M replicas drift apart for H steps; with a large H, the loss rises
(docs/gap.md). Each replica m keeps theta, a copy of the outer parameters; the merge of
a fragment renews this part of the copy. After each inner step t, m moves towards theta:

  theta_m <- theta_m - pull (eta_t / eta) (theta_m - theta)

eta_t is the inner learning rate, eta its peak. Nothing more is sent. The inner
optimizer keeps theta beside its moments: one more copy of the parameters.

Sources: elastic averaging SGD (arXiv 1412.6651) pulls towards a centre and moves the
centre towards the replicas; pseudo-asynchronous local SGD (arXiv 2504.18454) pulls in
some random steps. We read the abstracts, and others' accounts of the formulas. The
factor eta_t / eta is our addition.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from diloco.algorithm.optimizers import learning_rate
from diloco.config import Config
from diloco.config.combinations import OFF
from diloco.contrib._layers import chosen, in_fragments
from diloco.contrib._rules import check_equal_taus
from diloco.spec import plugins
from diloco.spec.fields import Share
from diloco.spec.plugins import Rule
from diloco.util.types import PyTree


@dataclasses.dataclass(frozen=True)
class Elastic(plugins.Extension):
  """Elastic pull: draws replicas back to the outer parameters in every inner step."""

  # Share of the way back to the outer parameters that a replica moves in an inner step
  # at the peak of the learning rate. With H = 30, 0.06 is a good value. 0: no pull.
  pull: Share = 0.0

  rules = (
    Rule(
      "elastic.pull",
      None,
      "which takes merged parameters for the outer ones",
      {
        "overlap.alpha": (0,),
        "overlap.transport": ("device", "host"),
        "warm_start.steps": OFF,
        "delayed_averaging.on": OFF,
      },
    ),
  )

  def check(self, c: Config) -> None:
    if self.pull:
      check_equal_taus(c, f"elastic.pull is {self.pull:g}")

  def extends(self) -> bool:
    return not self.pull  # `merged` does not know what the end of a run has merged.

  def inner_optimizer(
    self,
    c: Config,
    clip: optax.GradientTransformation,
    make: Callable[[int], optax.GradientTransformation],
  ) -> optax.GradientTransformation | None:
    if not self.pull or c.one_model:
      return None
    share = learning_rate(c, self.pull)
    return optax.chain(clip, make(1), pulled(share, partial(merged, c)))


plugins.register("fields", "elastic", Elastic)


def merged(c: Config, t: jax.Array) -> PyTree:
  """Finds the layers that were merged after inner step t.

  Returns:
    {'blocks': bool [N], 'embed': bool []}.
  """
  first_P = jnp.array(c.make_schedule().first_sends)
  since_P = t - first_P - c.overlap.taus[0]
  return in_fragments(c, (since_P >= 0) & (since_P % c.sync_every == 0))


def pulled(
  share: optax.Schedule, merged: Callable[[jax.Array], PyTree]
) -> optax.GradientTransformation:
  """Makes the last part of an inner optimizer, which adds the pull to the updates.

  Args:
    share: maps t, int32 [], to the pull of the inner step after step t.
    merged: maps t, int32 [], to the layers that were merged after step t.
  """

  def init(params: PyTree) -> tuple[optax.ScaleByScheduleState, PyTree]:
    # theta is a copy, because parameters and state are donated.
    count = optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))
    return count, jax.tree.map(jnp.copy, params)

  def update(
    updates: PyTree, state: PyTree, params: PyTree = None
  ) -> tuple[PyTree, PyTree]:
    (count,), theta = state
    masks, rate = merged(count), share(count)
    theta = {
      k: jax.tree.map(partial(chosen, masks[k]), params[k], theta[k]) for k in theta
    }
    draw = lambda u, x, theta: u - (rate * (x - theta + u)).astype(u.dtype)
    updates = jax.tree.map(draw, updates, params, theta)
    return updates, (optax.ScaleByScheduleState(count + 1), theta)

  return optax.GradientTransformation(init, update)
