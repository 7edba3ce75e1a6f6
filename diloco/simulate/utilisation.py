"""Compute utilisation by a discrete-event simulation (2501.18512, Section 3.1).

A step has one node per layer for the forward pass, the backward pass with respect to
activations (not for the first layer), the backward pass with respect to parameters, and
the reduction: 4 L - 1. Compute nodes run in order on one resource, reductions in order
on one first-in first-out link. Utilisation is compute time over total time.

Neither paper published its simulator; `Assumptions` says what was chosen and why.
All times are seconds, all sizes bits, all bandwidths bits per second.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from diloco.algorithm.schedule import Schedule, make_fragments
from diloco.wire import sizes

METHODS = ("data_parallel", "diloco", "streaming")


@dataclasses.dataclass(frozen=True)
class Assumptions:
  """What the papers leave open; one setting for all their tables.

  Attributes:
    bits_per_value: of what is not quantised. 16 explains the data-parallel rows, 32
      does not.
    steps: simulated steps. A multiple of H averages whole rounds, and then more
      change next to nothing; other numbers leave the last round without its reduction.
    wait_for_last: whether what is still on the link at the end counts. Without it the
      last of few rounds would be free.
    report_below: whether a table shows the last grid point below the target, not the
      first that reaches it.
  """

  bits_per_value: float = 16
  steps: int = 300
  wait_for_last: bool = True
  report_below: bool = True


@dataclasses.dataclass(frozen=True)
class Workload:
  """What is trained, and how it is synchronised.

  Attributes:
    params_per_layer: parameters of each layer, first to last.
    step_time: seconds of pure compute per step.
    method: one of METHODS.
    replicas: M. Data-parallel all-reduces gradients, 2 (M-1)/M of them on a link;
      the others gather outer gradients, M-1 payloads. Both are 1 for M = 2.
    sync_every: H; data-parallel ignores it.
    fragment_size, pattern: of streaming, see `diloco.fragments`.
    tau: inner steps that hide a reduction.
    bits: per value on the link; None takes the assumptions'.
    latency: seconds added to every reduction.
    plan: (offset, layers) of each fragment, sent at offset, offset + H, ...; None
      makes it of fragment_size and pattern.
    exchange: of outer gradients, gather or psum, which all-reduces them.
  """

  params_per_layer: tuple[float, ...]
  step_time: float
  method: str = "streaming"
  replicas: int = 2
  sync_every: int = 100
  fragment_size: int = 3
  pattern: str = "strided"
  tau: int = 0
  bits: float | None = None
  latency: float = 0.0
  plan: tuple[tuple[int, tuple[int, ...]], ...] | None = None
  exchange: str = "gather"

  def __post_init__(self):
    if self.method not in METHODS:
      raise ValueError(
        f"method is {self.method!r}; choose one of {', '.join(METHODS)}."
      )
    if not self.params_per_layer or not all(
      p > 0 and math.isfinite(p) for p in self.params_per_layer
    ):
      raise ValueError(
        "params_per_layer needs at least one layer, each of a positive number of"
        f" parameters; it is {_short(self.params_per_layer)}."
      )
    if not (self.step_time > 0 and math.isfinite(self.step_time)):
      raise ValueError(
        f"step_time is {self.step_time}; give positive seconds of compute per step."
      )
    if not (self.latency >= 0 and math.isfinite(self.latency)):
      raise ValueError(f"latency is {self.latency}; give seconds of at least 0.")
    if self.bits is not None and not 0 < self.bits <= 64:
      raise ValueError(f"bits is {self.bits}; give bits per value from 1 to 64.")
    if self.replicas < 1:
      raise ValueError(f"replicas is {self.replicas}; M must be at least 1.")
    if self.sync_every < 1:
      raise ValueError(f"sync_every is {self.sync_every}; H must be at least 1.")
    if self.method == "streaming":
      self.own_plan()  # Refuses fragments and taus that cannot be.

  @classmethod
  def of_equal_layers(cls, params: float, layers: int, step_time: float, **kwargs):
    """A model of `params` parameters, spread evenly over its layers."""
    if layers < 1:
      raise ValueError(f"layers is {layers}; a model has at least 1.")
    return cls((params / layers,) * layers, step_time, **kwargs)

  @property
  def layers(self) -> int:
    return len(self.params_per_layer)

  @property
  def copies(self) -> float:
    """How often a reduced value crosses a replica's link, as the trainer counts it."""
    if self.method == "data_parallel" or self.exchange == "psum":
      return sizes.all_reduced(self.replicas, 1)
    return sizes.gathered(self.replicas, 1)

  def own_plan(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """`plan`, or the trainer's schedule of fragments without an embedding."""
    if self.plan is not None:
      return self.plan
    made = make_fragments(self.layers, self.fragment_size, self.pattern)
    fragments = [f.layers for f in made if f.layers]
    schedule = Schedule(len(fragments), self.sync_every, (self.tau,))
    return tuple((schedule.offset(p), layers) for p, layers in enumerate(fragments))

  def reduced_after(self, step: int) -> set[int]:
    """Layers whose reduction starts in the backward pass of step 1, 2, ..."""
    h = self.sync_every
    if self.method == "data_parallel":
      return set(range(self.layers))
    if self.method == "diloco":
      return set(range(self.layers)) if step % h == 0 else set()
    return {
      layer
      for offset, layers in self.own_plan()
      if (step - offset) % h == 0
      for layer in layers
    }


@dataclasses.dataclass(frozen=True)
class Node:
  """One event of the schedule, for pictures and checks.

  Attributes:
    resource: compute or link.
    kind: forward, backward_activations, backward_parameters or reduction.
    step, layer: which, counted from 1 and from 0.
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
  assumptions: Assumptions | None = None,
  nodes: list[Node] | None = None,
) -> np.ndarray:
  """Compute utilisation at each bandwidth; all bandwidths are simulated at once.

  Args:
    work: the workload.
    bandwidths: bits per second; infinity is allowed.
    assumptions: default `Assumptions()`.
    nodes: if given, receives the events at the first bandwidth.

  Returns:
    float64, compute time / total time, in (0, 1].

  Raises:
    ValueError: a bandwidth is not positive.
  """
  a = assumptions or Assumptions()
  rate = np.atleast_1d(np.asarray(bandwidths, np.float64))
  if not np.all(rate > 0):
    raise ValueError(
      f"bandwidth is {_short(bandwidths)}; give positive bits per second."
    )
  layers = work.layers
  # The first layer has no gradient with respect to its input.
  node = work.step_time / (3 * layers - 1)
  bits = work.bits if work.bits is not None else a.bits_per_value
  transfer = [
    work.latency + p * bits * work.copies / rate for p in work.params_per_layer
  ]
  clock, link = np.zeros_like(rate), np.zeros_like(rate)
  # Per layer: (step whose forward pass needs it, time at which it is there).
  waiting: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(layers)]
  wait = work.tau if work.method == "streaming" else 0

  def compute(kind: str, step: int, layer: int) -> None:
    nonlocal clock
    if nodes is not None:
      nodes.append(
        Node("compute", kind, step, layer, float(clock[0]), float(clock[0] + node))
      )
    clock = clock + node

  for step in range(1, a.steps + 1):
    reduced = work.reduced_after(step)
    for layer in range(layers):
      while waiting[layer] and waiting[layer][0][0] <= step:
        clock = np.maximum(clock, waiting[layer].pop(0)[1])
      compute("forward", step, layer)
    for layer in reversed(range(layers)):
      if layer:
        compute("backward_activations", step, layer)
      compute("backward_parameters", step, layer)
      if layer in reduced:
        start = np.maximum(link, clock)
        link = start + transfer[layer]
        waiting[layer].append((step + 1 + wait, link))
        if nodes is not None:
          nodes.append(
            Node("link", "reduction", step, layer, float(start[0]), float(link[0]))
          )
  end = np.maximum(clock, link) if a.wait_for_last else clock
  return a.steps * work.step_time / end


def required_bandwidth(
  work: Workload, target: float, assumptions: Assumptions | None = None
) -> float:
  """The least bandwidth in bits per second at which utilisation reaches `target`.

  By bisection between 1 Mbit/s and 1 Pbit/s, to 0.1%.

  Raises:
    ValueError: the target is not within (0, 1) or out of reach (latency).
  """
  if not 0 < target < 1:
    raise ValueError(f"target is {target}; give a utilisation between 0 and 1.")
  low, high = 1e6, 1e15
  if utilisation(work, [high], assumptions)[0] < target:
    raise ValueError(
      f"target is {target}, which latency {work.latency} s keeps out of reach at any"
      " bandwidth; raise tau or sync_every."
    )
  while high / low > 1.001:
    grid = np.geomspace(low, high, 33)
    reached = utilisation(work, grid, assumptions) >= target
    first = int(np.argmax(reached))
    if first == 0:
      return float(low)
    low, high = float(grid[first - 1]), float(grid[first])
  return float(high)


def _short(values) -> str:
  text = str(values)
  return text if len(text) < 60 else text[:57] + "..."
