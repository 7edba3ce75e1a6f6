"""Checkpoints, written by Orbax: everything that a run needs to go on exactly.

A checkpoint holds the train state, with the fragments in flight, and a JSON record with
the config, the data position and the ledger. Random numbers need no state: they follow
from (seed, step, fragment, replica). Saving is asynchronous. All processes write and
read. A run may go on with another number of processes or devices.

A checkpoint that cannot be read is moved to workdir/unreadable once an older one is
restored, because Orbax saves no step below the newest one that it finds.
"""

import contextlib
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import Mesh

from diloco.algorithm.plan import Plan
from diloco.algorithm.state import TrainState, abstract_state
from diloco.config import Config, ConfigError, complete
from diloco.config.resolve import difference
from diloco.model.sharding import FSDP
from diloco.run.batches import Batches
from diloco.run.log import Log
from diloco.run.peers import Peers, say
from diloco.wire.formats import PLAIN

Tree = Any
T = TypeVar("T")
# Fields that may change when a run goes on. They do not change what is computed, except
# that mesh.fsdp changes the codes (`_warn_of_other_shards`).
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
  """The part of a checkpoint that is not arrays, as JSON.

  Attributes:
    config: all fields of the run's config.
    data: position of every replica in its text, see `TrainIterator.get_state`.
    ledger: fields of a `Ledger`.
    spent: fields of a `Spent`.
    finished: whether training has ended and nothing is in flight.
    fsdp: size of the fsdp axis that encoded the payloads in flight.
  """

  config: dict[str, Any]
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  ledger: dict[str, Any] = dataclasses.field(default_factory=dict)
  spent: dict[str, Any] = dataclasses.field(default_factory=dict)
  finished: bool = False
  fsdp: int = 1


def make_record(
  c: Config, batches: Batches, log: Log, mesh: Mesh, peers: Peers, finished: bool
) -> Record:
  """Joins what all processes know; all must call it."""
  position = dict[str, Any]()
  for part in peers.all_gather(batches.get_state()):
    position.update(part)
  return Record(
    config=c.to_dict(),
    data=position,
    ledger=dataclasses.asdict(log.ledger),
    spent=dataclasses.asdict(log.spent()),
    finished=finished,
    fsdp=mesh.shape[FSDP],
  )


class Restored(NamedTuple):
  """A checkpoint that was read; `step` counts finished inner steps."""

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
      options=ocp.CheckpointManagerOptions(max_to_keep=c.checkpoint.keep),
      item_handlers={
        # Trained numbers hardly shrink: zstd saves 8% of the disk, and takes most of
        # the time of a checkpoint (scripts/bench_checkpoint.py).
        "state": ocp.PyTreeCheckpointHandler(use_compression=False),
        "record": ocp.JsonCheckpointHandler(),
      },
    )

  @property
  def latest(self) -> int | None:
    return self._manager.latest_step()

  def save(self, step: int, state: TrainState, record: Record) -> None:
    """Starts to save. Copies the arrays before it returns, so they may be donated.

    Raises:
      ConfigError: there is a checkpoint of this step or a later one.
    """
    if self._plan:
      self._plan.jobs.settle()  # Saving may use the devices of all processes.
    saved = self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.PyTreeSave(_tree(state)),
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
    """Reads the newest readable checkpoint; None if there is no checkpoint.

    Raises:
      ConfigError: the checkpoint was made with another config, or see `read_newest`.
    """
    steps = self._peers.broadcast(steps_of(self._workdir))
    if not steps:
      return None
    restored = read_newest(self._workdir, steps, self._read, self._peers)
    self._set_aside([step for step in steps if step > restored.step])
    return restored

  def _read(self, step: int) -> Restored:
    record = read_record(self._workdir, step)
    _check_same_config(record.config, self._c, step)
    _warn_of_other_shards(self._c, record.fsdp, self._mesh.shape[FSDP])
    sent = self._plan.schedule.in_flight(step) if self._plan else {}
    in_flight = () if record.finished else sent
    like = abstract_state(self._c, self._mesh, self._plan, in_flight, record.fsdp)
    arrays = read_arrays(self._workdir, step, _tree(like))
    return Restored(step, _state(arrays, like), record)

  def _set_aside(self, unreadable: list[int]) -> None:
    """Moves unreadable checkpoints out of Orbax's way."""
    for step in unreadable if self._peers.index == 0 else ():
      to = _unused(self._workdir / "unreadable" / str(step))
      to.parent.mkdir(exist_ok=True)
      (_folder(self._workdir) / str(step)).rename(to)
      say(f"Moved the checkpoint of step {step}, which cannot be read, to {to}.")
    if unreadable:
      self._peers.broadcast(None)
      self._manager.reload()

  def wait(self) -> None:
    self._manager.wait_until_finished()

  def close(self) -> None:
    self._manager.close()


def steps_of(workdir: pathlib.Path) -> list[int]:
  """Steps of the checkpoints in a workdir, newest first."""
  names = (p.name for p in _folder(workdir).glob("*"))
  return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def read_newest(
  workdir: pathlib.Path,
  steps: list[int],
  read: Callable[[int], T],
  peers: Peers | None = None,
) -> T:
  """Reads the newest checkpoint that all processes can read.

  Args:
    workdir: folder of the run.
    steps: the checkpoints to try, newest first.
    read: reads the checkpoint of a step.
    peers: the processes, all in this function; default this one.

  Raises:
    ConfigError: no checkpoint can be read; or some processes cannot read one that
      others can: then older checkpoints are no remedy.
  """
  peers = peers or Peers()
  for step in steps:
    found: Any = None
    problem: str | None = None
    try:
      found = read(step)
    except ConfigError:
      raise
    except (ValueError, OSError, KeyError, TypeError) as error:
      problem = (str(error).splitlines() or [type(error).__name__])[0]
    problems = peers.all_gather(problem)
    unable = [p for p, x in enumerate(problems) if x is not None]
    if not unable:
      return found
    if len(unable) < peers.count:
      raise ConfigError(
        f"--workdir is {workdir}, whose checkpoint of step {step} process {unable[0]}"
        f" cannot read ({problems[unable[0]]}) while others can; see that it is the"
        " same folder on all machines, and start again."
      )
    if peers.index == 0:
      logging.warning("Checkpoint of step %d is incomplete: %s", step, problem)
  raise ConfigError(
    f"workdir is {str(workdir)!r}, whose checkpoints (steps"
    f" {', '.join(map(str, steps))}) cannot be read; choose another --workdir, or move"
    " its checkpoints away to train from the start."
  )


def read_record(workdir: pathlib.Path, step: int) -> Record:
  """Reads the record of a checkpoint.

  Raises:
    ValueError, OSError, TypeError: the record is missing or damaged.
  """
  path = _folder(workdir) / str(step) / "record" / "metadata"
  return Record(**json.loads(path.read_text()))


def read_arrays(workdir: pathlib.Path, step: int, like: Tree) -> Tree:
  """Reads arrays of a checkpoint, each straight to its devices.

  Uses a handler of Orbax alone, in which no process waits for another.

  Args:
    workdir: folder of the run.
    step: step of the checkpoint.
    like: shapes, dtypes and shardings of the saved tree, or of some of its parts:
      `params`, `opt_state`, `theta`, `outer_opt_state`, `codec_state`, `in_flight`.

  Raises:
    ValueError, OSError, KeyError: arrays are missing or damaged.
  """
  place = lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype)
  args = ocp.args.PyTreeRestore(
    item=like, restore_args=jax.tree.map(place, like), partial_restore=True
  )
  folder = _folder(workdir) / str(step) / "state"
  return ocp.PyTreeCheckpointHandler().restore(folder, args=args)


def _folder(workdir: pathlib.Path) -> pathlib.Path:
  return (workdir / "checkpoints").absolute()


def _check_same_config(old: Mapping[str, Any], c: Config, step: int) -> None:
  """Refuses to go on with another config than the run's.

  Fields that the code of the run did not have count as their defaults.

  Raises:
    ConfigError: shows the fields that differ, old -> new.
  """
  with contextlib.suppress(ConfigError):  # A field is gone: shown as a difference.
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
  """Warns if a run goes on with another size of the fsdp axis, which changes codes."""
  plain = c.wire.compressor == "quantize" and c.wire.format in PLAIN
  if before != now and not plain and not c.data_parallel:
    logging.warning(
      f"mesh.fsdp was {before} and is {now}: each shard is coded by itself, so outer"
      f" gradients lose other bits than before; set mesh.fsdp={before} for the results"
      " of an uninterrupted run."
    )


def _unused(path: pathlib.Path) -> pathlib.Path:
  """The path, or if it exists the path with a number."""
  names = itertools.chain([path.name], (f"{path.name}.{n}" for n in itertools.count(1)))
  return next(p for p in map(path.with_name, names) if not p.exists())


def _tree(state: TrainState) -> dict[str, Any]:
  """The state as nested dicts and lists, without empty parts."""
  tree = {"params": state.params, "opt_state": state.opt_state}
  if state.outer:
    tree["theta"] = list(state.outer.theta)
    tree["outer_opt_state"] = list(state.outer.opt_state)
    tree["codec_state"] = list(state.outer.codec_state)
    tree["in_flight"] = state.outer.in_flight
  return {name: part for name, part in tree.items() if jax.tree.leaves(part)}


def _state(tree: dict[str, Any], like: TrainState) -> TrainState:
  """The inverse of `_tree`: puts its leaves where `like` has them."""
  leaves, structure = jax.tree.flatten(like)
  numbered = jax.tree.unflatten(structure, range(len(leaves)))
  found = dict(zip(jax.tree.leaves(_tree(numbered)), jax.tree.leaves(tree)))
  return jax.tree.unflatten(structure, [found[i] for i in range(len(leaves))])
