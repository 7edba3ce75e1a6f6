"""Divides parameters into fragments (Streaming DiLoCo, arXiv 2501.18512). No JAX."""

import dataclasses
import itertools

import numpy as np

from diloco.errors import ConfigError
from diloco.spec.plugins import NAMES, check_name, register
from diloco.spec.shapes import Shapes


@dataclasses.dataclass(frozen=True)
class Fragment:
  """Parameters that are synchronised together.

  Attributes:
    layers: indices of its layers (transformer blocks), ascending; may be empty.
    rest: names of its parameters without a layer axis, or (). The trainer's models have
      one such name, `embed`: embedding, head, positions and final norm.
  """

  layers: tuple[int, ...]
  rest: tuple[str, ...] = ()

  @property
  def indices(self) -> np.ndarray:
    """The layers as int32 (n,), which jitted functions take as an argument."""
    return np.asarray(self.layers, np.int32)

  def shapes(self, parameters: Shapes) -> Shapes:
    """Selects the shapes of the fragment's parameters from those of a model.

    Args:
      parameters: the model's shapes, from `diloco.spec.shapes.parameters`.
    """

    def cut(tree: Shapes | tuple[int, ...]) -> Shapes | tuple[int, ...]:
      if isinstance(tree, dict):
        return {name: cut(part) for name, part in tree.items()}
      return (len(self.layers), *tree[1:])

    blocks = {"blocks": cut(parameters["blocks"])} if self.layers else {}
    return blocks | {name: parameters[name] for name in self.rest}


def strided(num_layers: int, size: int) -> list[range]:
  """Gives layers p, p + n, p + 2n, ... to fragment p of n fragments.

  n is ceil(num_layers / size). If `size` does not divide `num_layers`, some fragments
  have one layer less.
  """
  n = -(-num_layers // size)
  return [range(p, num_layers, n) for p in range(n)]


def sequential(num_layers: int, size: int) -> list[range]:
  """Gives a fragment consecutive layers; the last fragment may be smaller."""
  starts = range(0, num_layers, size)
  return [range(i, min(i + size, num_layers)) for i in starts]


register("fragments.pattern", "strided", strided)
register("fragments.pattern", "sequential", sequential)


def make_fragments(
  num_layers: int, size: int = 3, pattern: str = "strided", embedding: str = "last"
) -> tuple[Fragment, ...]:
  """Splits a model; every parameter belongs to exactly one fragment.

  Args:
    num_layers: transformer blocks N.
    size: blocks per fragment (the paper uses 3); `whole` ignores it.
    pattern: strided, sequential (figure 2), a pattern of a plug-in, or whole: one
      fragment with all parameters, as in DiLoCo.
    embedding: place of the embedding's own fragment in the schedule, last or first. The
      paper shows the fragment (figures 2 and 17) but not when it is sent.

  Returns:
    The P fragments in the order in which they are sent.

  Raises:
    ConfigError: the pattern is unknown, the fragment is larger than the model, or the
      pattern of a plug-in leaves out or repeats a layer.
  """
  patterns = NAMES["fragments.pattern"]
  check_name("fragments.pattern", pattern, (*patterns, "whole"))
  if pattern == "whole":
    return (Fragment(tuple(range(num_layers)), ("embed",)),)
  if not 1 <= size <= num_layers:
    raise ConfigError(
      f"fragments.size is {size}, but the model has {num_layers} layers; choose a size"
      f" from 1 to {num_layers}."
    )
  layers = [tuple(ids) for ids in patterns[pattern](num_layers, size)]
  if sorted(itertools.chain(*layers)) != [*range(num_layers)] or not all(layers):
    raise ConfigError(
      f"fragments.pattern is {pattern!r}, which makes the fragments {layers}; return"
      f" each of the {num_layers} layers once, and no empty fragment."
    )
  blocks = [Fragment(ids) for ids in layers]
  embed = [Fragment((), ("embed",))]
  return tuple(embed + blocks if embedding == "first" else blocks + embed)
