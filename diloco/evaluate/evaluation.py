"""Held-out text and tasks of a config, ready to evaluate parameters."""

from typing import Any

from jax.sharding import Mesh

from diloco.config import Config
from diloco.data import load_tokenizer, make_eval_set
from diloco.evaluate import heldout, score
from diloco.evaluate.tasks import TaskResult


class Evaluation:
  """Evaluates one replica's parameters.

  Attributes:
    tokenizer: of the config.

  Raises:
    ConfigError: data or tasks are missing.
  """

  def __init__(self, c: Config, mesh: Mesh, held_out: bool = True):
    self._c, self._mesh = c, mesh
    self._eval_set = make_eval_set(c) if held_out else None
    self.tokenizer = load_tokenizer(c.data.tokenizer)
    self._tasks = score.load(c, self.tokenizer)

  def loss(self, params: Any) -> heldout.EvalResult:
    """Held-out loss."""
    assert self._eval_set is not None
    return heldout.evaluate(params, self._eval_set, self._c.model, self._mesh)

  def tasks(
    self, params: Any, details: list[dict[str, Any]] | None = None
  ) -> dict[str, TaskResult]:
    """Accuracies by task, see `score.evaluate`."""
    return score.evaluate(params, self._tasks, self._c, self._mesh, details)
