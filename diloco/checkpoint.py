"""Checkpoints through Orbax: everything that a run needs to go on exactly.

A checkpoint holds the train state with the fragments in flight, and a JSON record
with the config, the data position and the byte ledger. Random numbers need no state:
they are functions of (seed, step, fragment, replica). Saving is asynchronous. All
processes write and read, and any number of them and of devices resumes any other.
"""

import contextlib
import dataclasses
import json
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diloco import config as config_lib
from diloco.distributed import Peers
from diloco.outer import OuterState
from diloco.state import TrainState

# Fields that may change between a run and its continuation: they do not enter what
# is computed.
FREE_FIELDS = (
  "log.",
  "eval.",
  "checkpoint.",
  "mesh.",
  "overlap.transport",
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
    self._manager = ocp.CheckpointManager(
      (workdir / "checkpoints").absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=c.checkpoint.keep, enable_async_checkpointing=True
      ),
      item_handlers={
        "state": ocp.StandardCheckpointHandler(),
        "record": ocp.JsonCheckpointHandler(),
      },
    )

  @property
  def latest(self) -> int | None:
    return self._manager.latest_step()

  def save(self, step: int, state: TrainState, record: dict[str, Any]) -> None:
    """Starts saving; arrays are copied before it returns, so they may be donated."""
    record = {**record, "config": _json_config(self._config)}
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(_tree(state)), record=ocp.args.JsonSave(record)
      ),
    )

  def restore(self, state_at) -> Restored | None:
    """The newest checkpoint that all processes find complete, or None.

    Args:
      state_at: function from (step, record) to a TrainState of that step's
        structure; its arrays' shapes, types and shardings are restored into.

    Raises:
      ConfigError: the checkpoint belongs to another config; the message shows the
        fields that differ.
    """
    steps = self._peers.all_gather(sorted(self._manager.all_steps(), reverse=True))[0]
    for step in steps:
      restored = self._try_restore(step, state_at)
      if all(self._peers.all_gather(restored is not None)):
        return restored
    return None

  def _try_restore(self, step: int, state_at) -> Restored | None:
    try:
      record = self._restore(step, record=ocp.args.JsonRestore()).record
    except (ValueError, OSError, KeyError) as error:
      _skip(step, error)
      return None
    check_same_config(record["config"], self._config, step)
    like = state_at(step, record)
    try:
      target = ocp.args.StandardRestore(self._target(step, like))
      tree = self._restore(step, state=target).state
    except (ValueError, OSError, KeyError) as error:
      _skip(step, error)
      return None
    return Restored(step, _state(tree, like), record)

  def _target(self, step: int, like: TrainState):
    """What to restore: `like`, with payloads of the layout in which they were sent."""
    target = jax.tree.map(_abstract, _tree(like))
    if target.get("in_flight"):
      saved = self._manager.item_metadata(step).state["in_flight"]
      target["in_flight"] = {
        p: _foreign(x, tuple(saved[p].shape)) for p, x in target["in_flight"].items()
      }
    return target

  def _restore(self, step: int, **items):
    return self._manager.restore(step, args=ocp.args.Composite(**items))

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


def _skip(step: int, error: Exception) -> None:
  reason = str(error).splitlines()[0] if str(error) else type(error).__name__
  logging.warning(
    "Checkpoint of step %d is incomplete and is passed over: %s", step, reason
  )


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
