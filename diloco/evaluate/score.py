"""Log-likelihoods of the choices of zero-shot tasks, batched and compiled.

Letters: B sequences, L positions.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diloco.config import Config
from diloco.config.fields import ModelConfig
from diloco.data import Tokenizer
from diloco.evaluate import tasks
from diloco.model import registry, sharding

# Shortest length to which sequences are padded, see `batches`.
MIN_LENGTH = 32


@dataclasses.dataclass(frozen=True)
class Loaded:
  """A task's items, and for each item the sequences of its choices."""

  items: list[tasks.Item]
  encoded: list[list[tasks.Continuation]]


def load(c: Config, tokenizer: Tokenizer) -> dict[str, Loaded]:
  """The tasks of `eval.tasks`, by name.

  Raises:
    ConfigError: a task's name is unknown or its items are missing.
  """
  found = {}
  for name in filter(None, map(str.strip, c.eval.tasks.split(","))):
    items = tasks.load_items(name, c.data.data_dir, c.eval.task_items)
    encode = lambda item: tasks.encode(tokenizer, item, c.model.seq_len)
    found[name] = Loaded(items, list(map(encode, items)))
  return found


def evaluate(
  params: Any,
  loaded: dict[str, Loaded],
  c: Config,
  mesh: Mesh,
  details: list[dict[str, Any]] | None = None,
) -> dict[str, tasks.TaskResult]:
  """Accuracies by task; empty without tasks.

  Args:
    params: of one replica.
    loaded: from `load`.
    c: the config.
    mesh: the device mesh.
    details: if given, receives one dict per item: task, item, scores, gold.
  """
  # All tasks in one pass: their sequences fill batches together.
  flat = [s for task in loaded.values() for item in task.encoded for s in item]
  found = iter(score(params, flat, c.model, c.eval.batch_size, mesh) if flat else ())
  results = {}
  for name, task in loaded.items():
    scores = [np.array([next(found) for _ in item]) for item in task.encoded]
    truncated = sum(s.truncated for item in task.encoded for s in item)
    results[name] = tasks.result(task.items, scores, truncated)
    if details is not None:
      details += [
        {"task": name, "item": i, "scores": s.tolist(), "gold": item.gold}
        for i, (s, item) in enumerate(zip(scores, task.items))
      ]
  return results


def score(
  params: Any,
  continuations: Sequence[tasks.Continuation],
  m: ModelConfig,
  batch_size: int,
  mesh: Mesh,
) -> np.ndarray:
  """Log-likelihoods of continuations, float64 [len(continuations)], in nats.

  Pads sequences to seq_len / 2^k, in batches of `batch_size` * seq_len tokens: few
  programs, none of them larger than the held-out loss's.
  """
  at = sharding.eval_sharding(mesh)
  launched = [
    (
      rows,
      _log_likelihoods(
        params,
        sharding.place(tokens, at),
        sharding.place(weights, at),
        m=m,
        mesh=mesh,
      ),
    )
    for rows, tokens, weights in batches(continuations, m.seq_len, batch_size)
  ]
  scores = np.zeros(len(continuations))
  for rows, values in launched:
    scores[rows] = np.asarray(values, np.float64)[: len(rows)]
  return scores


@functools.partial(jax.jit, static_argnames=("m", "mesh"))
def _log_likelihoods(
  params: Any,
  tokens_BxL: jax.Array,
  weights_BxL: jax.Array,
  *,
  m: ModelConfig,
  mesh: Mesh,
) -> jax.Array:
  """float32 [B], whole on every device."""
  nll_BxL, _ = registry.get(m).losses(m, params, tokens_BxL, batch_axes=sharding.BOTH)
  sums_B = -(nll_BxL * weights_BxL).sum(axis=1)
  return jax.lax.with_sharding_constraint(sums_B, NamedSharding(mesh, P()))


def batches(
  continuations: Sequence[tasks.Continuation], seq_len: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Batches of continuations of similar length.

  Yields:
    Indices of the continuations (int [n]), their tokens (int32 [B, L], n <= B) and
    weights (float32 [B, L], 1 where scored). L is seq_len / 2^k >= MIN_LENGTH, and B is
    batch_size * (seq_len // L).
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
