"""Describes TPU slices and GPU nodes by name, and makes meshes of them.

libtpu describes the slices, and JAX's CUDA plugin describes the nodes.
"""

import importlib.util
import math
import pathlib

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from diloco.config import Config
from diloco.errors import ConfigError
from diloco.mesh import devices as run_mesh
from diloco.model import attention
from diloco.util.command import one_line

# Grids of the slices that Google Cloud sells, smallest first.
_GRIDS_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_GRIDS_3D = (
  *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
  *("8x8x16", "8x16x16", "16x16x16", "16x16x24"),
)
# Numbers of GPUs in a node; NVLink connects them.
_NODES = ("1", "2", "4", "8")
GPUS = ("h100", "h200")
TOPOLOGIES = {
  **{"v5e": _GRIDS_2D, "v6e": _GRIDS_2D, "v5p": _GRIDS_3D},
  **dict.fromkeys(GPUS, _NODES),
}


# {chip: its device kind, as in `jax.Device.device_kind`}.
_KINDS = {
  **{"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "v5p": "TPU v5"},
  **{"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"},
}


def count(topology: str) -> tuple[int, str]:
  """Returns the number of devices of a slice or node, and their kind.

  Args:
    topology: as in `describe`.

  Raises:
    ConfigError: there is no such topology.
  """
  chip, _, grid = topology.partition(":")
  if grid not in TOPOLOGIES.get(chip, ()):
    known = "; ".join(f"{k}: {', '.join(v)}" for k, v in TOPOLOGIES.items())
    raise ConfigError(f"--topology={topology} does not exist; choose from {known}.")
  return math.prod(map(int, grid.split("x"))), _KINDS[chip]


def describe(topology: str, slices: int = 1) -> list[jax.Device]:
  """Lists the devices of a topology, slice by slice.

  Args:
    topology: chip and grid, for example v5e:16x16; or GPU and number in a node: h100:8.
    slices: number of slices or nodes, joined by the data-centre network.

  Raises:
    ConfigError: there is no such topology, or libtpu or the CUDA plugin is missing.
  """
  count(topology)
  chip, _, grid = topology.partition(":")
  if chip in GPUS:
    return _describe_nodes(chip, grid, slices)
  if importlib.util.find_spec("libtpu") is None:
    raise ConfigError(
      "the dry run needs libtpu: pip install libtpu, or '.[tpu]' from a clone."
    )
  # By default, libtpu assumes that a host holds at least four chips.
  host = {"chips_per_host_bounds": (1, 1, 1)} if grid == "1x1" else {}
  described = topologies.get_topology_desc(topology, "tpu", num_slices=slices, **host)
  return list(described.devices)


def _describe_nodes(chip: str, gpus: str, nodes: int) -> list[jax.Device]:
  plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
  if not any(map(importlib.util.find_spec, plugins)):
    raise ConfigError(
      "the dry run for GPUs needs JAX's CUDA plugin: pip install 'jax[cuda12-local]',"
      " or '.[gpu-aot]' from a clone."
    )
  facts = pathlib.Path(__file__).with_name(f"{chip}.txtpb").read_text()
  shape = f"1x{nodes}x{gpus}"  # Partitions x hosts x devices per host.
  try:
    description = topologies.get_topology_desc(
      platform="cuda", topology=shape, target_config=facts
    )
  except (RuntimeError, ValueError) as error:
    raise ConfigError(
      f"JAX's CUDA plugin does not describe {chip} ({one_line(error)}); install the"
      " version that belongs to JAX: pip install 'jax[cuda12-local]'."
    ) from error
  return list(description.devices)


def make_mesh(c: Config, devices: list[jax.Device]) -> Mesh:
  """Makes the mesh of a resolved config, as a run does.

  Raises:
    ConfigError: the layout or the attention does not fit the devices.
  """
  attention.check(c.model, devices[0].device_kind)
  return run_mesh.make_mesh(c, devices)
