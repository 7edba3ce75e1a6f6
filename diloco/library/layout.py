"""Names the leaves of any pytree in the way that the outer step expects.

For the outer step, parameters are {"blocks": leaves (N, ...), other names: leaves
(...)}. A fragment has some layers of `blocks` and some of the other names. A `Layout`
turns a user's tree into this form and back, without copying an array.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath, PyTreeDef

from diloco.errors import ConfigError
from diloco.library.arguments import whole_number
from diloco.spec.fragments import Fragment, make_fragments
from diloco.spec.plugins import NAMES
from diloco.spec.shapes import Shapes
from diloco.util.types import PyTree


@dataclasses.dataclass(frozen=True)
class Stacked:
  """Fragments of a model whose layers are stacked, as `nn.scan` of Flax does.

  Attributes:
    path: leaves below this path, such as "params/blocks", are (M, N, ...) for N layers.
      All other leaves together are one more fragment.
    size: layers per fragment; the paper uses 3.
    pattern: strided or sequential (2501.18512, figure 2).
    rest: first or last: when the fragment of all other leaves is sent.
  """

  path: str
  size: int = 3
  pattern: str = "strided"
  rest: str = "last"


Fragments = Stacked | Callable[[str], int] | None


@dataclasses.dataclass(frozen=True)
class Layout:
  """The names of all leaves of a user's tree.

  Attributes:
    structure: tree structure of the user's tree.
    names: top-level name and path of each leaf.
    shapes: shape of each leaf, with the axis of the replicas.
  """

  structure: PyTreeDef
  names: tuple[tuple[str, str], ...]
  shapes: tuple[tuple[int, ...], ...]

  def split(self, tree: PyTree) -> dict[str, dict[str, PyTree]]:
    """Names the leaves of a user's tree.

    Raises:
      ConfigError: the tree has other leaves or shapes than the layout.
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes = tuple(map(np.shape, leaves))
    if (structure, shapes) != (self.structure, self.shapes):
      paths = [path_of(path) for path, _ in jax.tree.leaves_with_path(tree)]
      given = dict(zip(paths, shapes))
      wanted = {path: shape for (_, path), shape in zip(self.names, self.shapes)}
      pairs = [
        (f"shape of the leaf {path}", given.get(path), wanted.get(path))
        for path in wanted | given
      ]
      pairs.append(("structure", structure, self.structure))
      what, theirs, ours = next(x for x in pairs if x[1] != x[2])
      raise ConfigError(
        f"the {what} of params_M is {theirs}, but {ours} in the params_M of"
        " diloco.streaming (None: no such leaf); give parameters with the same leaves"
        " and shapes, see diloco.replicate."
      )
    return self.name(leaves)

  def name(self, leaves: Iterable[PyTree]) -> dict[str, dict[str, PyTree]]:
    """Names one object for each leaf, in the order of the user's tree."""
    parts: dict[str, dict[str, PyTree]] = {}
    for (name, path), leaf in zip(self.names, leaves):
      parts.setdefault(name, {})[path] = leaf
    return parts

  def join(self, parts: PyTree) -> PyTree:
    """Inverts `split`."""
    return self.structure.unflatten([parts[name][path] for name, path in self.names])

  @property
  def parameters(self) -> Shapes:
    """The shapes of one replica's parameters, with their names."""
    return self.name(shape[1:] for shape in self.shapes)


def make_layout(
  params_M: PyTree, fragments: Fragments
) -> tuple[Layout, tuple[Fragment, ...]]:
  """Names the leaves of a tree, and makes its fragments.

  Args:
    params_M: parameters of all replicas, or their shapes.
    fragments: see `diloco.streaming`.

  Raises:
    ConfigError: a leaf is no array, is not floating-point, has 64 bits, or has no
      values; two leaves have the same path; or `fragments` does not fit the tree.
  """
  leaves, structure = jax.tree.flatten_with_path(params_M)
  named = [(path_of(path), leaf) for path, leaf in leaves]
  if not named:
    raise ConfigError("params_M has no leaves; give the parameters of the replicas.")
  for path, leaf in named:
    if not hasattr(leaf, "dtype"):
      raise ConfigError(
        f"the leaf {path} of params_M is {leaf!r}; give an array whose first axis is"
        " the replicas, see diloco.replicate."
      )
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise ConfigError(
        f"the leaf {path} of params_M has the type {leaf.dtype}, but all parameters"
        " must be floating-point; keep this leaf outside of params_M."
      )
    if jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize > 4:  # With JAX_ENABLE_X64.
      raise ConfigError(
        f"the leaf {path} of params_M has the type {leaf.dtype}, but a sync computes in"
        " float32; give this leaf as float32."
      )
    if not leaf.size:
      raise ConfigError(
        f"the leaf {path} of params_M has the shape {leaf.shape}, which has no values;"
        " keep this leaf outside of params_M."
      )
  if not (fragments is None or isinstance(fragments, Stacked) or callable(fragments)):
    raise ConfigError(
      f"fragments is {fragments!r}; give diloco.Stacked(...), a function, or None."
    )
  paths = [path for path, _ in named]
  for path, count in collections.Counter(paths).items():
    if count > 1:
      raise ConfigError(
        f"params_M has {count} leaves with the path {path}; rename one of them."
      )
  if isinstance(fragments, Stacked):
    tops, parts = _stacked(named, fragments)
  else:
    tops, parts = _by_path(paths, fragments or (lambda path: 0))
  shapes = tuple(tuple(leaf.shape) for _, leaf in named)
  return Layout(structure, tuple(zip(tops, paths)), shapes), parts


def _by_path(
  paths: list[str], fragment_of: Callable[[str], int]
) -> tuple[list[str], tuple[Fragment, ...]]:
  numbers = [whole_number(f"fragments({p!r})", fragment_of(p)) for p in paths]
  used, last = {*numbers}, max(numbers)
  count = next(p for p in itertools.count() if p not in used)
  if count <= last:
    raise ConfigError(
      f"fragments gives no leaf to fragment {count} of 0..{last}; number the fragments"
      " without a gap."
    )
  name = lambda p: f"fragment_{p}"
  return [name(p) for p in numbers], tuple(
    Fragment((), (name(p),)) for p in range(count)
  )


def _stacked(
  named: list[tuple[str, jax.Array]], how: Stacked
) -> tuple[list[str], tuple[Fragment, ...]]:
  if not isinstance(how.path, str):
    raise ConfigError(
      f"fragments is Stacked, whose path is {how.path!r}; give the path of the layers,"
      " such as 'params/blocks'."
    )
  for name, choices in (
    ("pattern", tuple(NAMES["fragments.pattern"])),
    ("rest", ("last", "first")),
  ):
    if getattr(how, name) not in choices:
      raise ConfigError(
        f"fragments is Stacked, whose {name} is {getattr(how, name)!r}; choose"
        f" {' or '.join(choices)}."
      )
  below = [path.startswith(how.path.rstrip("/") + "/") for path, _ in named]
  layers = {
    x.shape[1] if x.ndim > 1 else 0 for (_, x), is_in in zip(named, below) if is_in
  }
  if len(layers) != 1 or not min(layers):
    raise ConfigError(
      f"fragments stacks the leaves below {how.path!r}, whose second axes are"
      f" {sorted(layers) or 'none, because there is no such leaf'}; this axis must be"
      " the layers, equally many in every leaf."
    )
  size = whole_number("fragments.size", how.size)
  parts = make_fragments(layers.pop(), size, how.pattern, how.rest)
  if all(below):
    parts = tuple(f for f in parts if f.layers)
  return ["blocks" if is_in else "embed" for is_in in below], parts


def path_of(path: KeyPath) -> str:
  """Returns the path of a leaf as a text, such as params/Dense_0/kernel."""
  return jax.tree_util.keystr(path, simple=True, separator="/")
