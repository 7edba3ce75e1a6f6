"""The reader's own case: a config of ours as a workload, and what would suit a link."""

import dataclasses
import math
import re

from diloco import config as config_lib
from diloco.simulate import wallclock
from diloco.simulate.utilisation import Workload, utilisation


def step_time(c, chips: int, peak_flops: float, mfu: float) -> float:
  """Seconds of compute per step: 6 N per token over what the chips do.

  Raises:
    ValueError: a number is not positive.
  """
  for name, value in (("chips", chips), ("peak_flops", peak_flops), ("mfu", mfu)):
    if not value > 0:
      raise ValueError(f"{name} is {value}; give a positive number.")
  tokens = c.train.batch_size * c.model.seq_len
  return 6 * config_lib.num_params(c) * tokens / (chips * peak_flops * mfu)


def workload(c, seconds: float) -> Workload:
  """The workload of a resolved config, with the trainer's fragments and schedule.

  The embedding, with the positions and the final norm, counts as one more layer
  before the first; bits are the mean over all parameters.

  Args:
    c: resolved config.
    seconds: compute per step.
  """
  m = c.model
  embed = m.vocab_size * m.dim + m.seq_len * m.dim + m.dim
  block = (config_lib.num_params(c) - embed) / m.num_layers
  schedule = config_lib.make_schedule(c)
  plan = tuple(
    (schedule.offset(p), ((0,) if f.embed else ()) + tuple(i + 1 for i in f.layers))
    for p, f in enumerate(config_lib.make_fragments(c))
  )
  return Workload(
    params_per_layer=(embed,) + (block,) * m.num_layers,
    step_time=seconds,
    method="data_parallel" if c.algorithm == "data_parallel" else "streaming",
    replicas=c.replicas,
    sync_every=c.sync_every,
    tau=min(c.overlap.taus),
    bits=16 if c.algorithm == "data_parallel" else wire_bits(c),
    plan=plan,
    exchange=c.wire.exchange,
  )


def training(c, **kwargs) -> wallclock.Training:
  """The run of a resolved config for the wall-clock model."""
  batch = c.train.batch_size * c.model.seq_len
  return wallclock.Training(
    params=config_lib.num_params(c),
    tokens=c.train.steps * batch,
    batch_tokens=batch,
    replicas=c.replicas,
    sync_every=c.sync_every,
    outer_bits=wire_bits(c),
    **kwargs,
  )


def wire_bits(c) -> float:
  """Bits per parameter that a replica sends in a round, scales and indices included.

  Args:
    c: resolved config; with wire.exchange psum float32 is reduced, whatever the codes.

  Raises:
    ConfigError: the compressor or the format is unknown.
  """
  if c.wire.exchange == "psum":
    return 32.0
  d, f, head = c.model.dim, c.model.ff_dim, c.model.dim // c.model.num_heads
  # Values of each tensor, and of its rows: of a block, then of the embedding.
  block = [(d * d, d)] * 4 + [(d * f, f), (f * d, d)] + [(d, d)] * 2
  block += [(head, head)] * (2 if c.model.qk_norm else 0)
  embed = [(c.model.vocab_size * d, d), (c.model.seq_len * d, d), (d, d)]
  size = 0
  for fragment in config_lib.make_fragments(c):
    if fragment.layers:
      size += sum(tensor_bytes(c.wire, len(fragment.layers), *t) for t in block)
    if fragment.embed:
      size += sum(tensor_bytes(c.wire, 1, *t) for t in embed)
  return 8 * size / config_lib.num_params(c)


def tensor_bytes(wire, layers: int, values: int, row: int) -> int:
  """What a compressor of `diloco.wire.codecs` sends for a tensor; without JAX.

  Args:
    wire: `config.wire`.
    layers: N, each compressed by itself.
    values: S of each layer.
    row: values of a row.
  """
  kept, side = max(math.ceil(round(wire.density * values, 6)), 1), 0
  if wire.compressor == "quantize":
    kept = values
  elif wire.compressor == "topk":
    index_bits = max(math.ceil(math.log2(values)), 1)
    side = -(-layers * kept * index_bits // 8)
  elif wire.compressor in ("random", "dare"):
    side = 8  # A seed.
  else:
    raise config_lib.ConfigError(
      f"wire.compressor is {wire.compressor!r}; choose one of quantize, topk, random,"
      " dare."
    )
  if wire.format in ("fp32", "bf16"):
    return side + layers * kept * {"fp32": 4, "bf16": 2}[wire.format]
  digits = re.fullmatch(r"e([1-9])m(\d)(?:fn)?", wire.format)
  bits = 1 + int(digits[1]) + int(digits[2]) if digits else 0
  if not 2 <= bits <= 8:
    raise config_lib.ConfigError(
      f"wire.format is {wire.format!r}; choose fp32, bf16 or eXmY of 2 to 8 bits, for"
      " example e3m0."
    )
  block = min({0: kept, -1: row}.get(wire.block_size, wire.block_size), kept)
  return side + -(-layers * kept * bits // 8) + layers * -(-kept // block)


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
