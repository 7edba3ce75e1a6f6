"""Computes the held-out loss of one replica's parameters.

Letters: B sequences, L positions.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from diloco.data import EvalSet
from diloco.mesh import sharding
from diloco.model import registry
from diloco.spec.fields import ModelConfig

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class EvalResult:
  """Loss on held-out text.

  Attributes:
    loss: nats per token.
    bits_per_byte: bits per byte of the UTF-8 text.
  """

  loss: float
  bits_per_byte: float

  @property
  def perplexity(self) -> float:
    return math.exp(min(self.loss, 700.0))  # exp(710) overflows.


def evaluate(params: Any, eval_set: EvalSet, m: ModelConfig, mesh: Mesh) -> EvalResult:
  """Computes the loss of one replica's parameters on a fixed set of batches.

  Args:
    params: one replica's parameters, without an axis of replicas.
    mesh: the mesh of `params`; call this function under `jax.set_mesh(mesh)`. The
      number of its devices must divide the rows of a batch.
  """
  place = functools.partial(sharding.place, sharding=sharding.eval_sharding(mesh))
  launched = (
    sum_of_losses(params, place(tokens), place(weights), m=m)
    for tokens, weights in zip(eval_set.tokens, eval_set.weights)
  )
  total = sum(map(float, one_behind(launched)))
  bits = total / math.log(2)
  return EvalResult(total / eval_set.num_tokens, bits / eval_set.num_bytes)


def one_behind(launched: Iterable[Result]) -> Iterator[Result]:
  """Yields each result after the next launch, so that no device waits.

  With dozens of launches at once, collectives between CPU devices may wait for each
  other forever.
  """
  before, after = itertools.tee(launched)
  next(after, None)
  for one, _ in itertools.zip_longest(before, after):
    yield one


def batch_size(asked: int, mesh: Mesh) -> int:
  """Rounds a batch size up to a multiple of the number of devices of the mesh."""
  return -(-asked // mesh.size) * mesh.size


@functools.partial(jax.jit, static_argnames="m")
def sum_of_losses(
  params: Any, tokens_BxL: jax.Array, weights_BxL: jax.Array, *, m: ModelConfig
) -> jax.Array:
  """Sums a batch's weighted losses: int32 tokens, float32 weights, sharded over B."""
  nll_BxL, _ = registry.get(m).losses(m, params, tokens_BxL, batch_axes=sharding.BOTH)
  return (nll_BxL * weights_BxL).sum()
