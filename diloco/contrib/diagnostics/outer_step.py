"""Runs lines 6 to 12 of Algorithm 2 by another function, and measures some syncs.

At these syncs, `MeasuredStep` also computes every replica's loss before and after all
merges of a step. It always uses the same held-out sequences, because the training loss
changes more from batch to batch than by a merge.

Letters: M replicas, B sequences, L positions.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Wrapped

from diloco.algorithm.inner import each_replica
from diloco.algorithm.state import Event, OuterState
from diloco.algorithm.streaming import Step, Streaming
from diloco.algorithm.sync_metrics import Metrics
from diloco.config import Config
from diloco.contrib.diagnostics import measure
from diloco.data import make_eval_set
from diloco.mesh import sharding
from diloco.mesh.sharding import FSDP
from diloco.model import registry
from diloco.util.types import PyTree

# A measured merge uses 1 / _SHARE of a step's sequences, because it needs two more
# forward passes.
_SHARE = 8


@dataclasses.dataclass
class MeasuredStep:
  """Runs lines 6 to 12; measures each fragment's first sync and then every n-th.

  Attributes:
    c: config of the run.
    every: n.
    step: the function that computes lines 6 to 12.
    batch: the result of `sequences`; None before the first measured merge.
  """

  c: Config
  every: int
  step: Step
  batch: tuple[jax.Array, jax.Array] | None = None

  def __call__(
    self,
    sync: Streaming,
    t: int,
    params_M: PyTree,
    state: OuterState,
    last_send: int | None = None,
  ) -> tuple[PyTree, OuterState, list[Event]]:
    """Runs the step; adds an event with the losses before and after all its merges.

    The losses are from before and after all merges of the step, also of syncs that are
    not measured. A replica that merged no measured sync has NaN in both losses. If
    several measured syncs were merged, the event names the fragment with the smallest
    number. Merges after the last step of a run have no event.
    """

    def measured(t: int) -> list[int]:
      """Lists the fragments that are sent after step t and are measured."""
      count = sync.schedule.num_sends
      return [p for p in sync.schedule.sends(t) if (count(p, t) - 1) % self.every == 0]

    lines = dict[str, PyTree]()
    if measured(t):
      lines["lines_7_8"] = partial(_send, sync.lines_7_8)
    if measured(t - min(sync.schedule.taus)):
      lines["lines_10_11"] = partial(_update, sync.lines_10_11)
    measuring = dataclasses.replace(sync, **lines)
    merged_M = [measured(t - tau) for tau in sync.schedule.taus]
    if last_send is not None or not any(merged_M):
      return self.step(measuring, t, params_M, state, last_send)
    batch = self.batch = self.batch or sequences(self.c, sync.mesh)
    before_M = losses(params_M, *batch, c=self.c)
    params_M, state, events = self.step(measuring, t, params_M, state)
    after_M = losses(params_M, *batch, c=self.c)
    mask_M = np.array([*map(bool, merged_M)])
    metrics = {
      f"loss_{when}_merge": jnp.where(mask_M, x_M, jnp.nan)
      for when, x_M in (("before", before_M), ("after", after_M))
    }
    events.append(Event("merge", min(p for ps in merged_M for p in ps), t, 0, metrics))
    return params_M, state, events


def _send(
  lines: Wrapped, params_M: PyTree, theta: PyTree, *args: PyTree, **kind: PyTree
) -> tuple[jax.Array, PyTree, Metrics]:
  """Runs lines 7 and 8 (see `outer.send`), and measures outer gradients by layer."""
  payload, codec_state, metrics = lines(params_M, theta, *args, **kind)
  _, layers, *_ = args
  more = measure.of_send(params_M, theta, payload, layers, **kind)
  return payload, codec_state, metrics | more


def _update(
  lines: Wrapped, theta: PyTree, *args: PyTree, **kind: PyTree
) -> tuple[PyTree, PyTree, Metrics]:
  """Runs lines 10 and 11 (see `outer.update`), and measures the update by layer."""
  before = jax.tree.map(jnp.copy, theta)  # The update donates theta.
  theta, opt_state, metrics = lines(theta, *args, **kind)
  return theta, opt_state, metrics | measure.of_update(before, theta)


def sequences(c: Config, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
  """Reads the first held-out sequences; repeats them if there are too few.

  Their number is 1 / _SHARE of the sequences on which a replica trains in a step, and
  at most a microbatch, so that their loss needs no more memory than training.

  Returns:
    Tokens int32 [M, B, L]; weights float32 [M, B, L], 0 for padding, else 1. All
    replicas have the same sequences.
  """
  share, fsdp = c.train.batch_size // c.replicas, mesh.shape[FSDP]
  count = max(share // max(_SHARE, c.train.accumulate) // fsdp, 1) * fsdp
  length = c.model.seq_len
  tokens = min(c.eval.tokens or count * length, count * length)
  held_out = dataclasses.replace(c.eval, tokens=tokens)
  eval_set = make_eval_set(dataclasses.replace(c, eval=held_out))
  used = -(-eval_set.num_tokens // length)  # Later rows are padding only.
  rows_M = np.broadcast_to(np.arange(count) % used, (c.replicas, count))
  place = sharding.batch_sharding(mesh)
  tokens_MxBxL, weights_MxBxL = (
    sharding.place(x.reshape(-1, length)[rows_M], place)
    for x in (eval_set.tokens, eval_set.weights)
  )
  return tokens_MxBxL, weights_MxBxL


@partial(jax.jit, static_argnames="c")
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

  return each_replica(c, one, params_M, tokens_MxBxL, weights_MxBxL, in_turn=True)
