"""Makes the simulators' workload from a config, and computes its seconds per step.

Shapes, wire sizes and the schedule equal those of the trainer.
"""

import dataclasses
import math

from diloco.config import Config
from diloco.simulate.limits import check
from diloco.simulate.utilisation import Workload
from diloco.spec import sizes
from diloco.spec.fields import Range
from diloco.spec.shapes import flops_per_token, leaves, num_params, parameters

# The simulators' defaults: the peak of a TPU v5e, and the share of it that runs reach.
PEAK_TFLOPS, MFU = 197, 0.4


def workload(c: Config, seconds: float, latency: float = 0.0) -> Workload:
  """Makes the workload of a config, with the trainer's fragments and schedule.

  `embed` (embedding, positions, final norm) counts as one more layer before the blocks.
  Each value is sent with the mean number of bits per parameter.

  Args:
    seconds: seconds of compute per step.
    latency: seconds added to every reduction.
  """
  embed = sum(math.prod(s) for _, s in leaves({"embed": parameters(c.model)["embed"]}))
  block = (num_params(c.model) - embed) / c.model.num_layers
  layers = tuple(
    ((0,) if f.rest else ()) + tuple(i + 1 for i in f.layers)
    for f in c.make_fragments()
  )
  # The workload has only the rounds after the joint steps.
  schedule, synced = dataclasses.replace(c.make_schedule(), joint_steps=0), bool(layers)
  return Workload(
    params_per_layer=(embed,) + (block,) * c.model.num_layers,
    step_time=seconds,
    method=c.algorithm,
    replicas=c.replicas,
    sync_every=c.sync_every,
    # Compute can hide an exchange only until a plug-in's next average.
    tau=min([*c.overlap.taus, *(a.every for a in c.averages.values())]),
    bits=wire_bits(c) if synced else 8 * sizes.DTYPE_BYTES[c.inner.gradient_dtype],
    latency=latency,
    plan=(schedule, layers) if synced else None,
    exchange=c.wire.exchange,
  )


def wire_bits(c: Config) -> float:
  """Returns the bits per parameter that a replica sends in a round, with scales.

  The bytes of plug-ins' averages are added to the bytes of the fragments. The simulator
  ignores the time for which these averages wait for the link.
  """
  whole = parameters(c.model)
  size = sum(sizes.exchanged_bytes(c.wire, f.shapes(whole)) for f in c.make_fragments())
  more = sum(c.sync_every / a.every * a.sent for a in c.averages.values())
  copies = sizes.copies(c.wire.exchange, c.replicas)
  return 8 * (size + (more / copies if more else 0)) / num_params(c.model)


def step_time(
  c: Config, chips: int = 1, peak_tflops: float = PEAK_TFLOPS, mfu: float = MFU
) -> float:
  """Computes the seconds per step: FLOPs / (chips * peak * share of the peak).

  The FLOPs include those of the attention scores.

  Args:
    chips: number of chips of all replicas together.
    peak_tflops: peak TFLOP/s of one chip.
    mfu: share of the peak that the run reaches.
  """
  for name, value in (("chips", chips), ("peak_tflops", peak_tflops)):
    check(name, value, Range(0, open=True))
  check("mfu", mfu, Range(0, 1, open=True))
  flops = flops_per_token(c.model) * c.tokens_per_step
  return flops / (chips * (peak_tflops * 1e12) * mfu)
