"""Architectures by name: everything that the rest of the package asks of a model.

To add one, write its functions in a file and `register` it.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from diloco.config.fields import ModelConfig
from diloco.model import decoder, shapes

Params = dict[str, Any]


class Model(Protocol):
  """The functions of an architecture; `diloco.model.decoder` documents them."""

  @property
  def init(self) -> Callable[[ModelConfig, jax.Array], Params]: ...

  @property
  def losses(self) -> Callable[..., tuple[jax.Array, jax.Array]]: ...

  @property
  def init_cache(self) -> Callable[[ModelConfig, int], Any]: ...

  @property
  def logits(self) -> Callable[..., tuple[jax.Array, Any]]: ...


MODELS: dict[str, Model] = {"decoder": decoder}


def register(
  name: str, model: Model, parameters: Callable[[ModelConfig], shapes.Shapes]
) -> None:
  """Makes an architecture known as `model.name`.

  Args:
    name: of the architecture.
    model: a module or an object with the functions.
    parameters: shapes of the parameters; layers are stacked under `blocks`.
  """
  MODELS[name] = model
  shapes.SHAPES[name] = parameters


def get(m: ModelConfig) -> Model:
  """The architecture that a config names."""
  return MODELS[m.name]
