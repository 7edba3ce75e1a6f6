"""An elastic pull: every inner step draws a replica back to the outer parameters.

Between two syncs M replicas drift apart for H steps; with a large H, the loss rises
(docs/gap.md). Each replica m keeps theta, a copy of the outer parameters; the merge of
a fragment renews this part of the copy. After each inner step t, m moves towards theta:

  theta_m <- theta_m - pull (eta_t / eta) (theta_m - theta)

eta_t is the inner learning rate, eta its peak. Nothing more is sent. The inner
optimizer keeps theta beside its moments: one more copy of the parameters.

With `carry`, the outer momentum acts inside the inner loop instead of at the merge. Let
U be the last change of the outer parameters of a layer. In each of the next H inner
steps, replicas and theta move by carry U / H. So U becomes the drift of the replicas
plus carry times the last U: the momentum of an outer SGD without momentum, at rate 1.
This needs one more copy, U.

Sources: elastic averaging SGD (arXiv 1412.6651) pulls towards a centre and moves the
centre towards the replicas; pseudo-asynchronous local SGD (arXiv 2504.18454) pulls in
some random steps; FedAdamW and FedACT (2026) repeat the last outer step in the inner
loop. We read the abstracts, and others' accounts of the formulas. The factor
eta_t / eta, and theta that moves with the replicas, are our additions.
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
from diloco.errors import ConfigError
from diloco.spec import plugins
from diloco.spec.fields import Share
from diloco.spec.plugins import Rule
from diloco.util.types import PyTree


@dataclasses.dataclass(frozen=True)
class Elastic(plugins.Extension):
  """Elastic pull: draws replicas back to the outer parameters in every inner step."""

  # Share of the way back to the outer parameters that a replica moves in an inner step
  # at the peak of the learning rate. With H = 30, 0.04 is a good value. 0: no pull.
  pull: Share = 0.0
  # Share of the last outer update that the replicas repeat, spread over the next H
  # inner steps. 0.6 is good with outer.optimizer=sgd and outer.learning_rate=1.
  carry: Share = 0.0

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
    elif self.carry:
      raise ConfigError(
        f"elastic.carry is {self.carry:g}, but elastic.pull is 0; set it, too."
      )

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
    pull = pulled(share, partial(merged, c), carry=self.carry, every=c.sync_every)
    return optax.chain(clip, make(1), pull)


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
  share: optax.Schedule, merged: Callable[[jax.Array], PyTree], carry: float, every: int
) -> optax.GradientTransformation:
  """Makes the last part of an inner optimizer, which adds the pull to the updates.

  Args:
    share: maps t, int32 [], to the pull of the inner step after step t.
    merged: maps t, int32 [], to the layers that were merged after step t.
    carry: share of a layer's last outer update that the next steps repeat.
    every: number of steps from one merge of a layer to the next, H.
  """

  def init(params: PyTree) -> tuple[optax.ScaleByScheduleState, PyTree, PyTree]:
    # theta is a copy, because parameters and state are donated.
    count = optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))
    drift = jax.tree.map(jnp.zeros_like, params) if carry else ()
    return count, jax.tree.map(jnp.copy, params), drift

  def update(
    updates: PyTree, state: PyTree, params: PyTree = None
  ) -> tuple[PyTree, PyTree]:
    (count,), theta, drift = state
    masks, rate = merged(count), share(count)
    renew = lambda new, old: {
      k: jax.tree.map(partial(chosen, masks[k]), new[k], old[k]) for k in old
    }
    if carry:  # Since the last merge of its layer, theta has moved by every * drift.
      change = lambda x, theta, d: carry / every * (x - theta) + carry * d
      drift = renew(jax.tree.map(change, params, theta, drift), drift)
    theta = renew(params, theta)
    if carry:
      theta = jax.tree.map(jnp.add, theta, drift)
      updates = jax.tree.map(lambda u, d: u + d.astype(u.dtype), updates, drift)
    draw = lambda u, x, theta: u - (rate * (x - theta + u)).astype(u.dtype)
    updates = jax.tree.map(draw, updates, params, theta)
    return updates, (optax.ScaleByScheduleState(count + 1), theta, drift)

  return optax.GradientTransformation(init, update)
