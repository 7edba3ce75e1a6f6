"""Reports a dry run: all programs of a config on one topology."""

import math
import re
from collections.abc import Iterator, Sequence

import jax
from ml_collections import ConfigDict

from diloco.aot import hlo
from diloco.aot.programs import Program, Programs
from diloco.aot.topology import GPUS, describe, make_mesh
from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.mesh import hardware, memory
from diloco.model import attention
from diloco.spec.shapes import flops_per_token, microbatches, num_params
from diloco.util.command import one_line

Lines = Iterator[str]


def report(config: ConfigDict, topology: str, slices: int, quick: bool) -> Lines:
  """Yields the lines of a dry run of a config on a topology.

  Args:
    config: a config with the fields of `default_config`.
    topology: chip and grid of a slice, or GPU and number of GPUs of a node.
    slices: number of slices or nodes.
    quick: as in `Programs.compile`.

  Raises:
    ConfigError: the config, the topology or the layout is not possible, or `quick` is
      set for GPUs.
  """
  _check_quick(topology, quick)
  devices = describe(topology, slices)
  c = resolve(config)
  programs = Programs(c, make_mesh(c, devices))
  hbm, (replica, fsdp) = _memory(devices), programs.mesh.devices.shape
  yield (
    f"{slices} x {topology}: {len(devices)} {devices[0].device_kind} of {_size(hbm)},"
    f" mesh replica {replica} x fsdp {fsdp}, attention"
    f" {attention.choose(c.model, devices[0].device_kind)}"
    + "; some replica lies on several slices"
    * bool(replica % slices)
  )
  flops = flops_per_token(c.model) * c.tokens_per_step
  parts = microbatches(c.train.accumulate, c.train.batch_size // len(devices))
  yield (
    f"{c.algorithm}, M={c.models}, {num_params(c.model) / 1e6:,.0f}M parameters, batch"
    f" {c.train.batch_size} x {c.model.seq_len} tokens in {parts} parts:"
    f" {flops:.3g} FLOPs per step, {flops / len(devices):.3g} per device"
  )
  yield "state on one device: " + _listed(programs.on_device)
  if programs.on_host:
    yield "state in the host's memory, per device: " + _listed(programs.on_host)
  if programs.payload is not None:
    sent = math.prod(programs.payload.shape[1:])
    yield f"largest payload: fragment {programs.fragment}, {sent:,} bytes per replica"
  yield (
    f"{'program':<26}{'compile':>8}{'arguments':>12}{'temporaries':>12}{'peak':>12}"
    f"{'with state':>12}{'of HBM':>7}{'at the host':>12}  a replica sends"
  )
  most = 0
  for x in _compile(programs, quick):
    most = max(most, x.total)
    m = x.memory
    sizes = (m.argument_size_in_bytes, m.temp_size_in_bytes, x.peak, x.total)
    host = m.host_argument_size_in_bytes + m.host_output_size_in_bytes
    yield (
      f"{x.name:<26}{x.compile_s:>6.1f} s"
      + "".join(f"{_size(size):>12}" for size in sizes)
      + f"{x.total / hbm:>7.1%}{_size(host):>12}  {x.crossing:,.0f} bytes"
      + "".join(f"; {_described(w)}" for w in x.windows)
    )
  fits = "fits" if most <= hbm else "does not fit"
  yield f"most memory on one device: {_size(most)} of {_size(hbm)}, {fits}"


def _check_quick(topology: str, quick: bool) -> None:
  if quick and topology.partition(":")[0] in GPUS:
    raise ConfigError(
      f"--quick changes nothing for --topology={topology}, because XLA for GPUs knows"
      " only one effort; leave it out."
    )


def _compile(programs: Programs, quick: bool) -> Iterator[Program]:
  """Compiles one program after another.

  Raises:
    ConfigError: XLA refuses a program, perhaps because it needs too much memory.
  """
  for name in programs.lower:
    try:
      yield programs.compile(name, quick)
    except jax.errors.JaxRuntimeError as error:
      needed, text = _needed(error), one_line(error)[:200]
      if needed or memory.explain(error):
        raise ConfigError(f"{name} does not fit: {needed or text}") from error
      raise ConfigError(f"XLA refuses {name}: {text}") from error


def _listed(parts: dict[str, int]) -> str:
  each = ", ".join(f"{part} {_size(size)}" for part, size in parts.items())
  return f"{each}; {_size(sum(parts.values()))} in all"


def _size(nbytes: float) -> str:
  """Formats bytes in the largest unit that gives at least 1."""
  unit = max(0, min(3, int(math.log2(max(nbytes, 1)) // 10)))
  return f"{nbytes / 1024**unit:.{2 * (unit > 0)}f} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def _memory(devices: Sequence[jax.Device]) -> int:
  nbytes = hardware.hbm_bytes(devices[0].device_kind)
  assert nbytes is not None, "a chip of TOPOLOGIES is missing in hardware.CHIPS"
  return nbytes


def _described(window: hlo.Window) -> str:
  c = window.collective
  result = f"{c.dtype}[{','.join(map(str, c.shape))}]"
  return f"{c.kind} {result} hidden by {window.hidden} of {window.loops} loops"


def _needed(error: Exception) -> str:
  """Returns needed and available memory, if an error of XLA names them; else ""."""
  size = r"(\d+\.\d+[KMG])"
  middle = r"(?: of |\) exceeds available HBM \()"
  used = re.search(rf"(?:Used |temporaries \(){size}{middle}{size}", one_line(error))
  return f"XLA needs {used[1]} of {used[2]}" if used else ""
