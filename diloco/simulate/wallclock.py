"""Computes idealised wall-clock time of a training run (2503.09799, Appendix A).

Total time is compute time 6 N D / (R Q) plus communication time. Sizes are bits,
bandwidths are bits per second, times are seconds. Gradients and outer gradients have 16
bits per parameter, and H is 30.
"""

import dataclasses
from typing import NamedTuple

# Q, FLOP/s per chip: between half the peak of TPU v5e and half the peak of v6e (A.3).
CHIP_FLOPS = 300e12
# Tokens of each batch that one chip gets; see `chips`.
CHIP_TOKENS = 16_384
BITS, SYNC_EVERY = 16, 30


class Network(NamedTuple):
  """A link between any two nodes: bandwidth in bits/s, latency in seconds."""

  bandwidth: float
  latency: float


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
    method: data_parallel, diloco or overlapped.
    chips: R, the number of chips; None: the function `chips` computes R.
    across: network between datacentres. Inside a datacentre: NETWORKS["high"].
  """

  params: float
  tokens: float
  batch_tokens: float
  replicas: int
  method: str = "diloco"
  chips: float | None = None
  across: Network = NETWORKS["low"]

  @property
  def nodes(self) -> float:
    """R: the field `chips` if it is set, else the result of the function `chips`."""
    return self.chips or chips(self.params, self.batch_tokens)


def chips(params: float, batch_tokens: float) -> float:
  """Returns R, the number of chips of a run, which is equal for all methods.

  The paper prints no R. It says that R depends on N and on the batch, and doubles
  with the batch. The rule here is one chip per 16,384 tokens of the batch. Above 2.4B
  parameters, R grows in proportion to N, because the state needs more memory.
  """
  return batch_tokens / CHIP_TOKENS * max(1.0, params / 2.4e9)


def compute_time(run: Training) -> float:
  """Returns the seconds of computation, 6 N D / (R Q) (A.1)."""
  return 6 * run.params * run.tokens / (run.nodes * CHIP_FLOPS)


def all_reduce_time(bits: float, nodes: float, network: Network) -> float:
  """Returns 2 bits / W (1 - 1/R) + latency, in seconds; 0 on one node (A.2)."""
  if nodes <= 1:
    return 0.0
  return 2 * bits / network.bandwidth * (1 - 1 / nodes) + network.latency


def communication_time(run: Training) -> float:
  """Returns the seconds of communication (A.2).

  Data-parallel all-reduces between datacentres at every step. DiLoCo with M = 1 does so
  too, and once more every H steps. With M >= 2, only the outer steps communicate
  between datacentres. The method `overlapped` hides this communication behind the inner
  steps, as far as their time suffices.
  """
  r, size, steps = run.nodes, BITS * run.params, run.tokens / run.batch_tokens
  wide = all_reduce_time(size, r, run.across) * steps
  if run.method == "data_parallel":
    return wide
  outer = wide / SYNC_EVERY
  if run.replicas == 1:
    return wide + outer
  inner = all_reduce_time(size, r / run.replicas, NETWORKS["high"]) * steps
  if run.method == "overlapped":
    return inner + max(outer - (compute_time(run) + inner), 0.0)
  return inner + outer


def total_time(run: Training) -> float:
  """Returns compute plus communication time, in seconds (A.3)."""
  return compute_time(run) + communication_time(run)
