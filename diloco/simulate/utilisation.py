"""Simulates the share of time in which a run computes (2501.18512, Section 3.1).

A step of a model with L layers has 4 L - 1 nodes. Each layer has a forward node, a
backward node for its activations (except the first layer), a backward node for its
parameters, and a reduction. Compute nodes take equal times and run one after another.
Reductions run one after another on one link, in the order in which they are requested.
Compute utilisation is compute time / total time.

Neither paper published its simulator. We chose the rules below; they are the same for
all tables of both papers:

- A value that is not quantised has 16 bits. 16 bits explain the data-parallel rows, 32
  bits do not.
- 300 steps are simulated. If the number of steps is a multiple of H, utilisation is an
  average over whole rounds. Otherwise, the last round lacks its reduction.
- A fragment is sent from step t_p on, while the trainer sends nothing before step H
  (`Schedule.is_sent`). With the trainer's rule, only 42 cells of Table 4 would be
  exact, instead of 70.
- The total time includes reductions that are still on the link after the last step.
  Without this rule, the reduction of the last round would take no time. With this rule,
  a short run pays for a reduction that later steps would hide: see `steady.py`.

Times are seconds, sizes are bits, bandwidths are bits per second.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from diloco.simulate.limits import AboveZero, check, check_fields
from diloco.spec import sizes
from diloco.spec.fields import NonNegative, Positive, Range
from diloco.spec.fragments import make_fragments
from diloco.spec.schedule import Schedule

METHODS = ("data_parallel", "diloco", "streaming")
STEPS = 300


class Link(NamedTuple):
  """How a link and its replicas fall short of the papers' ideal.

  Attributes:
    efficiency: share of the bandwidth that payloads can use.
    wait: how long a sync waits for the slowest replica, as a share of the compute time
      since the previous sync. Replicas are never equally fast.
  """

  efficiency: float = 1.0
  wait: float = 0.0


# The papers' ideal, and values fitted to measured utilisation (docs/links.md).
LINKS = {
  "ideal": Link(),
  "nccl": Link(0.97, 0.13),  # NCCL's all-reduce over TCP, four GPUs.
  "gloo": Link(0.69, 0.03),  # Gloo's all-gather, two hosts.
}

# A schedule, and the layers of each of its fragments.
Plan = tuple[Schedule, tuple[tuple[int, ...], ...]]


@dataclasses.dataclass(frozen=True)
class Workload:
  """A model, its step time and how its replicas synchronise.

  Attributes:
    params_per_layer: parameters of each layer, first to last.
    step_time: seconds of pure compute per step.
    method: one of METHODS.
    replicas: M. A replica sends each value 2 (M-1)/M times in an all-reduce (always in
      data-parallel), and M-1 times in a gather. For M=2, each number is 1.
    sync_every: H; data-parallel ignores it.
    fragment_size, pattern: as in `diloco.spec.fragments`; only for streaming.
    tau: number of inner steps that hide a reduction; only for streaming.
    bits: bits per value on the link, including the averages of plug-ins.
    latency: seconds added to every reduction.
    plan: a schedule, and the layers of each fragment. None: the plan of the method.
    exchange: gather, or psum (all-reduces outer gradients).
    link: one of LINKS, which says how much bandwidth and time is lost.

  Raises:
    ValueError: a value is not possible.
  """

  params_per_layer: tuple[float, ...]
  step_time: AboveZero
  method: Annotated[str, METHODS] = "streaming"
  replicas: Positive = 2
  sync_every: Positive = 100
  fragment_size: int = 3
  pattern: str = "strided"
  tau: int = 0
  bits: Annotated[float, Range(0, 10**6, open=True)] = 16
  latency: NonNegative = 0.0
  plan: Plan | None = None
  exchange: str = "gather"
  link: Annotated[str, LINKS] = "ideal"

  def __post_init__(self) -> None:
    check_fields(self)
    _ = self.whole_plan  # Raises an error for an impossible fragment size or tau.

  @classmethod
  def of_equal_layers(
    cls, params: float, layers: int, step_time: float, **fields: Any
  ) -> "Workload":
    """Makes a workload with parameters that are spread evenly over the layers."""
    check("params", params, Range(0, open=True))
    check("layers", layers, Range(1, 1000))
    return cls((params / layers,) * layers, step_time, **fields)

  @property
  def layers(self) -> int:
    return len(self.params_per_layer)

  @property
  def copies(self) -> float:
    """Copies of each value that a replica sends, as in the trainer's ledger."""
    exchange = "psum" if self.method == "data_parallel" else self.exchange
    return sizes.copies(exchange, self.replicas)

  @property
  def transfers(self) -> list[tuple[float, float]]:
    """(bits, seconds) of each layer: its reduction takes bits / bandwidth + seconds.

    If the link has an efficiency below 1, the bits are more than a replica sends. A
    sync waits for the slowest replica before its first reduction, which is the
    reduction of the fragment's last layer.
    """
    schedule, fragments = self.whole_plan
    link, first = LINKS[self.link], {max(layers) for layers in fragments}
    wait = link.wait * self.step_time * schedule.sync_every / len(fragments)
    bits = self.bits * self.copies / link.efficiency
    return [
      (params * bits, self.latency + wait * (layer in first))
      for layer, params in enumerate(self.params_per_layer)
    ]

  @property
  def nodes_per_step(self) -> int:
    """Compute nodes: 3 L - 1, as the first layer needs no gradient of its input."""
    return 3 * self.layers - 1

  @property
  def wait(self) -> int:
    """Steps from a reduction's request to the forward pass that needs its result."""
    return 1 + (self.tau if self.method == "streaming" else 0)

  @functools.cached_property
  def whole_plan(self) -> Plan:
    """`plan` if it is given, else the trainer's plan for a model without embedding."""
    if self.plan is not None:
      return self.plan
    if self.method != "streaming":
      every = 1 if self.method == "data_parallel" else self.sync_every
      return Schedule(1, every, (0,)), (tuple(range(self.layers)),)
    fragments = make_fragments(self.layers, self.fragment_size, self.pattern)
    layers = tuple(f.layers for f in fragments if f.layers)
    return Schedule(len(layers), self.sync_every, (self.tau,)), layers

  def reduced_after(self, step: int) -> set[int]:
    """Returns the layers whose reduction starts in the backward pass of `step` >= 1."""
    schedule, layers = self.whole_plan
    due = [ids for p, ids in enumerate(layers) if schedule.is_due(p, step)]
    return {layer for ids in due for layer in ids}


@dataclasses.dataclass(frozen=True)
class Node:
  """A node of the simulation, for figures and tests.

  Attributes:
    resource: compute or link.
    kind: forward, backward_activations, backward_parameters or reduction.
    step: 1, 2, ...
    layer: 0, 1, ...
    start, end: seconds.
  """

  resource: str
  kind: str
  step: int
  layer: int
  start: float
  end: float


def utilisation(
  work: Workload,
  bandwidths: Sequence[float] | np.ndarray,
  steps: int = STEPS,
  nodes: list[Node] | None = None,
) -> np.ndarray:
  """Returns compute utilisation at each bandwidth; simulates all bandwidths together.

  Args:
    bandwidths: bits per second; infinity is allowed.
    steps: number of simulated steps.
    nodes: a list to which the nodes at the first bandwidth are appended, or None.

  Returns:
    float64, one value in (0, 1] per bandwidth.

  Raises:
    ValueError: a bandwidth is not positive.
  """
  rate, layers = check_rates(bandwidths), work.layers
  node_time = work.step_time / work.nodes_per_step
  transfer = [bits / rate + seconds for bits, seconds in work.transfers]
  clock, link = np.zeros_like(rate), np.zeros_like(rate)
  # Per layer: (step whose forward pass needs the reduction, end of the reduction).
  waiting: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(layers)]

  def record(resource: str, kind: str, start: np.ndarray, end: np.ndarray) -> None:
    if nodes is not None:
      nodes.append(Node(resource, kind, step, layer, float(start[0]), float(end[0])))

  def compute(kind: str) -> None:
    nonlocal clock
    start, clock = clock, clock + node_time
    record("compute", kind, start, clock)

  for step in range(1, steps + 1):
    reduced = work.reduced_after(step)
    for layer in range(layers):
      while waiting[layer] and waiting[layer][0][0] <= step:
        clock = np.maximum(clock, waiting[layer].pop(0)[1])
      compute("forward")
    for layer in reversed(range(layers)):
      if layer:
        compute("backward_activations")
      compute("backward_parameters")
      if layer in reduced:
        start = np.maximum(link, clock)
        link = start + transfer[layer]
        waiting[layer].append((step + work.wait, link))
        record("link", "reduction", start, link)
  return steps * work.step_time / np.maximum(clock, link)


def check_rates(bandwidths: Sequence[float] | np.ndarray) -> np.ndarray:
  """Returns bandwidths as float64 [n].

  Raises:
    ValueError: a bandwidth is not positive.
  """
  rates = np.atleast_1d(np.asarray(bandwidths, np.float64))
  if not np.all(rates > 0):
    raise ValueError(f"bandwidth is {rates.min():g} bit/s, but must be above 0.")
  return rates
