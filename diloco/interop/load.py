"""Loads a trained model, its config and parameters, from a run or an export.

Needs neither the training data nor the devices of the run. Reads the config from the
checkpoint's record, and of the arrays only the outer parameters, sharded over the
devices of this process.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import Mesh

from diloco.algorithm import fragments
from diloco.algorithm.optimizers import averages_parameters, judged
from diloco.algorithm.state import (
  abstract_inner,
  abstract_params,
  first_replica,
  replica_mean,
)
from diloco.checkpoint import stored
from diloco.checkpoint.record import steps_of
from diloco.config import Config, changed, complete
from diloco.errors import ConfigError
from diloco.mesh import sharding
from diloco.mesh.devices import fit_eval_batch, make_inference_mesh
from diloco.spec import shapes
from diloco.util.command import one_line, optional

# The files of an export, see diloco/cli/export.py.
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.model"


@dataclasses.dataclass(frozen=True)
class Model:
  """A trained model on the devices of this process.

  Attributes:
    config: config of the run, with mesh fields and attention for these devices, and
      `eval.batch_size` rounded up to a multiple of their number.
    step: inner steps of training; `config.train.steps` if the run is finished.
    params: outer parameters, one replica's tree, float32, sharded over `mesh`; for
      data-parallel the parameters.
    mesh: 1 x all devices.
  """

  config: Config
  step: int
  params: Any
  mesh: Mesh


def load(workdir: str | pathlib.Path, step: int | None = None) -> Model:
  """Loads a checkpoint of a run, or an export.

  Args:
    workdir: --workdir of diloco.main, or a folder written by diloco export.
    step: step of the checkpoint; default the newest that can be read.

  Raises:
    ConfigError: there is no such folder or checkpoint, or this version cannot read it.
  """
  workdir = pathlib.Path(workdir)
  if not workdir.is_dir():
    raise ConfigError(
      f"workdir is {str(workdir)!r}, but there is no such folder; give the --workdir"
      " of a run of diloco.main or the --output of diloco export."
    )
  mesh = make_inference_mesh()
  if (workdir / WEIGHTS).exists():
    return _load_export(workdir, step, mesh)

  like = lambda _, record: _outer_arrays(_config(record.config, workdir, mesh), mesh)
  with jax.set_mesh(mesh):
    remedy = f"choose another {'--workdir' if step is None else '--step'}"
    found = stored.read_newest(workdir, _steps(workdir, step), like, remedy)
    c = _config(found.record.config, workdir, mesh)
    return Model(c, found.step, _outer_params(c, found.arrays, mesh), mesh)


def _steps(workdir: pathlib.Path, step: int | None) -> list[int]:
  """Steps of the checkpoints to try, newest first."""
  found = steps_of(workdir)
  if not found:
    raise ConfigError(
      f"workdir is {str(workdir)!r}, which holds no checkpoint yet; train with"
      f" `python -m diloco.main --config=... --workdir={workdir}`, and see"
      " checkpoint.every."
    )
  if step is None:
    return found
  if step not in found:
    raise ConfigError(
      f"step is {step}, but {workdir} has checkpoints of steps"
      f" {', '.join(map(str, sorted(found)))}; choose one of them."
    )
  return [step]


def _config(saved: Mapping[str, Any], where: pathlib.Path, mesh: Mesh) -> Config:
  """The config of the run, for this mesh."""
  try:
    c = complete(saved)
  except (TypeError, ConfigError) as error:
    raise ConfigError(f"the config in {where} cannot be used: {error}") from error
  here = {"mesh.replica": 0, "mesh.fsdp": 0, "model.attention": "auto"}
  return fit_eval_batch(changed(c, here), mesh.size)


def _outer_arrays(c: Config, mesh: Mesh) -> dict[str, Any]:
  """Describes the arrays of a checkpoint that contain the outer parameters."""

  def led(tree: Any, models: int) -> Any:
    struct = lambda x: jax.ShapeDtypeStruct((models, *x.shape), x.dtype)
    like = jax.tree.map(struct, tree)
    return sharding.structs(like, sharding.shardings(like, mesh, (None,)))

  if not c.make_fragments():
    params = {"params": led(abstract_params(c), 1)}
    if not averages_parameters(c):
      return params
    return params | {"opt_state": abstract_inner(c, mesh)[1]}
  whole = shapes.parameters(c.model)
  parts = [part.shapes(whole) for part in c.make_fragments()]
  theta = [sharding.abstract(part, "float32") for part in parts]
  if c.own_outer:  # Every replica has its own.
    return {"theta": [led(x, c.replicas) for x in theta]}
  return {"theta": [sharding.structs(x, sharding.shardings(x, mesh)) for x in theta]}


def _outer_params(c: Config, arrays: dict[str, Any], mesh: Mesh) -> Any:
  """Joins the arrays of `_outer_arrays` to one replica's tree."""
  if not c.make_fragments():
    params = judged(arrays["params"], arrays.get("opt_state"))
    return first_replica(params, mesh=mesh)
  layers, theta = [part.indices for part in c.make_fragments()], arrays["theta"]
  if c.own_outer:
    theta = [replica_mean(theta_M, mesh=mesh) for theta_M in theta]
  return fragments.join(theta, layers, shapes.parameters(c.model), mesh)


def _load_export(folder: pathlib.Path, step: int | None, mesh: Mesh) -> Model:
  """Reads a folder that diloco export wrote, tokenizer included."""
  load_file = optional("safetensors.numpy", "exports need", "export").load_file
  try:
    described = json.loads((folder / CONFIG).read_text())
    if "model_type" in described:
      raise ValueError("it is a folder of transformers, which init.checkpoint takes")
    exported, config = described["step"], described["config"]
    tensors = load_file(folder / WEIGHTS)
  except Exception as error:  # safetensors has an exception of its own.
    raise ConfigError(
      f"workdir is {str(folder)!r}, whose {CONFIG} or {WEIGHTS} cannot be read"
      f" ({type(error).__name__}: {one_line(error)}); export again."
    ) from error
  if step not in (None, exported):
    raise ConfigError(
      f"step is {step}, but {folder} is an export of step {exported}; leave step out."
    )
  c = _config(config, folder, mesh)
  if (folder / TOKENIZER).exists():
    c = changed(c, {"data.tokenizer": str(folder / TOKENIZER)})
  like = traverse_util.flatten_dict(abstract_params(c), sep=".")
  names = {*like, *tensors}
  shape = lambda x: getattr(x, "shape", None)
  wrong = [n for n in names if shape(like.get(n)) != shape(tensors.get(n))]
  if wrong:
    raise ConfigError(
      f"workdir is {str(folder)!r}, whose {WEIGHTS} does not fit its {CONFIG} in"
      f" {', '.join(sorted(wrong))}; export again."
    )
  params = traverse_util.unflatten_dict(tensors, sep=".")
  params = jax.device_put(params, sharding.shardings(params, mesh))
  return Model(c, exported, params, mesh)
