"""Describes TPU slices by name, with libtpu, and makes meshes of them."""

import importlib.util
from typing import Any

from jax.experimental import topologies
from jax.sharding import Mesh

from diloco.config import Config, ConfigError
from diloco.model.sharding import REPLICA
from diloco.run import mesh as run_mesh

# Grids of the slices that Google Cloud sells, smallest first.
_GRIDS_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_GRIDS_3D = (
  *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
  *("8x8x16", "8x16x16", "16x16x16", "16x16x24"),
)
TOPOLOGIES = {"v5e": _GRIDS_2D, "v6e": _GRIDS_2D, "v5p": _GRIDS_3D}


def describe(topology: str, slices: int = 1) -> list[Any]:
  """Lists the devices of a TPU topology, slice by slice.

  Args:
    topology: chip and grid, for example v5e:16x16.
    slices: number of slices, joined by the data-centre network.

  Raises:
    ConfigError: there is no such topology, or libtpu is missing.
  """
  chip, _, grid = topology.partition(":")
  if grid not in TOPOLOGIES.get(chip, ()):
    known = "; ".join(f"{k}: {', '.join(v)}" for k, v in TOPOLOGIES.items())
    raise ConfigError(f"--topology={topology} does not exist; choose from {known}.")
  if importlib.util.find_spec("libtpu") is None:
    raise ConfigError(
      "the dry run needs libtpu: pip install libtpu, or '.[tpu]' from a clone."
    )
  # By default, libtpu assumes that a host holds at least four chips.
  host = {"chips_per_host_bounds": (1, 1, 1)} if grid == "1x1" else {}
  found = topologies.get_topology_desc(topology, "tpu", num_slices=slices, **host)
  return list(found.devices)


def make_mesh(c: Config, devices: list[Any], slices: int) -> Mesh:
  """Makes the mesh of a resolved config, with every replica on one slice.

  Raises:
    ConfigError: the layout does not fit, or a replica would lie on two slices.
  """
  mesh = run_mesh.make_mesh(c, devices)
  groups = mesh.shape[REPLICA]
  if groups % slices:
    raise ConfigError(
      f"--slices is {slices}, but must divide the {groups} groups of replicas of the"
      " mesh, so that each replica lies on one slice; change --slices or mesh.replica."
    )
  return mesh
