"""The method of a run for tests of checkpoints alone: it trains nothing."""

import types

from jax.sharding import Mesh

from diloco.algorithm.placement import OnDevices
from diloco.algorithm.state import TrainState
from diloco.spec.schedule import Schedule


class BareMethod:
  """Stands for the method of a run whose state is like `state`."""

  def __init__(self, state: TrainState, mesh: Mesh):
    schedule = Schedule(0, 1, (0,))
    self.sync = types.SimpleNamespace(
      place=OnDevices(mesh), schedule=schedule, mesh=mesh
    )
    self.state = state

  def after_drain(self, t):
    return self

  def abstract(self, t, fsdp, drained):
    return self.state
