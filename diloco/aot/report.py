"""What a dry run tells: the programs on one topology, or the smallest that fits."""

import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diloco.algorithm.state import TrainState
from diloco.aot import hlo
from diloco.aot.programs import Programs, nbytes
from diloco.aot.topology import TOPOLOGIES, describe, make_mesh
from diloco.config import Config, ConfigError, changed, resolve
from diloco.model.shapes import flops_per_token, num_params
from diloco.model.sharding import FSDP, REPLICA
from diloco.run import hardware


def report(config, topology: str, slices: int, quick: bool = False):
  """Yields the lines of a dry run of a config on a topology.

  Args:
    config: ConfigDict with the fields of `default_config`.
    topology: chip and grid of a slice.
    slices: how many of them.
    quick: see `Programs.compile`.

  Raises:
    ConfigError: the config, the topology or the layout cannot work.
  """
  devices = describe(topology, slices)
  c = _fit_evaluation(resolve(config), len(devices))
  mesh = make_mesh(c, devices, slices)
  programs = Programs(c, mesh)
  hbm = _memory(devices)
  yield (
    f"{slices} x {topology}: {len(devices)} {devices[0].device_kind} of"
    f" {_size(hbm)}, mesh replica {mesh.shape[REPLICA]} x fsdp"
    f" {mesh.shape[FSDP]}"
  )
  flops = flops_per_token(c.model) * c.tokens_per_step
  yield (
    f"{c.algorithm}, M={c.models}, {num_params(c.model) / 1e6:,.0f}M parameters, batch"
    f" {c.train.batch_size} x {c.model.seq_len} tokens in {c.train.accumulate} parts:"
    f" {flops:.3g} FLOPs per step, {flops / len(devices):.3g} per device"
  )
  on_device, on_host = placed_state(c, programs)
  yield "state on one device: " + _listed(on_device)
  if on_host:
    yield "state in the host's memory, per device: " + _listed(on_host)
  if programs.payload is not None:
    sent = math.prod(programs.payload.shape[1:])
    yield f"largest payload: fragment {programs.fragment}, {sent:,} bytes per replica"
  yield (
    f"{'program':<26}{'compile':>8}{'arguments':>12}{'temporaries':>12}{'peak':>12}"
    f"{'with state':>12}{'of HBM':>7}{'at the host':>12}  a replica sends"
  )
  most = 0
  for name in programs.lower:
    try:
      x = programs.compile(name, quick)
    except jax.errors.JaxRuntimeError as error:
      raise ConfigError(f"{name} does not fit: {_reason(error)}") from error
    total = x.peak + outside(programs, on_device, name)
    most = max(most, total)
    yield (
      f"{name:<26}{x.compile_s:>6.1f} s{_size(x.arguments):>12}"
      f"{_size(x.temporaries):>12}{_size(x.peak):>12}{_size(total):>12}"
      f"{total / hbm:>7.1%}{_size(x.host):>12}  {x.crossing:,.0f} bytes"
      + "".join(f"; {_told(w)}" for w in x.windows)
    )
  yield f"most memory on one device: {_size(most)} of {_size(hbm)}" + (
    ", fits" if most <= hbm else ", does not fit"
  )


def find(config, chip: str, slices: int, quick: bool = False):
  """Yields one line per slice tried, smallest first, until all programs fit.

  Microbatches are halved as long as that helps: train.accumulate grows from the
  config's value. What cannot fit by its state alone is not compiled.

  Args:
    config: ConfigDict with the fields of `default_config`.
    chip: a key of `TOPOLOGIES`.
    slices: how many slices.
    quick: see `Programs.compile`.

  Raises:
    ConfigError: there is no such chip, or nothing fits.
  """
  if chip not in TOPOLOGIES:
    raise ConfigError(
      f"--topology={chip} is no chip; choose of {', '.join(TOPOLOGIES)}, or give a"
      f" grid as in {next(iter(TOPOLOGIES))}:4x4."
    )
  for grid in TOPOLOGIES[chip]:
    topology = f"{chip}:{grid}"
    devices = describe(topology, slices)
    hbm = _memory(devices)
    given = _fit_evaluation(resolve(config), len(devices))
    accumulate = given.train.accumulate
    while True:
      try:
        c = changed(given, {"train.accumulate": accumulate})
        programs = Programs(c, make_mesh(c, devices, slices))
      except ConfigError as error:
        yield f"{slices} x {topology}: {error}"
        break
      line = f"{slices} x {topology}, train.accumulate={c.train.accumulate}: "
      on_device, _ = placed_state(c, programs)
      state_bytes, saved = sum(on_device.values()), activations(c, programs.mesh)
      if state_bytes > hbm:
        yield f"{line}the state alone takes {_size(state_bytes)}"
        break
      if state_bytes + nbytes(programs.state.params) + saved <= hbm:
        fits, told = _fits(programs, on_device, hbm, quick)
        yield line + told
        if fits:
          return
      else:
        yield f"{line}activations do not fit beside the state"
      accumulate *= 2
  raise ConfigError(f"no {chip} slice fits; shard more (mesh.fsdp) or lower the batch.")


def _fits(programs: Programs, on_device, hbm: int, quick: bool) -> tuple[bool, str]:
  """Whether all programs fit, and a word on the largest or on one that does not."""
  most, largest = 0, ""
  for name in programs.lower:
    try:
      x = programs.compile(name, quick)
    except jax.errors.JaxRuntimeError as error:
      return False, f"{name} does not fit: {_reason(error)}"
    total = x.peak + outside(programs, on_device, name)
    if total > hbm:
      return False, f"{name} does not fit, {_size(total)} of {_size(hbm)}"
    if total > most:
      most, largest = total, name
  return True, f"fits, {_size(most)} of {_size(hbm)} in {largest}"


def placed_state(
  c: Config, programs: Programs
) -> tuple[dict[str, int], dict[str, int]]:
  """Bytes of the state per device: in device memory, and in the host's."""
  parts = resident(programs.state)
  away = [k for k in parts if k.startswith("outer ")]
  if not (c.outer.offload or c.overlap.transport == "host"):
    away = []
  host = {k: parts.pop(k) for k in away}
  if programs.in_flight:
    parts["in flight"] = programs.in_flight
  return parts, host


def outside(programs: Programs, on_device: dict[str, int], name: str) -> int:
  """Bytes on a device of the state that a program does not take as its argument."""
  s = programs.state
  parts = {
    "inner optimizer": name in ("send", "exchange alone", "update", "merge"),
    "parameters": name in ("exchange alone", "update"),
    "outer parameters": True,
    "outer optimizer": True,
    "in flight": True,
    "compressor": True,
  }
  total = sum(size for part, size in on_device.items() if parts[part])
  if s.outer is None or programs.payload is None:
    return total
  taken = 0
  if name.startswith("exchange") or name == "update":
    taken += nbytes(programs.payload)  # Its part of this device's replicas.
  here = "outer parameters" in on_device
  if name == "update" or (here and name in ("send", "merge")):
    taken += max(nbytes(theta) for theta in s.outer.theta)
  if name == "update":
    taken += max(nbytes(opt_state) for opt_state in s.outer.opt_state)
  return max(total - taken, 0)


def activations(c: Config, mesh: Mesh) -> int:
  """Bytes that a backward pass keeps of every block, at the least: its input."""
  # The sequences of a step lie on all devices, also those of data-parallel's one model.
  rows = c.train.batch_size // (mesh.size * c.train.accumulate)
  width = jnp.dtype(c.model.dtype).itemsize * c.model.dim
  return rows * c.model.seq_len * width * c.model.num_layers


def _fit_evaluation(c: Config, devices: int) -> Config:
  """The config with an evaluation batch that the devices divide; it does not run."""
  return changed(c, {"eval.batch_size": devices * -(-c.eval.batch_size // devices)})


def _listed(parts: dict[str, int]) -> str:
  each = ", ".join(f"{k} {_size(v)}" for k, v in parts.items())
  return f"{each}; {_size(sum(parts.values()))} in all"


def _size(nbytes: float) -> str:
  """Bytes in the largest unit of which there is one."""
  unit = max(0, min(3, int(math.log2(max(nbytes, 1)) // 10)))
  return f"{nbytes / 1024**unit:.{2 * (unit > 0)}f} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def _memory(devices) -> int:
  found = hardware.hbm_bytes(devices[0].device_kind)
  if found is None:
    raise ConfigError(
      f"the memory of a {devices[0].device_kind} is not known; add it to HBM_BYTES in"
      " diloco/hardware.py."
    )
  return found


def _told(w: hlo.Window) -> str:
  c = w.collective
  shape = ",".join(map(str, c.shape))
  return f"{c.kind} {c.dtype}[{shape}] hidden by {w.hidden} of {w.loops} loops"


def _reason(error: Exception) -> str:
  """What XLA says of memory, in one sentence."""
  text = " ".join(str(error).split())
  size = r"(\d+\.\d+[KMG])"
  used = re.search(rf"Used {size} of {size} hbm", text) or re.search(
    rf"temporaries \({size}\) exceeds available HBM \({size}\)", text
  )
  return f"XLA needs {used[1]} of {used[2]}" if used else text[:200]


def resident(s: TrainState) -> dict[str, int]:
  """Bytes of the state on one device, by part."""
  parts = {"parameters": s.params, "inner optimizer": s.opt_state}
  if s.outer:
    parts["outer parameters"] = s.outer.theta
    parts["outer optimizer"] = s.outer.opt_state
    if jax.tree.leaves(s.outer.codec_state):
      parts["compressor"] = s.outer.codec_state
  return {name: nbytes(part) for name, part in parts.items()}
