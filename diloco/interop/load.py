"""Loads a trained model (config and parameters) from a run or an export.

Needs neither the training data nor the devices of the run. Reads the config from the
checkpoint's record, and the outer parameters from its arrays. Shards the parameters
over the devices of this process.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding

from diloco.algorithm.method import Method, make_method
from diloco.algorithm.optimizers import averages
from diloco.algorithm.state import OuterState, TrainState
from diloco.checkpoint import damage
from diloco.checkpoint.record import Record, steps_of
from diloco.config import Config, changed, complete
from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.mesh.devices import make_inference_mesh
from diloco.mesh.modes import plain_modes
from diloco.spec import plugins, shapes
from diloco.spec.fields import ModelConfig
from diloco.util import remote
from diloco.util.command import one_line, optional
from diloco.util.files import folders_with, require_json
from diloco.util.types import PyTree

# Files of an export, see diloco/cli/export.py.
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.model"


@dataclasses.dataclass(frozen=True)
class Model:
  """A trained model on the devices of this process.

  Attributes:
    config: config of the run, but with mesh fields and attention for these devices.
    step: inner steps of training; `config.train.steps` if the run is finished.
    params: outer parameters (for data-parallel, the parameters) as one replica's tree,
      float32, sharded over `mesh`.
    mesh: mesh of the axes replica x fsdp, with 1 x all devices.
  """

  config: Config
  step: int
  params: Any
  mesh: Mesh


@plain_modes()
def load(workdir: str | pathlib.Path, step: int | None = None) -> Model:
  """Loads a checkpoint of a run, or an export.

  Args:
    workdir: --workdir of diloco.main, or a folder written by diloco export.
    step: step of the checkpoint; None: the newest checkpoint that can be read.

  Raises:
    ConfigError: the folder or the checkpoint does not exist, this version of diloco
      cannot read it, or it needs a plug-in that is not part of diloco nor imported.
  """
  workdir = remote.local_copy(workdir, "workdir")
  if not workdir.is_dir():
    raise ConfigError(
      f"workdir is {str(workdir)!r}, but there is no such folder; give the --workdir"
      " of a run of diloco.main or the --output of diloco export."
    )
  mesh = make_inference_mesh()
  if (workdir / WEIGHTS).exists():
    return _load_export(workdir, step, mesh)

  like = lambda _, record: _outer_arrays(_config(record, workdir), mesh)
  with jax.set_mesh(mesh):
    remedy = f"choose another {'workdir' if step is None else '--step'}"
    stored = damage.read_newest(workdir, _steps(workdir, step), like, remedy)
    c = _config(stored.record, workdir)
    return Model(c, stored.step, _outer_params(c, stored.arrays, mesh), mesh)


def _steps(workdir: pathlib.Path, step: int | None) -> list[int]:
  """Returns the steps of the checkpoints to try, newest first."""
  steps = steps_of(workdir)
  if not steps:
    raise ConfigError(
      f"workdir is {str(workdir)!r}, which holds no checkpoint yet"
      f"{folders_with('checkpoints', workdir)}; train with `python -m diloco.main"
      f" --config=... --workdir={workdir}`, and see checkpoint.every."
    )
  if step is None:
    return steps
  if step not in steps:
    raise ConfigError(
      f"step is {step}, but {workdir} has checkpoints of steps"
      f" {', '.join(map(str, sorted(steps)))}; choose one of them."
    )
  return [step]


def _config(record: Record, workdir: pathlib.Path) -> Config:
  """Returns the config of a checkpoint, changed for the devices of this process."""
  try:
    return _here(complete(record.config), workdir)
  except (TypeError, ConfigError) as error:
    raise ConfigError(f"the config in {workdir} cannot be used: {error}") from error


def _here(c: Config, folder: pathlib.Path) -> Config:
  """Sets a config's mesh for these devices, and its tokenizer to the folder's copy."""
  here = {"mesh.replica": 0, "mesh.fsdp": 0, "model.attention": "auto"}
  if (folder / TOKENIZER).is_file():  # The original file may have moved.
    here["data.tokenizer"] = str(folder / TOKENIZER)
  return changed(c, here)


def _method(c: Config, mesh: Mesh) -> Method:
  """Makes the run's method, with the outer state on the devices of `mesh`."""
  overlap = dataclasses.replace(c.overlap, transport="device")
  outer = dataclasses.replace(c.outer, offload=False)
  return make_method(dataclasses.replace(c, overlap=overlap, outer=outer), mesh)


def _outer_arrays(c: Config, mesh: Mesh) -> dict[str, Any]:
  """Describes the arrays of a checkpoint that contain the outer parameters."""
  state = _method(c, mesh).abstract(drained=True)
  if c.make_fragments():
    return {"theta": list(state.outer.theta)}
  kept = {"opt_state": state.opt_state} if averages(state.opt_state) else {}
  return {"params": state.params} | kept


def _outer_params(c: Config, arrays: dict[str, Any], mesh: Mesh) -> Any:
  """Makes one replica's tree of parameters from the arrays of `_outer_arrays`."""
  outer = OuterState(tuple(arrays.get("theta", ())), (), (), {})
  state = TrainState(arrays.get("params"), arrays.get("opt_state"), outer)
  return _method(c, mesh).params(state)


def _load_export(folder: pathlib.Path, step: int | None, mesh: Mesh) -> Model:
  """Loads a folder that `diloco export` wrote; uses the tokenizer in the folder."""
  exported, saved = export_config(folder, "workdir")
  if step not in (None, exported):
    raise ConfigError(
      f"step is {step}, but {folder} is an export of step {exported}; leave step out."
    )
  c = _here(saved, folder)
  params = place(export_tensors(c.model, folder, "workdir"), mesh)
  return Model(c, exported, params, mesh)


def place(tensors: Iterable[tuple[str, np.ndarray]], mesh: Mesh) -> PyTree:
  """Puts named tensors on the devices one by one; returns one replica's tree."""
  placed = {}
  for name, x in tensors:
    path = tuple(name.split("."))
    spec = sharding.weight_spec(path, x.shape, mesh.shape[sharding.FSDP])
    placed[path] = sharding.place(x, NamedSharding(mesh, spec))
  return traverse_util.unflatten_dict(placed)


def export_config(folder: pathlib.Path, field: str) -> tuple[int, Config]:
  """Reads the step and the config of an export.

  Args:
    field: name of the field or flag with the folder, for error messages.

  Raises:
    ConfigError: the folder is not an export, or this version of diloco cannot read it.
  """
  described = require_json(folder / CONFIG, field)
  try:
    return described["step"], complete(described["config"])
  except plugins.NotTrusted as error:
    raise ConfigError(f"{field} is {str(folder)!r}, whose {error}") from error
  except (KeyError, TypeError, AttributeError, ConfigError) as error:
    raise ConfigError(
      f"{field} is {str(folder)!r}, whose {CONFIG} is none of diloco export"
      f" ({type(error).__name__}: {one_line(error)}); export again. A folder of another"
      " program is for init.checkpoint, with its model.name"
      f"{plugins.hint(str(described.get('model_type')))}."
    ) from error


def export_tensors(
  m: ModelConfig, folder: pathlib.Path, field: str
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the names and float32 tensors of an export, one after another.

  Args:
    m: the config's group `model` of the export.
    field: name of the field or flag with the folder, for error messages.

  Raises:
    ConfigError: the file is damaged, its tensors do not fit `m`, or the package
      safetensors is missing.
  """
  safe_open = optional("safetensors", "exports need", "export").safe_open
  shape_of = {".".join(p): shape for p, shape in shapes.leaves(shapes.parameters(m))}
  try:
    with safe_open(folder / WEIGHTS, "np") as file:
      saved = {x: tuple(file.get_slice(x).get_shape()) for x in file.keys()}  # noqa: SIM118
      wrong = sorted({name for name, _ in shape_of.items() ^ saved.items()})
      if wrong:
        raise ValueError(f"it does not fit its {CONFIG} in {', '.join(wrong)}")
      for name in shape_of:
        yield name, file.get_tensor(name)
  except Exception as error:  # safetensors has an exception of its own.
    raise ConfigError(
      f"{field} is {str(folder)!r}, whose {WEIGHTS} cannot be read ({one_line(error)});"
      " export again."
    ) from error


def save(tensors: dict[str, np.ndarray], path: pathlib.Path, library: str) -> None:
  """Writes a safetensors file.

  Args:
    tensors: {name: tensor}.
    path: path of the file.
    library: the library for which the tensors are meant, such as np or pt (PyTorch).

  Raises:
    ConfigError: the package safetensors is missing, or the file cannot be written.
  """
  save_file = optional("safetensors.numpy", "exports need", "export").save_file
  try:
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode  # safetensors makes a file that only its owner can read.
    # `save_file` writes a tensor's memory as it is, so tensors must be contiguous.
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(tensors, path, metadata={"format": library})
    path.chmod(mode)
  except Exception as error:  # safetensors also wraps an OSError.
    path.unlink(missing_ok=True)
    raise ConfigError(
      f"--output is {str(path.parent)!r}, where {path.name} cannot be written"
      f" ({one_line(error)}); mend this, or give another folder."
    ) from error
