"""Makes the replica x fsdp mesh from the available devices."""

import itertools
import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from diloco.config import Config
from diloco.config.resolve import check_some
from diloco.errors import ConfigError
from diloco.mesh.sharding import mesh_of


def divide_cpu(count: int) -> None:
  """Divides the CPU into devices, at most one for each core of this process.

  Call this before any other use of JAX. It does nothing if XLA_FLAGS already divide
  the CPU.
  """
  count = min(count, len(os.sched_getaffinity(0)))
  flags = os.environ.get("XLA_FLAGS", "")
  if count > 1 and "xla_force_host_platform_device_count" not in flags:
    jax.config.update("jax_num_cpu_devices", count)


def make_mesh(c: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Makes the mesh of a config, see `layout`.

  Args:
    devices: devices to use, default all of them.

  Raises:
    ConfigError: the layout does not fit the devices, the replicas or the batch.
  """
  devices = jax.devices() if devices is None else devices
  replica, fsdp = layout(c, len(devices))
  return mesh_of(device_grid(devices, replica, fsdp))


def layout(c: Config, n: int) -> tuple[int, int]:
  """Divides n devices into axes; derives `mesh.replica` and `mesh.fsdp` if they are 0.

  Returns:
    The sizes of the axes replica and fsdp.

  Raises:
    ConfigError: the layout does not fit the devices, the replicas or the batch.
  """
  m = c.replicas  # Data-parallel divides its batch into m shares.
  replica, fsdp = c.mesh.replica, c.mesh.fsdp
  if not replica and fsdp:
    replica = n // fsdp
  if not replica:
    replica = math.gcd(m, n)
  fsdp = fsdp or max(n // replica, 1)
  if replica * fsdp != n:
    raise ConfigError(
      f"mesh.replica * mesh.fsdp is {replica} * {fsdp}, but there are {n} devices;"
      f" choose two factors of {n}, or 0 to derive them."
    )
  if m % replica:
    derived = "" if c.mesh.replica else f" ({n} devices over mesh.fsdp={fsdp})"
    raise ConfigError(
      f"mesh.replica is {replica}{derived}, which does not divide the {m} replicas;"
      " choose a divisor, or 0 for both axes."
    )
  rows = c.train.batch_size // m
  if rows % fsdp:
    raise ConfigError(
      f"mesh.fsdp is {fsdp}, but a replica has {rows} sequences; raise"
      f" train.batch_size to a multiple of {m * fsdp}."
    )
  return replica, fsdp


def replica_mesh(
  replicas: int, fsdp: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Makes a mesh for a training loop of your own; see `diloco.streaming`.

  Args:
    replicas: M. The size of the axis `replica` is the largest divisor of M for which
      there are enough devices.
    fsdp: devices that share one replica's parameters.
    devices: default all; devices that do not fit into the mesh are left out.

  Raises:
    ConfigError: `replicas` is not an allowed number, or there are fewer than `fsdp`
      devices.
  """
  c = check_some({"replicas": replicas, "mesh.fsdp": fsdp})
  replicas, fsdp = c.replicas, c.mesh.fsdp
  devices = jax.devices() if devices is None else devices
  if not 1 <= fsdp <= len(devices):
    raise ConfigError(
      f"fsdp is {fsdp}, but there are {len(devices)} devices; choose a number from 1 to"
      f" {len(devices)}."
    )
  fitting = range(1, len(devices) // fsdp + 1)
  rows = max(k for k in fitting if replicas % k == 0)
  return mesh_of(device_grid(devices[: rows * fsdp], rows, fsdp))


def make_inference_mesh() -> Mesh:
  """Makes a 1 x n mesh: one model, without replicas, sharded over all devices."""
  return mesh_of(np.asarray(jax.devices()).reshape(1, -1))


def device_grid(devices: Sequence[jax.Device], replica: int, fsdp: int) -> np.ndarray:
  """Arranges devices as [replica, fsdp]; if possible, slow links lie between rows only.

  Sorts by slice first (only the data-centre network connects the slices of a TPU), then
  by process. So, if the numbers allow it, each row lies in one slice and one process.
  Inside a TPU slice, neighbours on the fsdp axis are neighbours on the torus.
  """
  order = lambda d: (_slice(d), d.process_index, d.id)
  by_slice = itertools.groupby(sorted(devices, key=order), _slice)
  slices = [list(part) for _, part in by_slice]
  rows = replica // len(slices) or 1  # Rows per slice; 1 if rows span slices.
  blocks = []
  for part in slices:
    block = np.asarray(part)
    if part[0].platform == "tpu" and len(part) % rows == 0:
      block = mesh_utils.create_device_mesh(
        (rows, len(part) // rows), part, allow_split_physical_axes=True
      )
    blocks.append(block.ravel())
  return np.concatenate(blocks).reshape(replica, fsdp)


def _slice(device: jax.Device) -> int:
  return getattr(device, "slice_index", None) or 0
