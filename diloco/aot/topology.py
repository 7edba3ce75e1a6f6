"""TPU slices by name, described by libtpu, and the meshes that fit them."""

import importlib.util
from typing import Any

from jax.experimental import topologies
from jax.sharding import Mesh

from diloco.config import Config, ConfigError
from diloco.model.sharding import REPLICA
from diloco.run import mesh as run_mesh

# Slices that Google Cloud sells, smallest first. libtpu describes any grid.
_GRIDS_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_GRIDS_3D = (
  *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
  *("8x8x16", "8x16x16", "16x16x16", "16x16x24"),
)
TOPOLOGIES = {"v5e": _GRIDS_2D, "v6e": _GRIDS_2D, "v5p": _GRIDS_3D}


def describe(topology: str, slices: int = 1) -> list[Any]:
  """The devices of a TPU topology, slice by slice.

  Args:
    topology: chip and grid, for example v5e:16x16.
    slices: slices of that shape, joined by the data-centre network.

  Raises:
    ConfigError: there is no such topology, or libtpu is missing.
  """
  chip, _, grid = topology.partition(":")
  if grid not in TOPOLOGIES.get(chip, ()):
    exist = "; ".join(f"{k}: {', '.join(v)}" for k, v in TOPOLOGIES.items())
    raise ConfigError(f"--topology={topology} does not exist; choose of {exist}.")
  if slices < 1:
    raise ConfigError(f"--slices is {slices}; it must be at least 1.")
  if importlib.util.find_spec("libtpu") is None:
    raise ConfigError(
      "the dry run needs libtpu, which is not installed: pip install libtpu, or"
      " '.[tpu]' from a clone."
    )
  # Unless told otherwise libtpu takes hosts to hold four chips or more.
  host = {"chips_per_host_bounds": (1, 1, 1)} if grid == "1x1" else {}
  found = topologies.get_topology_desc(
    platform="tpu", topology_name=topology, num_slices=slices, **host
  )
  return list(found.devices)


def make_mesh(c: Config, devices: list[Any], slices: int) -> Mesh:
  """The mesh of a resolved config, whose replicas each lie on one slice.

  Raises:
    ConfigError: the layout does not fit, or a replica would lie on two slices.
  """
  mesh = run_mesh.make_mesh(c, devices)
  groups = mesh.shape[REPLICA]
  if groups % slices:
    raise ConfigError(
      f"the mesh has {groups} groups of replicas, which do not divide over {slices}"
      " slices: the links inside a replica would be the slow ones; choose --slices"
      f" of the divisors of {groups}, or another mesh.replica."
    )
  return mesh
