"""A trained model from its run directory, or from an export: config and parameters.

Needs neither the training data nor the devices of the run: the config is that of the
checkpoint's record, and only the outer parameters are read, sharded over the devices
that are there.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from diloco.algorithm import fragments
from diloco.algorithm.state import abstract_params, first_replica
from diloco.config import Config, ConfigError, changed, complete
from diloco.model import shapes, sharding
from diloco.model.sharding import key
from diloco.run import checkpoint
from diloco.run.mesh import make_inference_mesh

# What an export consists of, see diloco/export.py.
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.model"


@dataclasses.dataclass(frozen=True)
class Model:
  """A trained model on the devices of this process.

  Attributes:
    config: of its run; with mesh fields for these devices, and `eval.batch_size`
      rounded up to a multiple of the devices.
    step: inner steps it was trained for; `config.train.steps` if the run is finished.
    params: outer parameters, one replica's tree, float32, sharded over `mesh`; for
      data-parallel the parameters.
    mesh: 1 x all devices.
  """

  config: Config
  step: int
  params: Any
  mesh: Mesh


def load(workdir: str | pathlib.Path, step: int | None = None) -> Model:
  """Loads the newest complete checkpoint of a run, or an export.

  Args:
    workdir: as given to diloco.main, or a folder written by diloco.export.
    step: which checkpoint; default the newest complete one.

  Raises:
    ConfigError: there is no such folder or no such checkpoint, or it was written by
      an incompatible version.
  """
  workdir = pathlib.Path(workdir)
  if not workdir.is_dir():
    raise ConfigError(
      f"workdir is {str(workdir)!r}, but there is no such folder; give the --workdir"
      " of a run of diloco.main or the --output of diloco.export."
    )
  mesh = make_inference_mesh()
  if (workdir / WEIGHTS).exists():
    return _load_export(workdir, step, mesh)
  steps = _steps(workdir, step)
  for s in steps:
    try:
      record = checkpoint.read_record(workdir, s)
      c = _config(record.config, workdir, mesh)
      with jax.set_mesh(mesh):
        params = _outer_params(c, workdir, s, mesh)
    except ConfigError:
      raise
    except checkpoint.UNREADABLE as error:
      said = checkpoint.reason(error)
      logging.warning("Checkpoint of step %d is passed over: %s", s, said)
      continue
    return Model(c, s, params, mesh)
  raise ConfigError(
    f"workdir is {str(workdir)!r}, whose checkpoints (steps"
    f" {', '.join(map(str, steps))}) are all incomplete; start the run again, it goes"
    " on from what it can read."
  )


def leaf_names(params: Any) -> dict[str, Any]:
  """{'blocks.attention.q': leaf, ...}: the names of an export's tensors."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {".".join(map(key, path)): leaf for path, leaf in leaves}


def import_safetensors():
  """The module safetensors.numpy: an extra, since only exports need it.

  Raises:
    ConfigError: it is not installed.
  """
  try:
    import safetensors.numpy
  except ImportError as error:
    raise ConfigError(
      "exports need safetensors, which is not installed: pip install safetensors, or"
      " '.[export]' from a clone."
    ) from error
  return safetensors.numpy


def _steps(workdir: pathlib.Path, step: int | None) -> list[int]:
  """Steps of the checkpoints to try, newest first."""
  found = checkpoint.steps_of(workdir)
  if not found:
    raise ConfigError(
      f"workdir is {str(workdir)!r}, which holds no checkpoint yet; train with"
      f" `python -m diloco.main --config=... --workdir={workdir}` (checkpoint.every"
      " says how often it saves)."
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
  """The run's config on this mesh."""
  try:
    c = complete(saved)
  except (TypeError, ConfigError) as error:
    message = str(error).strip().splitlines()[0].rstrip(".")
    raise ConfigError(
      f"workdir is {str(where)!r}, whose config this version does not read"
      f" ({message}); use the version of diloco that wrote it."
    ) from error
  rows = -(-c.eval.batch_size // mesh.size) * mesh.size
  return changed(c, {"mesh.replica": 0, "mesh.fsdp": 0, "eval.batch_size": rows})


def _outer_params(c: Config, workdir: pathlib.Path, step: int, mesh: Mesh) -> Any:
  """Reads the outer parameters, and nothing else, of a checkpoint's state."""

  def read(name: str, trees: list[Any], lead: sharding.Lead = ()) -> Any:
    placed = [sharding.structs(x, sharding.shardings(x, mesh, lead)) for x in trees]
    like = {name: placed if name == "theta" else placed[0]}
    return checkpoint.read_arrays(workdir, step, like)[name]

  if c.data_parallel:
    led = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
    params_M = read("params", [jax.tree.map(led, abstract_params(c))], (None,))
    return first_replica(params_M, mesh=mesh)
  whole, parts = shapes.parameters(c.model), c.make_fragments()
  outer = [sharding.abstract(f.shapes(whole), "float32") for f in parts]
  layers = [f.indices for f in parts]
  return fragments.join(read("theta", outer), layers, whole, mesh)


def _load_export(folder: pathlib.Path, step: int | None, mesh: Mesh) -> Model:
  """Reads what diloco.export wrote; its tokenizer goes with it."""
  described = json.loads((folder / CONFIG).read_text())
  if step not in (None, described["step"]):
    raise ConfigError(
      f"step is {step}, but {folder} is an export of step {described['step']}; leave"
      " step out."
    )
  c = _config(described["config"], folder, mesh)
  if (folder / TOKENIZER).exists():
    c = changed(c, {"data.tokenizer": str(folder / TOKENIZER)})
  tensors = import_safetensors().load_file(folder / WEIGHTS)
  like = abstract_params(c)
  expected = {name: x.shape for name, x in leaf_names(like).items()}
  found = {name: x.shape for name, x in tensors.items()}
  if expected != found:
    wrong = sorted(n for n in {*expected, *found} if expected.get(n) != found.get(n))
    raise ConfigError(
      f"workdir is {str(folder)!r}, whose {WEIGHTS} does not fit its {CONFIG} in"
      f" {', '.join(wrong)}; export again."
    )
  arrays = [tensors[name] for name in leaf_names(like)]
  params = jax.tree.unflatten(jax.tree.structure(like), arrays)
  params = jax.device_put(params, sharding.shardings(params, mesh))
  return Model(c, described["step"], params, mesh)
