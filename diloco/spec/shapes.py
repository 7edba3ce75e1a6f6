"""Gives parameter shapes, parameter counts and FLOPs of an architecture. No JAX.

Parameters are nested dicts: {"embed": {...}, "blocks": {...}}. The first axis of every
tensor under `blocks` is the layer.

Letters: N layers, D width, F feed-forward width, K head size, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from diloco.spec.plugins import NAMES, register

if TYPE_CHECKING:
  from diloco.spec.fields import ModelConfig

Shapes = dict[str, Any]  # Nested dicts of tuples of int.
# Ids of the special tokens of every tokenizer and model, as in NanoDO.
PAD_ID, EOS_ID, BOS_ID, UNK_ID = range(4)


def decoder(m: "ModelConfig") -> Shapes:
  """Returns the parameter shapes of `diloco.model.decoder`."""
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


class Architecture(NamedTuple):
  """The architecture that model.name names.

  If a plug-in registers a group of fields under the same name, the group is part of
  `ModelConfig`.

  Attributes:
    model: a module or an object with the functions of `registry.Model`; or the name of
      a module, which is imported at the first call because it needs JAX.
    parameters: returns the parameter shapes; layers are stacked under `blocks`.
    attention_flops: returns the training FLOPs per token that do not come from
      parameters, such as those of all attention scores, including masked scores; may be
      negative.
  """

  model: object
  parameters: Callable[["ModelConfig"], Shapes]
  attention_flops: Callable[["ModelConfig"], float] = lambda m: 0.0


register(
  "model.name",
  "decoder",
  Architecture(
    "diloco.model.decoder", decoder, lambda m: 12.0 * m.num_layers * m.dim * m.seq_len
  ),
)


def parameters(m: "ModelConfig") -> Shapes:
  """Returns the parameter shapes of one replica."""
  return NAMES["model.name"][m.name].parameters(m)


def leaves(
  shapes: Shapes, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
  """Yields pairs (path, shape) in the order in which JAX flattens trees."""
  for name in sorted(shapes):
    part = shapes[name]
    if isinstance(part, dict):
      yield from leaves(part, (*path, name))
    else:
      yield (*path, name), part


def num_params(m: "ModelConfig") -> int:
  """Counts all parameters."""
  return sum(math.prod(shape) for _, shape in leaves(parameters(m)))


def matrix_params(m: "ModelConfig") -> int:
  """Counts parameters as the papers do: 12 N D^2 + V D, without positions and norms.

  If the head is separate from the embedding, only the head counts: an embedding is
  looked up, not multiplied.
  """
  whole = parameters(m)
  looked_up = {"positions", "tokens"} if "head" in whole["embed"] else {"positions"}
  return sum(
    math.prod(shape)
    for path, shape in leaves(whole)
    if len(shape) > 1 + (path[0] == "blocks") and path[-1] not in looked_up
  )


def flops_per_token(m: "ModelConfig", attention: bool = True) -> float:
  """Returns training FLOPs per token: 6 per matrix parameter, and attention scores.

  Counts the matrix products of the forward and backward pass, and all attention scores
  including masked scores (PaLM, arXiv 2204.02311, appendix B). For `decoder`, the
  scores take 12 N D L, with L tokens per sequence.

  Args:
    attention: whether attention scores count; the DiLoCo papers do not count them.
  """
  scores = NAMES["model.name"][m.name].attention_flops(m) if attention else 0.0
  return 6.0 * matrix_params(m) + scores


def microbatches(at_least: int, sequences: int) -> int:
  """Returns the number of equal microbatches in a device's sequences of one step.

  Args:
    at_least: train.accumulate.
  """
  more = range(at_least, sequences)
  return next((n for n in more if sequences % n == 0), sequences)


def sharded_axis(
  path: tuple[str, ...], shape: tuple[int, ...], fsdp: int
) -> int | None:
  """Returns the axis of a tensor that fsdp shards: the first after the layer axis.

  Args:
    path: names from the root to the tensor.
    shape: shape of the tensor, without a replica axis.
    fsdp: size of the fsdp axis of the mesh.

  Returns:
    The axis; None if fsdp does not divide its size: each device has the whole tensor.
  """
  axis = int(path[0] == "blocks")
  divides = fsdp > 1 and len(shape) > axis and shape[axis] % fsdp == 0
  return axis if divides else None


def shard(path: tuple[str, ...], shape: tuple[int, ...], fsdp: int) -> tuple[int, ...]:
  """Returns the shape of one device's shard of a tensor."""
  axis = sharded_axis(path, shape, fsdp)
  return tuple(n // fsdp if i == axis else n for i, n in enumerate(shape))
