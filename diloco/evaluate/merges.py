"""The loss of every replica before and after all merges of a step.

The sequences are held-out ones, always the same: the loss of the steps themselves jumps
more from batch to batch than a merge changes it.

Letters: M replicas, B sequences, L positions.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from diloco.algorithm.inner import each_replica
from diloco.algorithm.method import Method, Wrapper
from diloco.algorithm.state import Event, TrainState
from diloco.config import Config
from diloco.evaluate.evaluation import Evaluation
from diloco.mesh import sharding
from diloco.mesh.sharding import FSDP, REPLICA
from diloco.model import registry
from diloco.util.types import PyTree

# Part of a step's sequences, to bound the cost: a merge needs two forward passes.
_SHARE = 8


@dataclasses.dataclass
class MergeLoss(Wrapper):
  """Computes the losses around the steps in which a diagnosed sync is merged.

  All merges of such a step lie between the two losses, also those of syncs that are
  not diagnosed.

  A replica computes the loss of an eighth of the sequences that it trains on in a step,
  and of a microbatch at most, so that this needs no more memory than training.

  Attributes:
    c: config of the run.
    batch: tokens and weights [M, B, L] of the sequences.
  """

  c: Config
  batch: tuple[jax.Array, jax.Array]

  def outer(self, t: int, state: TrainState) -> tuple[int, TrainState, list[Event]]:
    """Adds an event with the losses before and after all merges of step t.

    A replica that merged no diagnosed sync has NaN in both. If several diagnosed syncs
    were merged, the event names the fragment of the first.
    """
    merged = self._merged(t)
    if not merged:
      return self.method.outer(t, state)
    before_M = losses(state.params, *self.batch, c=self.c)
    t, state, events = self.method.outer(t, state)
    after_M = losses(state.params, *self.batch, c=self.c)
    mask_M = np.any([mask for _, mask in merged], axis=0)
    metrics = {
      f"loss_{when}_merge": jnp.where(mask_M, x_M, jnp.nan)
      for when, x_M in (("before", before_M), ("after", after_M))
    }
    return t, state, [*events, Event("merge", merged[0][0], t, 0, metrics)]

  def _merged(self, t: int) -> list[tuple[int, tuple[bool, ...]]]:
    """Lists the diagnosed syncs that are merged after step t, as `arrivals`."""
    plan = self.method.plan
    taus = plan.schedule.taus
    return [
      (p, mask)
      for p, mask in plan.schedule.arrivals(t)
      if plan.is_diagnosed(p, t - taus[mask.index(True)])
    ]


def with_merge_loss(
  method: Method, c: Config, mesh: Mesh, evaluation: Evaluation
) -> Method:
  """Wraps a method in `MergeLoss` if log.diagnostics_every asks for it."""
  if not c.log.diagnostics_every or not method.plan.fragments:
    return method
  share, fsdp = c.train.batch_size // c.replicas, mesh.shape[FSDP]
  count = max(share // max(_SHARE, c.train.accumulate) // fsdp, 1) * fsdp
  place = sharding.batch_sharding(mesh)
  tokens, weights = (
    sharding.place(np.broadcast_to(x, (c.replicas, *x.shape)), place)
    for x in evaluation.sequences(count)
  )
  return MergeLoss(method, c, (tokens, weights))


@functools.partial(jax.jit, static_argnames="c")
def losses(
  params_M: PyTree, tokens_MxBxL: jax.Array, weights_MxBxL: jax.Array, *, c: Config
) -> jax.Array:
  """Computes the mean cross entropy of every replica, float32 [M], nats per token."""
  mesh = jax.sharding.get_abstract_mesh()
  batch_axes = () if mesh.size == 1 else (FSDP,)

  def one(params: PyTree, tokens_BxL: jax.Array, weights_BxL: jax.Array) -> jax.Array:
    model = registry.get(c.model)
    nll_BxL, _ = model.losses(c.model, params, tokens_BxL, batch_axes=batch_axes)
    return (nll_BxL * weights_BxL).sum() / weights_BxL.sum()

  args = (params_M, tokens_MxBxL, weights_MxBxL)
  if mesh.shape[REPLICA] == 1:  # As in the inner step: one after the other.
    return jax.lax.map(lambda args: one(*args), args)
  return each_replica(c, one, *args)
