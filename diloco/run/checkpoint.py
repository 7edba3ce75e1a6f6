"""Checkpoints through Orbax: everything that a run needs to go on exactly.

A checkpoint holds the train state with the fragments in flight, and a JSON record
with the config, the data position and the byte ledger. Random numbers need no state:
they are functions of (seed, step, fragment, replica). Saving is asynchronous. All
processes write and read, and any number of them and of devices resumes any other.

What cannot be read is moved to workdir/unreadable once an older checkpoint was
restored: Orbax saves nothing at or below the newest step that it sees.
"""

import contextlib
import dataclasses
import itertools
import json
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diloco import config as config_lib
from diloco.algorithm.outer import OuterState
from diloco.algorithm.state import TrainState
from diloco.run.processes import Peers, say

# Fields that may change between a run and its continuation: they do not enter what
# is computed, but for the codes of outer gradients, which are those of mesh.fsdp's
# shards (diloco.wire.exchange.warn_of_other_shards).
FREE_FIELDS = (
  "log.",
  "eval.",
  "checkpoint.",
  "mesh.",
  "overlap.transport",
  "outer.offload",
  "data.data_dir",
  "data.prefetch",
)


@dataclasses.dataclass(frozen=True)
class Restored:
  """A restored checkpoint; `record` is what `save` was given."""

  step: int
  state: TrainState
  record: dict[str, Any]


class Checkpoints:
  """The checkpoints of one working directory."""

  def __init__(self, workdir: pathlib.Path, c, peers: Peers | None = None):
    self._config, self._peers = c, peers or Peers()
    self._workdir = workdir
    self._states = ocp.StandardCheckpointHandler()
    self._manager = ocp.CheckpointManager(
      (workdir / "checkpoints").absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=c.checkpoint.keep, enable_async_checkpointing=True
      ),
      item_handlers={
        "state": self._states,
        "record": ocp.JsonCheckpointHandler(),
      },
    )

  @property
  def latest(self) -> int | None:
    return self._manager.latest_step()

  def save(self, step: int, state: TrainState, record: dict[str, Any]) -> None:
    """Starts saving; arrays are copied before it returns, so they may be donated.

    Raises:
      ConfigError: there is a checkpoint of this step or a later one.
    """
    record = {**record, "config": _json_config(self._config)}
    saved = self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(_tree(state)), record=ocp.args.JsonSave(record)
      ),
    )
    if not saved:
      raise config_lib.ConfigError(
        f"workdir is {str(self._workdir)!r}, where step {step} cannot be saved since a"
        f" checkpoint of step {self.latest} is there; choose another --workdir, or move"
        " that checkpoint away."
      )

  def restore(self, state_at) -> Restored | None:
    """The newest checkpoint that can be read, or None if there is none at all.

    Args:
      state_at: function from (step, record) to a TrainState of that step's
        structure; its arrays' shapes, types and shardings are restored into.

    Raises:
      ConfigError: the checkpoint belongs to another config; the message shows the
        fields that differ. Or no checkpoint can be read, or not by all processes.
    """
    steps = self._peers.all_gather(sorted(self._manager.all_steps(), reverse=True))[0]
    for passed, step in enumerate(steps):
      restored = self._try_restore(step, state_at)
      if restored is not None:
        self._set_aside(steps[:passed])
        return restored
    if steps:
      raise config_lib.ConfigError(
        f"workdir is {str(self._workdir)!r}, whose checkpoints (steps"
        f" {', '.join(map(str, steps))}) cannot be read; choose another --workdir, or"
        " move its checkpoints away to train from the start."
      )
    return None

  def _try_restore(self, step: int, state_at) -> Restored | None:
    folder = self._manager.directory / str(step)
    record = self._agreed(step, lambda: self._read_record(folder))
    if record is None:
      return None
    check_same_config(record["config"], self._config, step)
    like = state_at(step, record)
    tree = self._agreed(step, lambda: self._read_state(folder, like))
    return None if tree is None else Restored(step, _state(tree, like), record)

  def _agreed(self, step: int, read):
    """What `read` returns, None if it fails on all processes.

    Of Orbax it calls handlers alone, in which no process waits for another.

    Raises:
      ConfigError: it fails on some processes. Theirs is the fault then, and an older
        checkpoint would be no remedy.
    """
    value, problem = None, None
    try:
      value = read()
    except (ValueError, OSError, KeyError) as error:
      problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    problems = self._peers.all_gather(problem)
    unable = [p for p, x in enumerate(problems) if x is not None]
    if not unable:
      return value
    if len(unable) < len(problems):
      raise config_lib.ConfigError(
        f"--workdir is {self._workdir}, whose checkpoint of step {step} process"
        f" {unable[0]} cannot read ({problems[unable[0]]}) while others can; see that"
        " it is the same folder on all machines, and start again."
      )
    if self._peers.index == 0:
      logging.warning(
        "Checkpoint of step %d is incomplete and is passed over: %s", step, problems[0]
      )
    return None

  def _read_record(self, folder) -> dict[str, Any]:
    return json.loads((folder / "record" / "metadata").read_text())

  def _read_state(self, folder, like: TrainState) -> dict[str, Any]:
    """Reads into `like`, and payloads into the layout in which they were sent."""
    target = jax.tree.map(_abstract, _tree(like))
    if target.get("in_flight"):
      saved = self._states.metadata(folder / "state")["in_flight"]
      target["in_flight"] = {
        p: _foreign(x, tuple(saved[p].shape)) for p, x in target["in_flight"].items()
      }
    return self._states.restore(folder / "state", args=ocp.args.StandardRestore(target))

  def _set_aside(self, steps: list[int]) -> None:
    """Moves checkpoints where they are in nobody's way."""
    if not steps:
      return
    if self._peers.index == 0:
      for step in steps:
        to = _unused(self._workdir / "unreadable" / str(step))
        to.parent.mkdir(exist_ok=True)
        (self._workdir / "checkpoints" / str(step)).rename(to)
        say(f"Moved the checkpoint of step {step}, which cannot be read, to {to}.")
    self._peers.all_gather(None)
    self._manager.reload()

  def wait(self) -> None:
    self._manager.wait_until_finished()

  def close(self) -> None:
    self._manager.close()


def check_same_config(old: dict, config, step: int) -> None:
  """Refuses to continue a run under another config.

  Fields that the run's code did not have yet count as their defaults.

  Raises:
    ConfigError: with the differing fields, old -> new.
  """
  with contextlib.suppress(config_lib.ConfigError):  # Then the difference is told.
    old = _json_config(config_lib.complete(old))
  lines = [
    line
    for line in config_lib.difference(old, _json_config(config))
    if not line.startswith(FREE_FIELDS)
  ]
  if lines:
    raise config_lib.ConfigError(
      f"workdir holds a checkpoint of step {step} made with another config"
      f" ({'; '.join(lines)}); choose another --workdir or the same values."
    )


def _json_config(config) -> dict:
  return json.loads(json.dumps(config.to_dict()))


def _unused(path: pathlib.Path) -> pathlib.Path:
  """The path, with a number behind it if it exists."""
  names = itertools.chain([path.name], (f"{path.name}.{n}" for n in itertools.count(1)))
  return next(p for p in map(path.with_name, names) if not p.exists())


def _abstract(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _foreign(x: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
  """A payload [M, fsdp, bytes] of another mesh; see `diloco.wire.exchange`."""
  if shape == x.shape:
    return x
  place = NamedSharding(x.sharding.mesh, P(x.sharding.spec[0]))
  return jax.ShapeDtypeStruct(shape, x.dtype, sharding=place)


def _tree(state: TrainState) -> dict[str, Any]:
  """The state as nested dicts and tuples, None and empty parts left out."""
  tree = {"params": state.params, "opt_state": state.opt_state}
  if state.outer:
    tree["theta"] = list(state.outer.theta)
    tree["outer_opt_state"] = list(state.outer.opt_state)
    if state.outer.in_flight:
      tree["in_flight"] = state.outer.in_flight
  return tree


def _state(tree: dict[str, Any], like: TrainState) -> TrainState:
  outer = like.outer
  if outer:
    outer = OuterState(
      theta=tuple(tree["theta"]),
      opt_state=tuple(tree["outer_opt_state"]),
      in_flight=tree.get("in_flight", {}),
    )
  return TrainState(tree["params"], tree["opt_state"], outer)
