"""Shapes, numbers of parameters and FLOPs of every architecture. No JAX.

Parameters are nested dicts: {"embed": {...}, "blocks": {...}}. Every tensor under
`blocks` has the layer as its first axis.

Letters: N layers, D width, F feed-forward width, K head size, V vocabulary, L
positions.
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from diloco.config.fields import ModelConfig

Shapes = dict[str, Any]  # Nested dicts of tuples of int.


def decoder(m: "ModelConfig") -> Shapes:
  """Shapes of `diloco.model.decoder`."""
  n, d, f = m.num_layers, m.dim, m.ff_dim or 4 * m.dim
  k = d // m.num_heads
  norm = lambda *shape: {"scale": shape}
  heads = {"q_norm": norm(n, k), "k_norm": norm(n, k)} if m.qk_norm else {}
  attention = dict.fromkeys(("q", "k", "v", "out"), (n, d, d))
  return {
    "embed": {
      "tokens": (m.vocab_size, d),
      "positions": (m.seq_len, d),
      "norm": norm(d),
    },
    "blocks": {
      "attention_norm": norm(n, d),
      "attention": attention | heads,
      "ff_norm": norm(n, d),
      "ff": {"up": (n, d, f), "down": (n, f, d)},
    },
  }


SHAPES: dict[str, Callable[["ModelConfig"], Shapes]] = {"decoder": decoder}


def parameters(m: "ModelConfig") -> Shapes:
  """Shapes of one replica's parameters.

  Raises:
    ValueError: there is no such architecture.
  """
  if m.name not in SHAPES:
    raise ValueError(f"model.name is {m.name!r}; choose one of {', '.join(SHAPES)}.")
  return SHAPES[m.name](m)


def leaves(shapes: Shapes, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
  """Pairs (path, shape) in the order of JAX's flattened trees."""
  for name in sorted(shapes):
    part = shapes[name]
    if isinstance(part, dict):
      yield from leaves(part, (*path, name))
    else:
      yield (*path, name), part


def num_params(m: "ModelConfig") -> int:
  """All parameters."""
  return sum(math.prod(shape) for _, shape in leaves(parameters(m)))


def matrix_params(m: "ModelConfig") -> int:
  """N as the papers count it: 12 N D^2 + V D, without positions and norms."""
  return sum(
    math.prod(shape)
    for path, shape in leaves(parameters(m))
    if len(shape) > 1 + (path[0] == "blocks") and path[-1] != "positions"
  )


def flops_per_token(m: "ModelConfig", attention: bool = True) -> float:
  """Training FLOPs per token: 6 N, and 12 layers D L for the attention scores.

  Counts the matrix products of forward and backward pass, and all scores, the masked
  ones too (PaLM, arXiv 2204.02311, appendix B).

  Args:
    m: the model.
    attention: whether scores count; the papers leave them out.
  """
  scores = 12.0 * m.num_layers * m.dim * m.seq_len
  return 6.0 * matrix_params(m) + scores * attention


def sharded_axis(
  path: tuple[str, ...], shape: tuple[int, ...], fsdp: int
) -> int | None:
  """The axis that the mesh's fsdp axis divides: the first one after the layer.

  Args:
    path: names from the root to the tensor.
    shape: of the tensor, without a replica axis.
    fsdp: devices along the fsdp axis.

  Returns:
    None if every device holds the whole tensor: fsdp does not divide the axis.
  """
  axis = int(path[0] == "blocks")
  divides = fsdp > 1 and len(shape) > axis and shape[axis] % fsdp == 0
  return axis if divides else None


def shard(path: tuple[str, ...], shape: tuple[int, ...], fsdp: int) -> tuple[int, ...]:
  """The shape of a tensor's part on one device."""
  axis = sharded_axis(path, shape, fsdp)
  return tuple(n // fsdp if i == axis else n for i, n in enumerate(shape))
