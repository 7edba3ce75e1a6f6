"""Puts training batches on devices; a process reads only the text of its replicas."""

from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from diloco.config import Config
from diloco.data import TrainIterator
from diloco.mesh import sharding
from diloco.util.types import Json


class Replicas(Protocol):
  """Consecutive replicas of the run with `config`; the first is `first_replica`."""

  config: Config
  first_replica: int


class Batches:
  """Yields batches of all replicas, without end: int32 [M, B, L].

  M replicas, B sequences, L tokens. For data-parallel, the shape is [1, M B, L].

  Attributes:
    data: iterator over the batches of this process's R replicas, int32 [R, B, L].

  Raises:
    ConfigError: data are missing or too few, or do not fit the model's vocabulary.
  """

  def __init__(self, c: Config, mesh: Mesh, part: Replicas | None = None):
    """Opens the text of this process's replicas.

    Args:
      c: config of the run, or of the part of the run that is trained here.
      part: the replicas of the whole run that are trained here; None: all replicas.
    """
    self._c = c
    self._sharding = sharding.batch_sharding(mesh, c.one_model)
    self._own = own_replicas(c, mesh)
    whole, first = (part.config, part.first_replica) if part else (c, 0)
    self.data = TrainIterator(whole, [first + m for m in self._own])

  def __iter__(self) -> "Batches":
    return self

  def __next__(self) -> jax.Array:
    tokens_RxBxL = next(self.data)
    tokens_MxBxL = np.zeros((self._c.replicas, *tokens_RxBxL.shape[1:]), np.int32)
    tokens_MxBxL[self._own] = tokens_RxBxL
    tokens = tokens_MxBxL.reshape(self._c.models, -1, tokens_MxBxL.shape[2])
    return sharding.place(tokens, self._sharding)

  def get_state(self) -> Json:
    """Returns positions in this process's shards, see `TrainIterator.get_state`."""
    return self.data.get_state()

  def set_state(self, state: Json) -> None:
    """Goes to a saved position: the results of `get_state` of all processes, merged."""
    self.data.set_state(state)

  def close(self) -> None:
    self.data.close()


def own_replicas(c: Config, mesh: Mesh) -> list[int]:
  """Returns the replicas that have sequences on the devices of this process."""
  per_replica = c.train.batch_size // c.replicas
  owners = np.repeat(np.arange(c.replicas), per_replica).reshape(c.models, -1)
  places = sharding.batch_sharding(mesh, c.one_model)
  indices = places.addressable_devices_indices_map(owners.shape)
  return sorted({int(r) for index in indices.values() for r in owners[index].flat})
