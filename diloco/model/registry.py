"""Architectures by name. `Model` has all functions that the package calls.

To add an architecture, write its functions in one file and `register` it.
"""

from collections.abc import Callable
from typing import Protocol

from jax import Array

from diloco.model import decoder, qwen3
from diloco.model.transformer import Params
from diloco.spec import shapes
from diloco.spec.fields import ModelConfig
from diloco.util.types import PyTree

Axes = tuple[str, ...]
Position = int | Array


class Model(Protocol):
  """The functions of an architecture, as `diloco.model.transformer` documents them."""

  DESCRIPTION: dict[str, str]

  def init(self, m: ModelConfig, key: Array) -> Params: ...

  def losses(
    self, m: ModelConfig, params: Params, tokens_BxL: Array, batch_axes: Axes = ()
  ) -> tuple[Array, Array]: ...

  def objective(
    self, m: ModelConfig, params: Params, tokens_BxL: Array, batch_axes: Axes = ()
  ) -> tuple[Array, Array]: ...

  def init_cache(self, m: ModelConfig, batch: int) -> PyTree: ...

  def logits(
    self,
    m: ModelConfig,
    params: Params,
    ids_BxL: Array,
    cache: PyTree,
    start: Position,
    at: Position,
  ) -> tuple[Array, PyTree]: ...


MODELS: dict[str, Model] = {"decoder": decoder, "qwen3": qwen3}


def register(
  name: str,
  model: Model,
  parameters: Callable[[ModelConfig], shapes.Shapes],
  attention_flops: Callable[[ModelConfig], float] = lambda m: 0.0,
) -> None:
  """Registers an architecture for `model.name`.

  Args:
    name: name of the architecture.
    model: a module or an object with the functions of `Model`.
    parameters: returns the parameter shapes; layers are stacked under `blocks`.
    attention_flops: returns the training FLOPs per token that do not come from
      parameters, such as those of the attention scores; may be negative.
  """
  MODELS[name] = model
  shapes.SHAPES[name] = parameters
  shapes.ATTENTION_FLOPS[name] = attention_flops


def get(m: ModelConfig) -> Model:
  """Returns the architecture that `model.name` names."""
  return MODELS[m.name]
