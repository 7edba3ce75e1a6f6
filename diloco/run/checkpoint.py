"""Checkpoints through Orbax: everything that a run needs to go on exactly.

A checkpoint holds the train state with the fragments in flight, and a JSON record with
the config, the data position and the ledger. Random numbers need no state: they are
functions of (seed, step, fragment, replica). Saving is asynchronous. All processes
write and read, and any number of them and of devices resumes any other.

This file alone reads checkpoints. A checkpoint that cannot be read is moved to
workdir/unreadable once an older one was restored: Orbax saves nothing at or below the
newest step that it sees.
"""

import contextlib
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import Mesh

from diloco.algorithm.plan import Plan
from diloco.algorithm.state import OuterState, TrainState, abstract_state
from diloco.config import Config, ConfigError, complete
from diloco.config.resolve import difference
from diloco.model.sharding import FSDP
from diloco.run.processes import Peers, say
from diloco.wire.formats import PLAIN

Tree = Any
# What reading a damaged checkpoint raises.
UNREADABLE = (ValueError, OSError, KeyError)
# Fields that may change between a run and its continuation: they do not enter what is
# computed, except that mesh.fsdp changes the codes, see `_warn_of_other_shards`.
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
class Record:
  """What a checkpoint keeps beside the arrays, as JSON.

  Attributes:
    config: of the run, all fields.
    data: the position of every replica in its text, see `TrainIterator`.
    ledger: fields of a `Ledger`.
    spent: fields of a `Spent`.
    finished: whether training ended and nothing is in flight.
    fsdp: size of the mesh's fsdp axis, which encoded what is in flight.
  """

  config: dict[str, Any]
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  ledger: dict[str, Any] = dataclasses.field(default_factory=dict)
  spent: dict[str, Any] = dataclasses.field(default_factory=dict)
  finished: bool = False
  fsdp: int = 1


@dataclasses.dataclass(frozen=True)
class Restored:
  """A restored checkpoint."""

  step: int
  state: TrainState
  record: Record


class Checkpoints:
  """The checkpoints of one run."""

  def __init__(
    self,
    workdir: pathlib.Path,
    c: Config,
    mesh: Mesh,
    plan: Plan | None,
    peers: Peers | None = None,
  ):
    self._workdir, self._c, self._mesh, self._plan = workdir, c, mesh, plan
    self._peers = peers or Peers()
    self._manager = ocp.CheckpointManager(
      _folder(workdir),
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

  def save(self, step: int, state: TrainState, record: Record) -> None:
    """Starts saving; arrays are copied before it returns, so they may be donated.

    Raises:
      ConfigError: there is a checkpoint of this step or a later one.
    """
    if self._plan:
      self._plan.jobs.settle()  # Saving may use all processes' devices.
    saved = self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(_tree(state)),
        record=ocp.args.JsonSave(dataclasses.asdict(record)),
      ),
    )
    if not saved:
      raise ConfigError(
        f"workdir is {str(self._workdir)!r}, where step {step} cannot be saved since a"
        f" checkpoint of step {self.latest} is there; choose another --workdir, or move"
        " that checkpoint away."
      )

  def restore(self) -> Restored | None:
    """The newest checkpoint that can be read, or None if there is none at all.

    Raises:
      ConfigError: the checkpoint belongs to another config; the message shows the
        fields that differ. Or no checkpoint can be read, or not by all processes.
    """
    steps = self._peers.all_gather(steps_of(self._workdir))[0]
    for passed, step in enumerate(steps):
      restored = self._try_restore(step)
      if restored is not None:
        self._set_aside(steps[:passed])
        return restored
    if steps:
      raise ConfigError(
        f"workdir is {str(self._workdir)!r}, whose checkpoints (steps"
        f" {', '.join(map(str, steps))}) cannot be read; choose another --workdir, or"
        " move its checkpoints away to train from the start."
      )
    return None

  def _try_restore(self, step: int) -> Restored | None:
    record = self._agreed(step, lambda: read_record(self._workdir, step))
    if record is None:
      return None
    _check_same_config(record.config, self._c, step)
    _warn_of_other_shards(self._c, record.fsdp, self._mesh.shape[FSDP])
    sent = self._plan.schedule.in_flight(step) if self._plan else {}
    in_flight = () if record.finished else sent
    like = abstract_state(self._c, self._mesh, self._plan, in_flight, record.fsdp)
    arrays = self._agreed(step, lambda: read_arrays(self._workdir, step, _tree(like)))
    return None if arrays is None else Restored(step, _state(arrays, like), record)

  def _agreed(self, step: int, read: Callable[[], Any]) -> Any:
    """What `read` returns, None if it fails on all processes.

    Raises:
      ConfigError: it fails on some processes. The fault is theirs then, and an older
        checkpoint would be no remedy.
    """
    value, problem = None, None
    try:
      value = read()
    except UNREADABLE as error:
      problem = reason(error)
    problems = self._peers.all_gather(problem)
    unable = [p for p, x in enumerate(problems) if x is not None]
    if not unable:
      return value
    if len(unable) < len(problems):
      raise ConfigError(
        f"--workdir is {self._workdir}, whose checkpoint of step {step} process"
        f" {unable[0]} cannot read ({problems[unable[0]]}) while others can; see that"
        " it is the same folder on all machines, and start again."
      )
    if self._peers.index == 0:
      logging.warning(
        "Checkpoint of step %d is incomplete and is passed over: %s", step, problems[0]
      )
    return None

  def _set_aside(self, steps: list[int]) -> None:
    """Moves unreadable checkpoints out of Orbax's way."""
    if not steps:
      return
    if self._peers.index == 0:
      for step in steps:
        to = _unused(self._workdir / "unreadable" / str(step))
        to.parent.mkdir(exist_ok=True)
        (_folder(self._workdir) / str(step)).rename(to)
        say(f"Moved the checkpoint of step {step}, which cannot be read, to {to}.")
    self._peers.all_gather(None)
    self._manager.reload()

  def wait(self) -> None:
    self._manager.wait_until_finished()

  def close(self) -> None:
    self._manager.close()


def steps_of(workdir: pathlib.Path) -> list[int]:
  """Steps of the checkpoints in a workdir, newest first."""
  names = (p.name for p in _folder(workdir).glob("*"))
  return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def read_record(workdir: pathlib.Path, step: int) -> Record:
  """Reads a checkpoint's record.

  Raises:
    ValueError, OSError, KeyError: it is not there or damaged (UNREADABLE).
  """
  path = _folder(workdir) / str(step) / "record" / "metadata"
  saved = json.loads(path.read_text())
  known = {f.name for f in dataclasses.fields(Record)}
  return Record(**{name: value for name, value in saved.items() if name in known})


def read_arrays(workdir: pathlib.Path, step: int, like: Tree) -> Tree:
  """Reads arrays of a checkpoint, each straight to its devices.

  Uses a handler of Orbax alone, in which no process waits for another.

  Args:
    workdir: of the run.
    step: of the checkpoint.
    like: shapes, types and shardings of the saved tree, or of a part of it: `params`,
      `opt_state`, `theta`, `outer_opt_state`, `codec_state`, `in_flight`.

  Raises:
    ValueError, OSError, KeyError: they are not there or damaged (UNREADABLE).
  """
  place = lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype)
  args = ocp.args.PyTreeRestore(
    item=like, restore_args=jax.tree.map(place, like), partial_restore=True
  )
  folder = _folder(workdir) / str(step) / "state"
  return ocp.PyTreeCheckpointHandler().restore(folder, args=args)


def reason(error: BaseException) -> str:
  """The first line of an error."""
  return str(error).splitlines()[0] if str(error) else type(error).__name__


def _folder(workdir: pathlib.Path) -> pathlib.Path:
  return (workdir / "checkpoints").absolute()


def _check_same_config(old: Mapping[str, Any], c: Config, step: int) -> None:
  """Refuses to continue a run under another config.

  Fields that the run's code did not have yet count as their defaults.

  Raises:
    ConfigError: with the differing fields, old -> new.
  """
  with contextlib.suppress(ConfigError):  # Then the difference is shown.
    old = complete(old).to_dict()
  lines = [
    f"{field}: {change}"
    for field, change in difference(old, c.to_dict()).items()
    if not field.startswith(FREE_FIELDS)
  ]
  if lines:
    raise ConfigError(
      f"workdir holds a checkpoint of step {step} made with another config"
      f" ({'; '.join(lines)}); choose another --workdir or the same values."
    )


def _warn_of_other_shards(c: Config, before: int, now: int) -> None:
  """Warns if a run goes on with other shards, which its codes depend on."""
  plain = c.wire.compressor == "quantize" and c.wire.format in PLAIN
  if before == now or plain or c.data_parallel:
    return
  logging.warning(
    "mesh.fsdp was %d and is %d: each shard is coded by itself (wire.compressor %s,"
    " wire.format %s), so outer gradients lose other bits than before; set mesh.fsdp=%d"
    " if results have to be those of an uninterrupted run.",
    before,
    now,
    c.wire.compressor,
    c.wire.format,
    before,
  )


def _unused(path: pathlib.Path) -> pathlib.Path:
  """The path, with a number behind it if it exists."""
  names = itertools.chain([path.name], (f"{path.name}.{n}" for n in itertools.count(1)))
  return next(p for p in map(path.with_name, names) if not p.exists())


def _tree(state: TrainState) -> dict[str, Any]:
  """The state as nested dicts and lists; None and empty parts are left out."""
  tree = {"params": state.params, "opt_state": state.opt_state}
  if state.outer:
    tree["theta"] = list(state.outer.theta)
    tree["outer_opt_state"] = list(state.outer.opt_state)
    tree["codec_state"] = list(state.outer.codec_state)
    tree["in_flight"] = state.outer.in_flight
  return {name: part for name, part in tree.items() if jax.tree.leaves(part)}


def _state(tree: dict[str, Any], like: TrainState) -> TrainState:
  """The inverse of `_tree`; `like` has what was left out."""
  outer = like.outer
  if outer:
    outer = OuterState(
      theta=tuple(tree["theta"]),
      opt_state=tuple(tree.get("outer_opt_state", outer.opt_state)),
      codec_state=tuple(tree.get("codec_state", outer.codec_state)),
      in_flight=tree.get("in_flight", {}),
    )
  return TrainState(tree["params"], tree["opt_state"], outer)
