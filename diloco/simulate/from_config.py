"""Simulates a config, and searches for settings that suit a link.

Shapes, wire sizes and the schedule are those of the trainer.
"""

import dataclasses
import itertools
import math
from typing import Any

from diloco.config import Config
from diloco.simulate import wallclock
from diloco.simulate.limits import check
from diloco.simulate.steady import steady_utilisation
from diloco.simulate.utilisation import Workload
from diloco.spec import sizes
from diloco.spec.fields import Range
from diloco.spec.shapes import leaves, matrix_params, num_params, parameters
from diloco.wire.ledger import average_bytes


def workload(c: Config, seconds: float, latency: float = 0.0) -> Workload:
  """Makes the workload of a config, with the trainer's fragments and schedule.

  `embed` (embedding, positions, final norm) counts as one more layer before the first.
  Each value has the mean number of bits of all parameters.

  Args:
    seconds: compute per step.
    latency: seconds per reduction.
  """
  embed = sum(math.prod(s) for _, s in leaves({"embed": parameters(c.model)["embed"]}))
  block = (num_params(c.model) - embed) / c.model.num_layers
  layers = tuple(
    ((0,) if f.rest else ()) + tuple(i + 1 for i in f.layers)
    for f in c.make_fragments()
  )
  # Simulates the rounds after the joint steps.
  schedule, synced = dataclasses.replace(c.make_schedule(), joint_steps=0), bool(layers)
  return Workload(
    params_per_layer=(embed,) + (block,) * c.model.num_layers,
    step_time=seconds,
    method="streaming" if synced else "data_parallel",
    replicas=c.replicas,
    sync_every=c.sync_every,
    # An exchange is hidden up to the next average.
    tau=min([*c.overlap.taus, *(a.every for a in c.averages.values())]),
    bits=wire_bits(c) if synced else gradient_bits(c),
    latency=latency,
    plan=(schedule, layers) if synced else None,
    exchange=c.wire.exchange,
  )


def training(c: Config, **fields: Any) -> wallclock.Training:
  """Makes the training run of a config; `fields` are the other fields of Training.

  N is the papers', without positions and norms. Bits per N include these.
  """
  n = matrix_params(c.model)
  sent = num_params(c.model) / n
  own: dict[str, Any] = {
    "params": n,
    "tokens": c.train.tokens,
    "batch_tokens": c.tokens_per_step,
    "replicas": c.replicas,
    "sync_every": c.sync_every,
    "bits": gradient_bits(c) * sent,
  }
  if c.make_fragments():
    own["outer_bits"] = wire_bits(c) * sent
  return wallclock.Training(**(own | fields))


def gradient_bits(c: Config) -> int:
  """Returns the bits per value of a gradient that data-parallel all-reduces."""
  return 8 * sizes.DTYPE_BYTES[c.inner.gradient_dtype]


def wire_bits(c: Config) -> float:
  """Returns the bits per parameter that a replica sends in a round, with scales.

  The bytes of plug-ins' averages are added to those of the fragments. The simulator
  ignores that averages wait for the link.
  """
  whole = parameters(c.model)
  size = sum(sizes.exchanged_bytes(c.wire, f.shapes(whole)) for f in c.make_fragments())
  sent = average_bytes(c)
  more = sum(c.sync_every / a.every * sent[kind] for kind, a in c.averages.items())
  copies = sizes.copies(c.wire.exchange, c.replicas)
  return 8 * (size + (more / copies if more else 0)) / num_params(c.model)


@dataclasses.dataclass(frozen=True)
class Choice:
  """A streaming setting that reaches the target utilisation.

  Attributes:
    loss_per_cent: the penalty: by how many per cent the evaluation loss exceeds that of
      H = 30 and tau = 1; see `SOURCES`.
  """

  sync_every: int
  fragment_size: int
  tau: int
  bits: int
  utilisation: float
  loss_per_cent: float


# The source of each penalty in Streaming DiLoCo (2501.18512).
SOURCES = {
  "H": "Table 5, 500M on C4: 2.67 at H = 30 and 2.69 at H = 100, per factor of 100/30",
  "tau": "Section 3.3.2, figure 8: below 0.2% up to 10 steps, taken as linear in tau",
  "fragments": "Section 3.3.1, figure 6: 3 layers chosen; other sizes carry no number",
  "bits": "Section 3.3.3, figure 11: no difference from 32 to 4 bits",
}


def loss_penalty(sync_every: int, tau: int) -> float:
  """Returns by how many per cent the loss exceeds that of H = 30 and tau = 1."""
  per_factor = 100 * (2.69 - 2.67) / 2.67
  h = max(math.log(sync_every / 30) / math.log(100 / 30), 0.0)
  return per_factor * h + 0.2 * max(tau - 1, 0) / 9


def ablations(work: Workload, rate: float) -> list[Choice]:
  """Simulates streaming settings on a link.

  Args:
    work: gives parameters, layers, step time, replicas and link; other fields are
      ignored.
    rate: bits per second of the link.
  """
  model = (sum(work.params_per_layer), work.layers, work.step_time)
  fragment_sizes = [size for size in (1, 3, 6) if size <= work.layers]
  found = []
  for h, size, tau, bits in itertools.product(
    (30, 50, 100, 200, 300), fragment_sizes, (1, 2, 5, 10), (16, 8, 4)
  ):
    fields: dict[str, Any] = {"replicas": work.replicas, "link": work.link}
    fields |= {"sync_every": h, "fragment_size": size, "tau": tau, "bits": bits}
    one = Workload.of_equal_layers(*model, **fields)
    reached = float(steady_utilisation(one, [rate])[0])
    found.append(Choice(h, size, tau, bits, reached, loss_penalty(h, tau)))
  return found


def frontier(work: Workload, rate: float, target: float) -> list[Choice]:
  """Finds the `ablations` that reach `target` on a link, smallest penalty first.

  Settings with equal penalties are ordered by bits, most first, and then by how near
  their fragments are to 3 layers. A setting is left out if an earlier one has no fewer
  bits and no larger fragments.

  Args:
    work, rate: as in `ablations`.
    target: utilisation between 0 and 1.
  """
  check("target", target, Range(0, 1, open=True))
  found = [c for c in ablations(work, rate) if c.utilisation >= target]
  found.sort(key=lambda c: (c.loss_per_cent, -c.bits, abs(c.fragment_size - 3)))
  kept: list[Choice] = []
  for c in found:
    if not any(k.bits >= c.bits and k.fragment_size <= c.fragment_size for k in kept):
      kept.append(c)
  return kept


def show(choices: list[Choice]) -> str:
  """Formats the choices and the sources of the penalties."""
  names = ("sync_every", "fragment_size", "tau", "bits", "utilisation")
  lines = ["".join(f"{name:>14}" for name in names) + f"{'loss, %':>10}"]
  layout = "{:>14}" * 4 + "{:>14.3f}{:>+10.2f}"
  lines += [layout.format(*dataclasses.astuple(choice)) for choice in choices]
  return "\n".join(lines + [f"{name}: {source}" for name, source in SOURCES.items()])
