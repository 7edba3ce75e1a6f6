"""Reads the arguments of `diloco.streaming` and its methods; refuses mistakes."""

import dataclasses
import operator
from collections.abc import Sequence

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

from diloco.algorithm.optimizers import Outer
from diloco.config import Config
from diloco.config.resolve import check_some
from diloco.errors import ConfigError
from diloco.mesh.sharding import FSDP, REPLICA, mesh_of
from diloco.spec.fields import OuterConfig, WireConfig
from diloco.util.types import PyTree


def whole_number(name: str, value: object) -> int:
  """Returns a whole number of any type, such as NumPy's, as an int.

  Raises:
    ConfigError: `value` is not a whole number, or is negative.
  """
  try:
    number = operator.index(value)  # type: ignore[arg-type]
  except TypeError:
    number = -1
  if number < 0 or isinstance(value, bool):
    raise ConfigError(f"{name} is {value!r}; give a whole number of at least 0.")
  return number


def check_fields(
  wire: str | WireConfig, outer: Outer, fields: dict[str, object]
) -> Config:
  """Checks arguments against the limits and rules of the config's fields.

  Args:
    fields: the other arguments, {name of the config's field: value}.

  Returns:
    A config with these fields.

  Raises:
    ConfigError: a field has a value that cannot work.
  """
  if not isinstance(wire, str | WireConfig):
    raise ConfigError(f"wire is {wire!r}; give a number format or diloco.WireConfig.")
  if not isinstance(outer, OuterConfig | optax.GradientTransformation):
    raise ConfigError(
      f"outer is {outer!r}; give a diloco.OuterConfig or a transformation of optax."
    )
  fields |= {"wire.format": wire} if isinstance(wire, str) else _fields("wire", wire)
  if isinstance(outer, OuterConfig):
    fields |= _fields("outer", outer)
    if outer.final_sync:
      raise ConfigError(
        "outer.final_sync is True, but here it is an argument of drain; give it there."
      )
  return check_some(fields)


def _fields(group: str, values: WireConfig | OuterConfig) -> dict[str, object]:
  return {f"{group}.{name}": x for name, x in dataclasses.asdict(values).items()}


def read_taus(tau: int | Sequence[int], replicas: int) -> tuple[int, ...]:
  """Returns the tau of each replica as an int; takes whole numbers of any type."""
  each = np.asarray(tau, dtype=object).tolist()
  each = each if isinstance(each, list) else [each] * replicas
  if len(each) != replicas:
    raise ConfigError(
      f"tau is {tau}; give a whole number, or {replicas} of them, one per replica."
    )
  return tuple(whole_number("tau", x) for x in each)


def count_replicas(params_M: PyTree) -> int:
  """Returns M, the size of the first axis of every leaf."""
  first_axes = {x.shape[0] if x.ndim else 0 for x in jax.tree.leaves(params_M)}
  if len(first_axes) != 1 or not min(first_axes):
    raise ConfigError(
      f"params_M has leaves with first axes of {sorted(first_axes)}; the first axis of"
      " every leaf must be the replicas, see diloco.replicate."
    )
  return first_axes.pop()


def mesh_under(params_M: PyTree) -> Mesh:
  """Returns the mesh of the parameters; a 1 x 1 mesh if they lie on a single device."""
  sharding = getattr(jax.tree.leaves(params_M)[0], "sharding", None)
  if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
    return sharding.mesh
  devices = sorted(sharding.device_set, key=lambda d: d.id) if sharding else []
  if len(devices) > 1:
    raise ConfigError(
      f"params_M lies on {len(devices)} devices, but not on a mesh; give mesh, for"
      " example from diloco.replica_mesh."
    )
  return mesh_of(np.asarray([devices or jax.devices()[:1]], dtype=object))


def check_mesh(mesh: Mesh, replicas: int) -> None:
  """Refuses a mesh over which the replicas cannot be spread."""
  is_ours = isinstance(mesh, Mesh) and mesh.axis_names == (REPLICA, FSDP)
  if is_ours and {*mesh.axis_types} != {AxisType.Auto}:
    raise ConfigError(
      f"mesh is {mesh}, whose axes are not of type Auto; give one whose axes are, for"
      " example from diloco.replica_mesh."
    )
  if not is_ours or replicas % mesh.shape[REPLICA]:
    raise ConfigError(
      f"mesh is {mesh}; give one with the axes {REPLICA} and {FSDP}, the first of a"
      f" size that divides {replicas} replicas, for example"
      f" diloco.replica_mesh({replicas})."
    )
