"""Idealised wall-clock time (2503.09799, Appendix A).

Training time is compute time C / (R Q) with C = 6 N D plus communication time. Sizes
are bits, bandwidths bits per second, times seconds.
"""

import dataclasses
import math

# FLOP/s per chip: between half of TPU v5e's and half of v6e's peak (A.3).
CHIP_FLOPS = 300e12
# Tokens of the batch on a chip (see `chips`).
CHIP_TOKENS = 16_384


@dataclasses.dataclass(frozen=True)
class Network:
  """A link between any two nodes: bandwidth in bits/s, latency in seconds."""

  bandwidth: float
  latency: float


METHODS = ("data_parallel", "diloco", "streaming", "overlapped")
# The archetypes of A.3.
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
    batch_tokens: global batch in tokens; steps are D / batch.
    replicas: M; data_parallel ignores it.
    method: one of METHODS.
    sync_every: H.
    bits: per parameter in the all-reduce of an inner step.
    outer_bits: per parameter in that of an outer step.
    chips: R; None takes the rule of `chips`.
    within: network inside a datacentre; the paper always takes the fast one.
    across: network between datacentres.

  Raises:
    ValueError: a number is not positive, or there are fewer chips than two or than
      replicas: the model's all-reduces would take no time.
  """

  params: float
  tokens: float
  batch_tokens: float
  replicas: int
  method: str = "diloco"
  sync_every: int = 30
  bits: float = 16
  outer_bits: float = 16
  chips: float | None = None
  within: Network = NETWORKS["high"]
  across: Network = NETWORKS["low"]

  def __post_init__(self):
    if self.method not in METHODS:
      raise ValueError(
        f"method is {self.method!r}; choose one of {', '.join(METHODS)}."
      )
    for field in dataclasses.fields(self):
      name, value = field.name, getattr(self, field.name)
      if isinstance(value, (int, float)) and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; give a positive number.")
    for network in (self.within, self.across):
      if not (network.bandwidth > 0 and network.latency >= 0):
        raise ValueError(
          f"network is {network}; give positive bits per second and a latency of at"
          " least 0 seconds."
        )
    least = 2 if self.method == "data_parallel" else max(2, self.replicas)
    if self.nodes < least:
      rule = "" if self.chips else f" (one for {CHIP_TOKENS:,} tokens of the batch)"
      raise ValueError(
        f"chips is {self.nodes:.3g}{rule}, but {least} are the fewest between which"
        " this run communicates; give more chips, or a larger batch."
      )

  @property
  def steps(self) -> float:
    return self.tokens / self.batch_tokens

  @property
  def nodes(self) -> float:
    """R."""
    return self.chips or chips(self.params, self.batch_tokens)


def chips(params: float, batch_tokens: float) -> float:
  """R, the chips of a run, whatever the algorithm.

  The paper gives no values, only that R depends on N and the batch and doubles with
  the batch. Rule here: a chip takes 16,384 tokens of the batch, and proportionally
  fewer above 2.4B parameters, whose state needs more chips.
  """
  return batch_tokens / CHIP_TOKENS * max(1.0, params / 2.4e9)


def compute_time(run: Training) -> float:
  """6 N D / (R Q), seconds (A.1)."""
  return 6 * run.params * run.tokens / (run.nodes * CHIP_FLOPS)


def all_reduce_time(bits: float, nodes: float, network: Network) -> float:
  """2 bits / W (1 - 1/R) + latency, seconds; nothing on one node (A.2)."""
  if nodes <= 1:
    return 0.0
  return 2 * bits / network.bandwidth * (1 - 1 / nodes) + network.latency


def communication_time(run: Training) -> float:
  """Seconds spent communicating (A.2).

  Data-parallel crosses datacentres at every step; so does DiLoCo with M = 1, and once
  more every H steps; with M >= 2 only the outer steps do. Streaming sends as much as
  DiLoCo in smaller pieces, each with its latency already counted per H steps.
  Overlapped hides the outer steps as long as H steps of compute take longer.
  """
  r, size = run.nodes, run.bits * run.params
  wide = all_reduce_time(size, r, run.across) * run.steps
  if run.method == "data_parallel":
    return wide
  outer_size = run.outer_bits * run.params
  outer = all_reduce_time(outer_size, r, run.across) * run.steps / run.sync_every
  if run.replicas == 1:
    return wide + outer
  inner = all_reduce_time(size, r / run.replicas, run.within) * run.steps
  if run.method == "overlapped":
    return inner + max(outer - (compute_time(run) + inner), 0.0)
  return inner + outer


def total_time(run: Training) -> float:
  """Compute plus communication, seconds (A.3)."""
  return compute_time(run) + communication_time(run)


def compare(run: Training) -> list[dict[str, float | str]]:
  """Hours of a run by every method, all else equal; its own method is not used."""
  rows: list[dict[str, float | str]] = []
  for method in METHODS:
    one = dataclasses.replace(run, method=method)
    rows.append(
      {
        "method": method,
        "compute_hours": compute_time(one) / 3600,
        "communication_hours": communication_time(one) / 3600,
        "hours": total_time(one) / 3600,
      }
    )
  return rows
