"""Computes log-likelihoods of continuations, in batches with few different shapes.

Letters: B sequences, L positions.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from diloco.evaluate.heldout import one_behind
from diloco.evaluate.tasks import Continuation
from diloco.mesh import sharding
from diloco.model import registry
from diloco.spec.fields import ModelConfig
from diloco.util.bar import make_bar

# The shortest length L to which `batches` pads sequences.
MIN_LENGTH = 32


def score(
  params: Any,
  continuations: Sequence[Continuation],
  m: ModelConfig,
  batch_size: int,
  mesh: Mesh,
  show: bool = False,
) -> np.ndarray:
  """Computes log-likelihoods, float64 [len(continuations)], in nats.

  Batches have few shapes, so XLA compiles few programs. Every batch has `batch_size` *
  seq_len tokens, so no program needs more memory than that of the held-out loss.

  Args:
    show: whether to show progress on stderr: a bar, or lines if there is no terminal.
  """
  place = functools.partial(sharding.place, sharding=sharding.eval_sharding(mesh))
  launched = (
    (rows, _log_likelihoods(params, place(tokens), place(weights), m=m))
    for rows, tokens, weights in batches(continuations, m.seq_len, batch_size)
  )
  scores = np.zeros(len(continuations))
  count = len(continuations)
  with make_bar(total=count, desc="tasks", unit="choice", disable=not show) as bar:
    for rows, values in one_behind(launched):
      scores[rows] = np.asarray(values)[: len(rows)]
      bar.update(len(rows))
  return scores


@functools.partial(jax.jit, static_argnames="m")
def _log_likelihoods(
  params: Any, tokens_BxL: jax.Array, weights_BxL: jax.Array, *, m: ModelConfig
) -> jax.Array:
  """Returns log-likelihoods of sequences, float32 [B], replicated on all devices."""
  nll_BxL, _ = registry.get(m).losses(m, params, tokens_BxL, batch_axes=sharding.BOTH)
  sums_B = -(nll_BxL * weights_BxL).sum(axis=1)
  return jax.lax.with_sharding_constraint(sums_B, P())


def batches(
  continuations: Sequence[Continuation], seq_len: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Puts continuations of similar length into batches.

  Yields:
    Indices of the continuations (int [n]), their tokens (int32 [B, L], n <= B) and
    weights (float32 [B, L], 1 for tokens of the choice, else 0). L is seq_len, or
    seq_len / 2^k if this is at least MIN_LENGTH. B is batch_size * (seq_len // L).
  """
  lengths = [seq_len]
  while lengths[-1] % 2 == 0 and lengths[-1] // 2 >= MIN_LENGTH:
    lengths.append(lengths[-1] // 2)
  sizes = np.array([len(s.ids) for s in continuations])
  for shorter, length in zip([*lengths[1:], 0], lengths):
    members = np.flatnonzero((sizes > shorter) & (sizes <= length))
    capacity = batch_size * (seq_len // length)
    for first in range(0, len(members), capacity):
      rows = members[first : first + capacity]
      tokens = np.zeros((capacity, length), np.int32)
      weights = np.zeros((capacity, length), np.float32)
      for b, i in enumerate(rows):
        s = continuations[i]
        tokens[b, : len(s.ids)] = s.ids
        weights[b, s.start : len(s.ids)] = 1
      yield rows, tokens, weights
