"""Computes the utilisation of an endless run, by the rules of `utilisation.py`.

In the long run every round of H steps takes the same time: the shortest time for which
a periodic timetable can meet all rules (Reiter, 1968, "Scheduling Parallel
Computations"). A linear program finds this time exactly. Its unknowns are the time of a
round and the moments at which the link or the devices may have to wait.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, sparse

from diloco.simulate.limits import check
from diloco.simulate.utilisation import LINKS, Workload, check_rates
from diloco.spec.fields import Range


class Rule(NamedTuple):
  """Requires after + rounds * (time of a round) >= before + nodes + transfer of layer.

  Attributes:
    after, before: indices of moments in a round. Reduction r has three moments: 3r is
      its request, 3r + 1 is its end, and 3r + 2 is the start of the forward node that
      needs its result.
    rounds: how many rounds after the round of `before` the moment `after` lies.
    nodes: compute nodes between the two moments.
    layer: the layer that crosses the link between the two moments; -1 for none.
  """

  after: int
  before: int
  rounds: int
  nodes: int = 0
  layer: int = -1


def make_rules(work: Workload) -> Iterator[Rule]:
  """Yields the rules of a periodic timetable."""
  schedule, fragments = work.whole_plan
  nodes = work.nodes_per_step
  length = nodes * schedule.sync_every
  # Each reduction in the order of sending: the compute nodes before its request, the
  # compute nodes before the forward node that needs its result, and its layer.
  reductions = sorted(
    (
      schedule.offset(p) * nodes + 3 * work.layers - 2 * layer - (layer == 0),
      (schedule.offset(p) + work.wait) * nodes + layer,
      layer,
    )
    for p, ids in enumerate(fragments)
    for layer in ids
  )
  moments = []
  for r, (request, need, layer) in enumerate(reductions):
    yield Rule(3 * r + 1, 3 * r, -(request // length), layer=layer)
    yield Rule(3 * r + 2, 3 * r + 1, need // length)
    previous = (r or len(reductions)) - 1
    yield Rule(3 * r + 1, 3 * previous + 1, int(r == 0), layer=layer)
    # False sorts before True. So if a request and a need come before the same node, the
    # request is first: the request does not wait for the reduction that the node needs.
    moments += [(request % length, False, 3 * r), (need % length, True, 3 * r + 2)]
  moments.sort()
  first = moments[0]
  moments.append((first[0] + length, *first[1:]))
  for (start, _, before), (end, _, after) in itertools.pairwise(moments):
    yield Rule(after, before, int(end >= length), end - start)


def steady_utilisation(
  work: Workload, bandwidths: Sequence[float] | np.ndarray
) -> np.ndarray:
  """Returns compute utilisation in the long run at each bandwidth.

  Args:
    bandwidths: bits per second; infinity is allowed.

  Returns:
    float64, one value in (0, 1] per bandwidth.

  Raises:
    ValueError: a bandwidth is not positive.
  """
  shares = []
  for rate in check_rates(bandwidths):
    transfer = _bits(work) / rate
    unit = max(_compute_time(work), transfer + sum(s for _, s in work.transfers))
    round_time = _solve(work, unit, transfer=transfer / unit)
    # At most 1, although the solver may miss the optimum by 1e-7.
    shares.append(min(_compute_time(work) / (round_time * unit), 1.0))
  return np.array(shares)


def required_bandwidth(work: Workload, target: float) -> float:
  """Finds the least bandwidth, in bits/s, at which utilisation is `target`.

  Raises:
    ValueError: the target is not between 0 and 1, or no bandwidth reaches it.
  """
  check("target", target, Range(0, 1, open=True))
  unit = _compute_time(work) / target
  transfer = _solve(work, unit, round_time=1.0)
  if transfer < 1e-9:
    late = f" with a latency of {work.latency} s" if work.latency else ""
    late += f" with the waits of {work.link}" if LINKS[work.link].wait else ""
    raise ValueError(
      f"target is {target}, which no bandwidth reaches{late}; lower the target, or"
      " raise tau or sync_every."
    )
  return _bits(work) / (transfer * unit)


def _compute_time(work: Workload) -> float:
  """Returns the seconds of compute in a round."""
  return work.step_time * work.whole_plan[0].sync_every


def _bits(work: Workload) -> float:
  """Returns the bits of all layers in a round, as `Workload.transfers` counts bits."""
  return sum(bits for bits, _ in work.transfers)


def _solve(
  work: Workload,
  unit: float,
  round_time: float | None = None,
  transfer: float | None = None,
) -> float:
  """Finds the shortest round, or the longest transfer of the whole model.

  Args:
    unit: the unit of all times here, in seconds.
    round_time: the time of a round, or None if this time is the unknown.
    transfer: the time that the whole model takes on the link, or None if this time is
      the unknown. Exactly one of round_time and transfer is None.

  Returns:
    The unknown time; 0 if no transfer is possible.
  """
  after, before, rounds, nodes, layer = np.array(list(make_rules(work))).T
  share = np.append(work.params_per_layer, 0)[layer] / sum(work.params_per_layer)
  more = np.array([seconds for _, seconds in work.transfers] + [0.0])[layer]
  seconds = nodes * (work.step_time / work.nodes_per_step) + more
  # Columns: the time of a round, the transfer of the whole model, and the moments.
  row, one = np.arange(len(after)), np.ones(len(after))
  values = np.concatenate([-rounds, share, -one, one])
  columns = np.concatenate([0 * row, 0 * row + 1, after + 2, before + 2])
  fixed = [(v, v) if v is not None else (0, None) for v in (round_time, transfer)]
  count = 3 * work.layers
  solution = optimize.linprog(
    [float(round_time is None), -float(transfer is None), *[0] * count],
    sparse.coo_array((values, (np.tile(row, 4), columns))).tocsr(),
    -seconds / unit,
    bounds=fixed + [(0, None)] * count,
  )
  if solution.x is None:
    return 0.0
  return float(solution.x[0 if round_time is None else 1])
