r"""Predicts the time of a step on devices that are not there, from compiled programs.

python -m diloco roofline --config=chinchilla:1.3B,M=2 --topology=v5e:2x2 --slices=2
python -m diloco roofline --config=chinchilla:335M,M=2 --topology=h100:1 --slices=2 \
  --try=model.remat=none,dots,full --try=model.unroll=1,0

Compiles as `python -m diloco aot` does. The time of a program is a bound: each
operation takes as long as its FLOPs take at the chip's peak, or its bytes of main
memory at the chip's bandwidth, whichever is longer. One operation runs at a time, and
what devices send to each other costs nothing. So a real step takes longer. --try gives
values of a field, and each combination has a row; the last line has the fastest that
fits.

ms        of an inner step; what its products and its bytes alone would take
outer     ms of all outer steps of a round over H, and its share of a step
MFU       at most: the FLOPs of training over those of the chips in a step's time
memory    of the program that needs most, with the state, of what XLA gives
"""

import math
from typing import Any

from absl import flags

from diloco.aot import look_for_no_device
from diloco.config import Config, changed, command_line, resolve
from diloco.contrib.tune.bounds import Bound, as_flags, bound, settings
from diloco.errors import ConfigError
from diloco.util.command import one_line

_CONFIG = command_line.define_config()
_TOPOLOGY = flags.DEFINE_string(
  "topology", None, "Chip and grid, as v5e:16x16, or GPU and number, as h100:8."
)
_SLICES = flags.DEFINE_integer("slices", 1, "Slices or nodes.", lower_bound=1)
_TRY = flags.DEFINE_multi_string(
  "try", [], "A field and its values, as model.remat=none,dots,full; may be repeated."
)
# Bytes per second of the main memory: Google Cloud's pages on each TPU (v5e, v5p, v6e),
# NVIDIA's data sheets of the H100 SXM and the H200.
_BANDWIDTH = {
  **{"v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9},
  **{"h100": 3.35e12, "h200": 4.8e12},
}


def row(c: Config, devices: list[Any], chip: str) -> tuple[float, str]:
  """Compiles the programs of a config; returns seconds per step, and a row.

  The seconds are infinite if a program does not fit.
  """
  import jax

  from diloco.aot.programs import Programs
  from diloco.aot.topology import make_mesh
  from diloco.mesh import hardware
  from diloco.spec.shapes import flops_per_token, leaves, num_params, parameters

  kind = devices[0].device_kind
  peak, hbm = hardware.peak_flops(kind) or math.nan, hardware.hbm_bytes(kind) or 0
  programs = Programs(c, make_mesh(c, devices))
  bounds, most = dict[str, Bound](), 0
  for name in ("inner step", "send", "update", "merge"):
    if name not in programs.lower:
      continue
    try:
      with jax.set_mesh(programs.mesh):
        compiled: Any = programs.lower[name]().compile()
    except jax.errors.JaxRuntimeError as error:
      return math.inf, f"{name} does not compile: {one_line(error)[:90]}"
    bounds[name] = bound(compiled.as_text(), peak, _BANDWIDTH[chip])
    held = compiled.memory_analysis().peak_memory_in_bytes + programs.outside(name)
    most = max(most, held)
  inner, outer = bounds.pop("inner step"), 0.0
  if bounds:
    part = c.make_fragments()[programs.fragment].shapes(parameters(c.model))
    values = sum(math.prod(shape) for _, shape in leaves(part))
    round_s = sum(b.seconds for b in bounds.values()) * num_params(c.model) / values
    outer = round_s / c.sync_every
  step = inner.seconds + outer
  flops = flops_per_token(c.model) * c.tokens_per_step / len(devices)
  return step if most <= hbm else math.inf, (
    f"{1e3 * inner.seconds:>10.2f}{1e3 * inner.products:>10.2f}"
    f"{1e3 * inner.memory:>10.2f}{1e3 * outer:>10.2f}{outer / step:>8.1%}"
    f"{flops / (step * peak):>7.0%}{most / 2**30:>9.1f} GiB{most / hbm:>6.0%}"
  )


def main(_: list[str]) -> None:
  look_for_no_device()
  from diloco.aot.topology import describe

  rows = list(settings(_TRY.value))
  topology = str(_TOPOLOGY.value)
  devices = describe(topology, _SLICES.value)
  c = resolve(_CONFIG.value)
  print(
    f"{'':<40}{'ms':>10}{'products':>10}{'memory':>10}{'outer':>10}{'share':>8}"
    f"{'MFU':>7}{'memory':>13}{'':>6}"
  )
  found = list[tuple[float, str]]()
  for fields in rows:
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    step, line = row(changed(c, fields), devices, topology.partition(":")[0])
    found.append((step, as_flags(fields)))
    print(f"{text or 'the config':<40}{line}", flush=True)
  step, flag = min(found)
  if math.isinf(step):
    raise ConfigError(
      f"nothing fits {_SLICES.value} x {topology}; raise train.accumulate, or shard"
      " more (mesh.fsdp)."
    )
  print(f"fastest that fits, {1e3 * step:.2f} ms at least: {flag or 'no other flag'}")


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "topology"])
  command_line.run(main)
