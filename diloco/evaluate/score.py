"""Log-likelihoods of the choices of zero-shot tasks, batched and compiled.

Letters: B sequences, L positions, D width.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from diloco.evaluate import tasks
from diloco.model import decoder as model_lib
from diloco.model import loss as loss_lib
from diloco.model import sharding as mesh_lib

# Sequences are padded at least to so many tokens, see `batches`.
MIN_LENGTH = 32


def make_score(c, mesh):
  """Builds the log-likelihood of continuations under one replica's parameters.

  Sequences are padded to seq_len / 2^k and batched so that every batch has
  `eval.batch_size` * seq_len tokens: few programs, none of them larger than the
  held-out loss's.

  Returns:
    score(params, continuations) -> float64 [len(continuations)], in nats.
  """
  dims = model_lib.ModelDims.from_config(c, (mesh_lib.REPLICA, mesh_lib.FSDP))
  sharding = mesh_lib.eval_sharding(mesh)
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  @functools.partial(jax.jit, out_shardings=whole)
  def log_likelihood(params, tokens_BxL, weights_BxL):
    x_BxLxD = model_lib.hidden_states(dims, params, model_lib.shift_right(tokens_BxL))
    # As many logits at once as in training; gcd(0, L) is L: all of them.
    chunk = math.gcd(c.model.loss_chunk, tokens_BxL.shape[1])

    def row(x_LxD, tokens_L, weights_L):
      nll, _ = loss_lib.token_losses(
        x_LxD[None],
        params["embed"]["tokens"],
        tokens_L[None],
        weights_L[None],
        chunk,
      )
      return -nll

    return jax.vmap(row)(x_BxLxD, tokens_BxL, weights_BxL)

  def score(params, continuations: Sequence[tasks.Continuation]) -> np.ndarray:
    launched = [
      (
        rows,
        log_likelihood(
          params, mesh_lib.place(tokens, sharding), mesh_lib.place(weights, sharding)
        ),
      )
      for rows, tokens, weights in batches(
        continuations, c.model.seq_len, c.eval.batch_size
      )
    ]
    scores = np.zeros(len(continuations))
    for rows, values in launched:
      scores[rows] = np.asarray(values, np.float64)[: len(rows)]
    return scores

  return score


def batches(
  continuations: Sequence[tasks.Continuation], seq_len: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Continuations of similar length together.

  Yields:
    Which of them (int [n]), their tokens (int32 [B, L], n <= B) and weights (float32
    [B, L], 1 where scored), L being seq_len / 2^k >= MIN_LENGTH and B = batch_size *
    (seq_len // L).
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


def make_evaluate_tasks(c, mesh, tokenizer):
  """Builds the zero-shot evaluation of `config.eval.tasks`.

  Returns:
    evaluate(params, details=None) -> {task: TaskResult}; empty without tasks. A list
    as `details` is extended with a dict per item: task, item, scores, gold.

  Raises:
    ConfigError: a task's name is unknown or its items are missing.
  """
  names = [name.strip() for name in c.eval.tasks.split(",") if name.strip()]
  loaded = {
    name: tasks.load_items(name, c.data.data_dir, c.eval.task_items) for name in names
  }
  encoded = {
    name: [tasks.encode(tokenizer, item, c.model.seq_len) for item in items]
    for name, items in loaded.items()
  }
  score = make_score(c, mesh)

  def evaluate(
    params, details: list[dict[str, Any]] | None = None
  ) -> dict[str, tasks.TaskResult]:
    # All tasks in one pass: their sequences fill batches together.
    flat = [s for name in names for item in encoded[name] for s in item]
    found = iter(score(params, flat)) if flat else iter(())
    results = {}
    for name in names:
      scores = [np.array([next(found) for _ in item]) for item in encoded[name]]
      truncated = sum(s.truncated for item in encoded[name] for s in item)
      results[name] = tasks.result(loaded[name], scores, truncated)
      if details is not None:
        details += [
          {"task": name, "item": i, "scores": s.tolist(), "gold": item.gold}
          for i, (s, item) in enumerate(zip(scores, loaded[name]))
        ]
    return results

  return evaluate
