"""A trained model from its run directory, or from an export: config and parameters.

Needs neither the training data nor the devices of the run: the config is that of the
checkpoint's record, only the outer parameters are read, and they are sharded over the
devices that are there.
"""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from diloco import config as config_lib
from diloco.algorithm import outer as outer_lib
from diloco.algorithm import state as state_lib
from diloco.config import ConfigError
from diloco.model import sharding as mesh_lib
from diloco.run import mesh as run_mesh

# What an export consists of, see diloco/export.py.
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.model"


@dataclasses.dataclass(frozen=True)
class Model:
  """A trained model on the devices of this process.

  Attributes:
    config: resolved config of its run; the mesh is free and `eval.batch_size` rounded
      up to a multiple of the devices.
    step: inner steps it was trained for; `config.train.steps` if the run is finished.
    params: outer parameters, one replica's tree, float32, sharded over `mesh`; for
      data-parallel the parameters.
    mesh: 1 x all devices.
  """

  config: ml_collections.FrozenConfigDict
  step: int
  params: Any
  mesh: jax.sharding.Mesh


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
  mesh = run_mesh.make_inference_mesh()
  if (workdir / WEIGHTS).exists():
    return _load_export(workdir, step, mesh)
  steps = _steps(workdir, step)
  for s in steps:
    folder = workdir.absolute() / "checkpoints" / str(s)
    try:
      record = json.loads((folder / "record" / "metadata").read_text())
      c = _config(record["config"], workdir, mesh)
      with jax.set_mesh(mesh):
        params = _outer_params(c, folder / "state", mesh)
    except (OSError, ValueError, KeyError) as error:
      if isinstance(error, ConfigError):
        raise
      reason = str(error).splitlines()[0] if str(error) else type(error).__name__
      logging.warning("Checkpoint of step %d is passed over: %s", s, reason)
      continue
    return Model(c, s, params, mesh)
  raise ConfigError(
    f"workdir is {str(workdir)!r}, whose checkpoints (steps"
    f" {', '.join(map(str, steps))}) are all incomplete; start the run again, it goes"
    " on from what it can read."
  )


def leaf_names(params) -> dict[str, Any]:
  """{'blocks.attention.q': leaf, ...}: the names of an export's tensors."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {".".join(key.key for key in path): leaf for path, leaf in leaves}


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
  folder = workdir / "checkpoints"
  found = [int(p.name) for p in folder.glob("*") if p.name.isdigit()]
  if not found:
    raise ConfigError(
      f"workdir is {str(workdir)!r}, which holds no checkpoint yet; train with"
      f" `python -m diloco.main --config=... --workdir={workdir}` (checkpoint.every"
      " says how often it saves)."
    )
  if step is None:
    return sorted(found, reverse=True)
  if step not in found:
    raise ConfigError(
      f"step is {step}, but the checkpoints in {folder} are of steps"
      f" {', '.join(map(str, sorted(found)))}; choose one of them."
    )
  return [step]


def _config(saved: dict, where: pathlib.Path, mesh) -> ml_collections.FrozenConfigDict:
  """The run's config on this mesh."""
  try:
    c = ml_collections.ConfigDict(config_lib.complete(saved).to_dict())
  except (TypeError, ConfigError) as error:
    message = str(error).strip().splitlines()[0].rstrip(".")
    raise ConfigError(
      f"workdir is {str(where)!r}, whose config this version does not read"
      f" ({message}); use the version of diloco that wrote it."
    ) from error
  n = mesh.size
  c.mesh.replica, c.mesh.fsdp = 0, 0
  c.eval.batch_size = -(-c.eval.batch_size // n) * n
  return ml_collections.FrozenConfigDict(c)


def _outer_params(c, folder: pathlib.Path, mesh):
  """Reads the outer parameters, and nothing else, of a checkpoint's state."""
  like = state_lib.abstract_params(c)
  like_M = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((config_lib.trained_replicas(c), *x.shape), x.dtype),
    like,
  )
  if c.algorithm == "data_parallel":
    [params] = _read(folder, {"params": like_M}, mesh, replicated=True).values()
    return state_lib.first_replica(params, mesh)
  fragments = config_lib.make_fragments(c)
  layers = [np.asarray(f.layers, np.int32) for f in fragments]
  thetas = [_theta(like_M, f, ids) for f, ids in zip(fragments, layers)]
  [thetas] = _read(folder, {"theta": thetas}, mesh, replicated=False).values()
  return outer_lib.join(thetas, layers, like, mesh)


def _theta(like_M, fragment, layers: np.ndarray):
  """Shapes and types of a fragment's outer parameters."""
  part_M = jax.eval_shape(
    lambda x_M: outer_lib.take(x_M, outer_lib.structure(fragment), layers), like_M
  )
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], jnp.float32), part_M)


def _read(folder: pathlib.Path, item: dict, mesh, replicated: bool) -> dict:
  """The part `item` (shapes) of a saved tree, each array straight to its devices."""

  def place(tree):
    places = mesh_lib.shardings(tree, mesh, replicated)
    return jax.tree.map(lambda s: ocp.ArrayRestoreArgs(sharding=s), places)

  where = {
    k: [place(t) for t in v] if isinstance(v, list) else place(v)
    for k, v in item.items()
  }
  args = ocp.args.PyTreeRestore(item=item, restore_args=where, partial_restore=True)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    return checkpointer.restore(folder, args=args)


def _load_export(folder: pathlib.Path, step: int | None, mesh) -> Model:
  """Reads what diloco.export wrote; its tokenizer goes with it."""
  load_file = import_safetensors().load_file
  described = json.loads((folder / CONFIG).read_text())
  if step not in (None, described["step"]):
    raise ConfigError(
      f"step is {step}, but {folder} is an export of step {described['step']}; leave"
      " step out."
    )
  c = _config(described["config"], folder, mesh)
  if (folder / TOKENIZER).exists():
    c = ml_collections.ConfigDict(c.to_dict())
    c.data.tokenizer = str(folder / TOKENIZER)
    c = ml_collections.FrozenConfigDict(c)
  tensors = load_file(folder / WEIGHTS)
  like = state_lib.abstract_params(c)
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
  return Model(
    c, described["step"], jax.device_put(params, mesh_lib.shardings(params, mesh)), mesh
  )
