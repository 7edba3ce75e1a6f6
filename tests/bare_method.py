"""The method of a run for tests of checkpoints alone: it trains nothing."""

import types

import jax
import numpy as np
from jax.sharding import Mesh

from diloco.algorithm.placement import OnDevices
from diloco.algorithm.state import OuterState, TrainState
from diloco.checkpoint.checkpoints import Checkpoints
from diloco.mesh.devices import make_mesh
from diloco.spec.schedule import Schedule


def state(value: float) -> TrainState:
  """A state whose first array has a file of its own, as larger arrays have."""
  ramp = np.arange(1200, dtype=np.float32).reshape(40, 30) + value
  params = {"w": jax.numpy.asarray(ramp), "b": jax.numpy.full(3, value, "bfloat16")}
  return TrainState(params, {"n": jax.numpy.int32(value)}, OuterState((), (), (), {}))


class BareMethod:
  """Stands for the method of a run with such a state."""

  def __init__(self, mesh: Mesh):
    schedule = Schedule(0, 1, (0,))
    self.sync = types.SimpleNamespace(
      place=OnDevices(mesh), schedule=schedule, mesh=mesh
    )
    self.state = state(0)

  def after_drain(self, t):
    return self

  def abstract(self, *_, **__):
    return self.state


def open_checkpoints(workdir, c, peers=None) -> Checkpoints:
  return Checkpoints(workdir, c, BareMethod(make_mesh(c)), peers)
