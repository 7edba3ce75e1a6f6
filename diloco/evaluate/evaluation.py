"""Evaluates parameters on the held-out text and the tasks of a config."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from diloco.config import Config
from diloco.data import load_tokenizer, make_eval_set
from diloco.evaluate import heldout, score, tasks
from diloco.util.types import Json


class Scores(NamedTuple):
  """Results of an evaluation on held-out text and on tasks."""

  held_out: heldout.EvalResult
  tasks: dict[str, tasks.TaskResult]

  @property
  def numbers(self) -> dict[str, float]:
    """{name: value} of the results that the log writes."""
    text = self.held_out
    values = {
      "loss_outer": text.loss,
      "perplexity": text.perplexity,
      "bits_per_byte": text.bits_per_byte,
    }
    for task, result in self.tasks.items():
      values[f"{task}_accuracy"] = result.accuracy
      values[f"{task}_accuracy_norm"] = result.accuracy_norm
    return values


class Evaluation:
  """Evaluates one replica's parameters; call it inside `jax.set_mesh(mesh)`.

  Attributes:
    tokenizer: the config's tokenizer.
    held_out, test: digests of the held-out and the test tokens; "" if not loaded.

  Raises:
    ConfigError: the held-out text or the items of a task are missing.
  """

  def __init__(self, c: Config, mesh: Mesh, held_out: bool = True):
    """Loads the tasks and, if `held_out`, the held-out text."""
    rows = heldout.batch_size(c.eval.batch_size, mesh)
    c = dataclasses.replace(c, eval=dataclasses.replace(c.eval, batch_size=rows))
    self._c, self._mesh = c, mesh
    self._eval_set = make_eval_set(c) if held_out else None
    self.held_out = self._eval_set.digest if self._eval_set else ""
    test = held_out and c.eval.test_tokens > 0
    self._test_set = make_eval_set(c, test=True) if test else None
    self.test = self._test_set.digest if self._test_set else ""
    self.tokenizer = load_tokenizer(c.data.tokenizer)
    # {task: [(item, list with a `Continuation` for each of the item's choices)]}
    self._tasks = {
      name: [
        (item, tasks.encode(self.tokenizer, item, c.model.seq_len))
        for item in tasks.load_items(name, c.eval.task_items)
      ]
      for name in filter(None, map(str.strip, c.eval.tasks.split(",")))
    }

  def __call__(self, params: Any) -> Scores:
    """Computes the loss on the held-out text and the accuracies on the tasks."""
    return Scores(self.loss(params), self.tasks(params))

  def loss(self, params: Any) -> heldout.EvalResult:
    """Computes the loss on the held-out text."""
    assert self._eval_set is not None
    return heldout.evaluate(params, self._eval_set, self._c.model, self._mesh)

  def test_loss(self, params: Any) -> float | None:
    """Computes the loss on the test text; None if `eval.test_tokens` is 0."""
    if self._test_set is None:
      return None
    return heldout.evaluate(params, self._test_set, self._c.model, self._mesh).loss

  def tasks(
    self,
    params: Any,
    details: list[Json] | None = None,
    show: bool = False,
  ) -> dict[str, tasks.TaskResult]:
    """Computes {task: its accuracies and their standard errors}.

    Args:
      params: the parameters of one replica.
      details: if given, the method appends a dict for each item: task, item (index),
        scores, gold.
      show: whether to show a progress bar.
    """
    c, every_task = self._c, self._tasks.values()
    # Scores all tasks together, so that fewer batches are partly empty.
    flat = [s for task in every_task for _, encoded in task for s in encoded]
    scored = score.score(
      params, flat, c.model, c.eval.batch_size, self._mesh, show=show
    )
    remaining = iter(scored)
    results = {}
    for name, task in self._tasks.items():
      items = [item for item, _ in task]
      scores = [np.array([next(remaining) for _ in encoded]) for _, encoded in task]
      truncated = sum(s.truncated for _, encoded in task for s in encoded)
      results[name] = tasks.result(items, scores, truncated)
      if details is not None:
        details += [
          {"task": name, "item": i, "scores": s.tolist(), "gold": item.gold}
          for i, (s, item) in enumerate(zip(scores, items))
        ]
    return results
