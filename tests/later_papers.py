"""A method of each kind, as a user would write it: one file that no other one knows.

`median` averages by the median. `Mixing` averages the embeddings every few steps.
`Calm` begins with joint steps.
"""

import dataclasses

import jax
import jax.numpy as jnp

from diloco.spec import plugins, shapes, sizes
from diloco.spec.fields import Count
from diloco.spec.plugins import Average, Timetable


@dataclasses.dataclass(frozen=True)
class Mixing(plugins.Extension):
  """Averages the embeddings of the replicas between the syncs."""

  # Steps between two averages. 0: never.
  every: Count = 0

  def schedule(self, c):
    rows, width = shapes.parameters(c.model)["embed"]["tokens"]
    sent = sizes.average_bytes(c.replicas, rows * width)
    mixing = Average(self.every, sent, self.average)
    return Timetable(averages={"mixing": mixing} if self.every else {})

  def average(self, t, sync, state):
    embed = dict(state.params["embed"])
    tokens_M = embed["tokens"]
    embed["tokens"] = jnp.broadcast_to(tokens_M.mean(axis=0), tokens_M.shape)
    params = state.params | {"embed": embed}
    sent = sizes.average_bytes(sync.replicas, tokens_M[0].size)
    return dataclasses.replace(state, params=params), sent


@dataclasses.dataclass(frozen=True)
class Calm(plugins.Extension):
  """Begins with joint steps."""

  # The joint steps. 0: none.
  steps: Count = 0

  def schedule(self, c):
    return Timetable(joint_steps=self.steps)


def median(delta_M, weights_M):
  del weights_M
  return jax.tree.map(lambda x_M: jnp.median(x_M, axis=0), delta_M)


plugins.register("outer.average", "median", median)
plugins.register("fields", "mixing", Mixing)
plugins.register("fields", "calm", Calm)
