"""Finds an architecture by its name; `Model` lists what an architecture provides.

To add an architecture, write its functions in one file, then call
`register("model.name", name, Architecture(functions, parameters))`.
"""

import importlib
from typing import Protocol, cast

from jax import Array

from diloco.model.transformer import Params
from diloco.spec.fields import ModelConfig
from diloco.spec.plugins import NAMES
from diloco.util.types import PyTree

Axes = tuple[str, ...]
Position = int | Array


class Model(Protocol):
  """The functions of an architecture, as `diloco.model.transformer` documents them.

  Two optional members read and write weights of other programs:

    read(m, tokenizer, folder): returns {field: value} of the fields that the folder of
      init.checkpoint determines, and an iterator of (name, array) with the tensors of
      `shapes.parameters`, in any float type.
    FORMATS: {`export --format`: write}, where write(model, tokenizer, folder, dtype)
      writes an `interop.load.Model` and returns the names of its files.
  """

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


def get(m: ModelConfig) -> Model:
  """Returns the functions of the architecture that `model.name` names."""
  model = NAMES["model.name"][m.name].model
  return cast(
    Model, importlib.import_module(model) if isinstance(model, str) else model
  )
