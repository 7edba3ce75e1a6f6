"""The reader's own case: a config of ours as a workload, and what would suit a link."""

import dataclasses
import importlib.util
import math
import pathlib

from diloco import config as config_lib
from diloco.simulate import wallclock
from diloco.simulate.utilisation import Workload, utilisation


def load_config(name: str):
  """A resolved config from `path` or `path:argument`, as the trainer takes it.

  Raises:
    ValueError: there is no such file.
  """
  path, _, argument = name.partition(":")
  if not pathlib.Path(path).is_file():
    raise ValueError(
      f"config is {name!r}, but there is no file {path}; give for example"
      " configs/chinchilla.py:1.3B,M=2."
    )
  spec = importlib.util.spec_from_file_location("simulated_config", path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return config_lib.resolve(module.get_config(*([argument] if argument else [])))


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
  before the first; scales are counted as one byte per block.

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
  """Bits per value of a quantised payload, scales included; psum reduces float32."""
  w = c.wire
  if w.exchange == "psum":
    return 32.0
  if w.format in ("fp32", "bf16"):
    return {"fp32": 32.0, "bf16": 16.0}[w.format]
  digits = w.format.removesuffix("fn").removeprefix("e").split("m")
  block = w.block_size if w.block_size > 0 else c.model.dim
  return 1 + sum(map(int, digits)) + 8 / block


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
