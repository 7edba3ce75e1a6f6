"""The reader's own case: a config of ours as a workload, and what would suit a link."""

import dataclasses
import math

from diloco.config import Config
from diloco.model.shapes import flops_per_token, leaves, num_params, parameters
from diloco.simulate import wallclock
from diloco.simulate.utilisation import Workload, utilisation
from diloco.wire import sizes


def step_time(c: Config, chips: int, peak_flops: float, mfu: float) -> float:
  """Seconds of compute per step: its FLOPs over what the chips do.

  Raises:
    ValueError: a number is not positive.
  """
  for name, value in (("chips", chips), ("peak_flops", peak_flops), ("mfu", mfu)):
    if not value > 0:
      raise ValueError(f"{name} is {value}; give a positive number.")
  return flops_per_token(c.model) * c.tokens_per_step / (chips * peak_flops * mfu)


def workload(c: Config, seconds: float) -> Workload:
  """The workload of a config, with the trainer's fragments and schedule.

  `embed` (embedding, positions, final norm) counts as one more layer before the first;
  bits are the mean over all parameters.

  Args:
    c: the config.
    seconds: compute per step.
  """
  embed = sum(math.prod(s) for _, s in leaves({"embed": parameters(c.model)["embed"]}))
  block = (num_params(c.model) - embed) / c.model.num_layers
  schedule = c.make_schedule()
  plan = tuple(
    (schedule.offset(p), ((0,) if f.embed else ()) + tuple(i + 1 for i in f.layers))
    for p, f in enumerate(c.make_fragments())
  )
  return Workload(
    params_per_layer=(embed,) + (block,) * c.model.num_layers,
    step_time=seconds,
    method="data_parallel" if c.data_parallel else "streaming",
    replicas=c.replicas,
    sync_every=c.sync_every,
    tau=min(c.overlap.taus),
    bits=16 if c.data_parallel else wire_bits(c),
    plan=plan,
    exchange=c.wire.exchange,
  )


def training(c: Config, **kwargs) -> wallclock.Training:
  """The run of a config for the wall-clock model."""
  return wallclock.Training(
    params=num_params(c.model),
    tokens=c.train.tokens,
    batch_tokens=c.tokens_per_step,
    replicas=c.replicas,
    sync_every=c.sync_every,
    outer_bits=wire_bits(c),
    **kwargs,
  )


def wire_bits(c: Config) -> float:
  """Bits per parameter that a replica exchanges in a round, scales included."""
  whole = parameters(c.model)
  size = sum(sizes.exchanged_bytes(c.wire, f.shapes(whole)) for f in c.make_fragments())
  return 8 * size / num_params(c.model)


@dataclasses.dataclass(frozen=True)
class Choice:
  """A setting that reaches the target, and what the papers saw it cost.

  Attributes:
    loss_per_cent: evaluation loss above H = 30, tau = 1, in per cent.
  """

  sync_every: int
  fragment_size: int
  tau: int
  bits: int
  utilisation: float
  loss_per_cent: float


# Where each penalty comes from; all of Streaming DiLoCo (2501.18512).
SOURCES = {
  "H": "Table 5, 500M on C4: 2.67 at H = 30 and 2.69 at H = 100, per factor of 100/30",
  "tau": "Section 3.3.2, figure 8: below 0.2% up to 10 steps, taken as linear in tau",
  "fragments": "Section 3.3.1, figure 6: 3 layers chosen; other sizes carry no number",
  "bits": "Section 3.3.3, figure 11: no difference from 32 to 4 bits",
}


def loss_penalty(sync_every: int, tau: int) -> float:
  """Per cent of evaluation loss above H = 30 and tau = 1, see SOURCES."""
  per_factor = 100 * (2.69 - 2.67) / 2.67
  h = max(math.log(sync_every / 30) / math.log(100 / 30), 0.0)
  return per_factor * h + 0.2 * max(tau - 1, 0) / 9


def frontier(
  params: float,
  layers: int,
  seconds: float,
  rate: float,
  target: float,
  replicas: int = 2,
) -> list[Choice]:
  """Settings that reach `target` on a link of `rate` bits/s, least penalty first.

  Of settings with the same penalty the one with more bits, then the one nearer to
  fragments of 3 layers, comes first; dominated ones (no better in any of penalty, bits
  and utilisation) are left out.
  """
  if not 0 < target < 1:
    raise ValueError(f"target is {target}; give a utilisation between 0 and 1.")
  found = []
  for h in (30, 50, 100, 200, 300):
    for size in sorted({s for s in (1, 3, 6) if s <= layers}):
      for tau in (1, 2, 5, 10):
        for bits in (16, 8, 4):
          work = Workload.of_equal_layers(
            params,
            layers,
            seconds,
            replicas=replicas,
            sync_every=h,
            fragment_size=size,
            tau=tau,
            bits=bits,
          )
          reached = float(utilisation(work, [rate])[0])
          if reached >= target:
            found.append(Choice(h, size, tau, bits, reached, loss_penalty(h, tau)))
  found.sort(key=lambda c: (c.loss_per_cent, -c.bits, abs(c.fragment_size - 3)))
  kept: list[Choice] = []
  for c in found:
    if not any(k.bits >= c.bits and k.fragment_size <= c.fragment_size for k in kept):
      kept.append(c)
  return kept
