"""Computes idealised wall-clock time of a training run (2503.09799, Appendix A).

Total time is compute time 6 N D / (R Q) plus communication time. Sizes are bits,
bandwidths are bits per second, times are seconds.
"""

import dataclasses
from typing import Annotated

from diloco.simulate.compute_time import training_time
from diloco.simulate.limits import AboveZero, check_fields
from diloco.spec.fields import NonNegative, Positive, Range

# Tokens of a batch per chip; see `chips`.
CHIP_TOKENS = 16_384


@dataclasses.dataclass(frozen=True)
class Network:
  """A link between any two nodes: bandwidth in bits/s, latency in seconds."""

  bandwidth: AboveZero
  latency: NonNegative

  def __post_init__(self) -> None:
    check_fields(self)


METHODS = ("data_parallel", "diloco", "streaming", "overlapped")
# The three networks of A.3.
NETWORKS = {
  "high": Network(400e9, 1e-4),
  "medium": Network(100e9, 1e-3),
  "low": Network(10e9, 1e-2),
}


@dataclasses.dataclass(frozen=True)
class Training:
  """A training run.

  Attributes:
    params: N.
    tokens: D.
    batch_tokens: global batch in tokens. The run has D / batch_tokens steps.
    replicas: M; data-parallel ignores it.
    method: one of METHODS.
    sync_every: H.
    bits: bits per parameter in the all-reduce of an inner step.
    outer_bits: bits per parameter in the all-reduce of an outer step.
    chips: R, the number of chips; None: the function `chips` computes it.
    across: network between datacentres; a datacentre itself has NETWORKS["high"].

  Raises:
    ValueError: a value is not possible; or the run has fewer than two chips, or fewer
      chips than replicas, so that its all-reduces would take no time.
  """

  params: AboveZero
  tokens: AboveZero
  batch_tokens: AboveZero
  replicas: Positive
  method: Annotated[str, METHODS] = "diloco"
  sync_every: Positive = 30
  bits: AboveZero = 16
  outer_bits: AboveZero = 16
  chips: Annotated[float | None, Range(0, open=True)] = None
  across: Network = NETWORKS["low"]

  def __post_init__(self) -> None:
    check_fields(self)
    fewest = 2 if self.method == "data_parallel" else max(2, self.replicas)
    if self.nodes < fewest:
      rule = "" if self.chips else f" (one for {CHIP_TOKENS:,} tokens of the batch)"
      raise ValueError(
        f"chips is {self.nodes:.3g}{rule}, but this run needs at least {fewest}; give"
        " more chips, or a larger batch."
      )

  @property
  def steps(self) -> float:
    return self.tokens / self.batch_tokens

  @property
  def nodes(self) -> float:
    """R: the field `chips` if it is set, else the result of the function `chips`."""
    return self.chips or chips(self.params, self.batch_tokens)


def chips(params: float, batch_tokens: float) -> float:
  """Returns R, the number of chips of a run; every method has the same.

  The paper gives no values. It says that R depends on N and on the batch, and doubles
  with the batch. The rule here is one chip per 16,384 tokens of the batch. Above 2.4B
  parameters, R grows in proportion to N, because the state needs more memory.
  """
  return batch_tokens / CHIP_TOKENS * max(1.0, params / 2.4e9)


def compute_time(run: Training) -> float:
  """Returns the seconds of computation (A.1)."""
  return training_time(run.params, run.tokens, run.nodes)


def all_reduce_time(bits: float, nodes: float, network: Network) -> float:
  """Returns 2 bits / W (1 - 1/R) + latency, in seconds; 0 on one node (A.2)."""
  if nodes <= 1:
    return 0.0
  return 2 * bits / network.bandwidth * (1 - 1 / nodes) + network.latency


def communication_time(run: Training) -> float:
  """Returns the seconds of communication (A.2).

  Data-parallel crosses datacentres at every step. DiLoCo with M = 1 does so too, and
  once more every H steps. With M >= 2 only the outer steps cross datacentres. Streaming
  sends as much as DiLoCo, in smaller pieces; latency is counted once per H steps.
  Overlapped hides as much of the outer steps as the inner steps are long.
  """
  r, size = run.nodes, run.bits * run.params
  wide = all_reduce_time(size, r, run.across) * run.steps
  if run.method == "data_parallel":
    return wide
  outer_size = run.outer_bits * run.params
  outer = all_reduce_time(outer_size, r, run.across) * run.steps / run.sync_every
  if run.replicas == 1:
    return wide + outer
  inner = all_reduce_time(size, r / run.replicas, NETWORKS["high"]) * run.steps
  if run.method == "overlapped":
    return inner + max(outer - (compute_time(run) + inner), 0.0)
  return inner + outer


def total_time(run: Training) -> float:
  """Returns compute plus communication time, in seconds (A.3)."""
  return compute_time(run) + communication_time(run)
