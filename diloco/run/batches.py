"""Training batches on the devices, each process reading its own replicas' text."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from diloco.config import Config
from diloco.data import make_train_iterator
from diloco.model import sharding


class Batches:
  """Endless global batches: int32 [M, B, L], of data-parallel [1, M B, L].

  Raises:
    ConfigError: data are missing, too few, or do not fit the model's vocabulary.
  """

  def __init__(self, c: Config, mesh: Mesh):
    self._c = c
    self._sharding = sharding.batch_sharding(mesh, sharding.lead(c))
    self._own = own_replicas(c, mesh)
    self._data = make_train_iterator(c, self._own)

  def __next__(self) -> jax.Array:
    tokens_RxBxL = next(self._data)
    tokens_MxBxL = np.zeros((self._c.replicas, *tokens_RxBxL.shape[1:]), np.int32)
    tokens_MxBxL[self._own] = tokens_RxBxL
    return sharding.place(_by_model(self._c, tokens_MxBxL), self._sharding)

  def get_state(self) -> dict[str, Any]:
    """The position of this process's replicas, see `TrainIterator`."""
    return self._data.get_state()

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes to the positions of all processes."""
    self._data.set_state(state)

  def close(self) -> None:
    self._data.close()


def own_replicas(c: Config, mesh: Mesh) -> list[int]:
  """The replicas whose sequences lie, at least in part, on this process's devices."""
  batch_M = np.zeros((c.replicas, c.train.batch_size // c.replicas), np.int32)
  batch_M += np.arange(c.replicas, dtype=np.int32)[:, None]
  batch = _by_model(c, batch_M)
  places = sharding.batch_sharding(mesh, sharding.lead(c))
  indices = places.addressable_devices_indices_map(batch.shape)
  return sorted({int(r) for index in indices.values() for r in np.unique(batch[index])})


def _by_model(c: Config, tokens_MxB: np.ndarray) -> np.ndarray:
  """Data-parallel's one model takes the batches of all M replicas: [1, M B, ...]."""
  if not c.data_parallel:
    return tokens_MxB
  return tokens_MxB.reshape(1, -1, *tokens_MxB.shape[2:])
