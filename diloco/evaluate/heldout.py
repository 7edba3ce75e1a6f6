"""Held-out loss of one replica's parameters."""

import dataclasses
import math

import jax
import numpy as np

from diloco.model import decoder as model_lib
from diloco.model import loss as loss_lib
from diloco.model import sharding as mesh_lib

# Which parameters can be evaluated (2501.18512, Table 3).
WHICH = ("outer", "mean", "first")


@dataclasses.dataclass(frozen=True)
class EvalResult:
  """Loss on held-out text.

  Attributes:
    loss: nats per token.
    bits_per_byte: loss in bits over the UTF-8 bytes of the text.
  """

  loss: float
  bits_per_byte: float

  @property
  def perplexity(self) -> float:
    return math.exp(min(self.loss, 700.0))


def make_evaluate(c, mesh, eval_set):
  """Builds the evaluation of one replica's parameters on a fixed set of batches.

  Args:
    c: resolved config.
    mesh: the device mesh.
    eval_set: `diloco.data.EvalSet`.

  Returns:
    evaluate(params) -> EvalResult.
  """
  axes = (mesh_lib.REPLICA, mesh_lib.FSDP)
  dims = model_lib.ModelDims.from_config(c, axes)
  sharding = mesh_lib.eval_sharding(mesh)

  @jax.jit
  def batch_loss(params, tokens_BxL, weights_BxL):
    x_BxLxD = model_lib.hidden_states(dims, params, model_lib.shift_right(tokens_BxL))
    nll, _ = loss_lib.token_losses(
      x_BxLxD,
      params["embed"]["tokens"],
      tokens_BxL,
      weights_BxL,
      c.model.loss_chunk,
      batch_axes=axes,
    )
    return nll

  def evaluate(params) -> EvalResult:
    sums = [
      batch_loss(
        params, mesh_lib.place(tokens, sharding), mesh_lib.place(weights, sharding)
      )
      for tokens, weights in zip(eval_set.tokens, eval_set.weights)
    ]
    total = float(np.sum(jax.device_get(sums), dtype=np.float64))
    return EvalResult(
      loss=total / eval_set.num_tokens,
      bits_per_byte=total / math.log(2) / eval_set.num_bytes,
    )

  return evaluate
