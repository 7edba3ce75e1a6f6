"""Saves and restores checkpoints: everything that a run needs to continue exactly.

A checkpoint holds the train state, with the payloads in flight, and a JSON record with
the config, the data position and the ledger. Random numbers need no state: they follow
from (seed, step, fragment, replica). Saving is asynchronous: Orbax writes to a folder,
and `bucket.py` writes to a bucket. All processes write and read. A run may go on with
another number of processes or devices.

If the newest checkpoint cannot be read, an older one is restored, and the unreadable
one is moved to workdir/unreadable. Otherwise Orbax would save no step that is lower
than the newest step in its folder.
"""

import contextlib
import dataclasses
import itertools
import logging as logs
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from diloco.algorithm.method import Method
from diloco.algorithm.state import TrainState
from diloco.checkpoint import checksums, disk, resume
from diloco.checkpoint.bucket import BucketManager
from diloco.checkpoint.damage import Stored, read_newest
from diloco.checkpoint.record import Record, folder_of, steps_of
from diloco.config import Config
from diloco.errors import ConfigError, TryAgain, explain, of_system
from diloco.mesh import memory
from diloco.mesh.sharding import FSDP
from diloco.processes.peers import Peers, print_line
from diloco.spec import plugins
from diloco.util import files, remote
from diloco.util.orbax_errors import hush, of_orbax

# Orbax's timeout of a save. Orbax uses the machine's clock, which jumps if it is set
# forward or the machine sleeps for days. So the limit is 20 days, which no save
# reaches; its milliseconds still fit into 32 bits.
_LIMIT_S = 20 * 24 * 3600


class Checkpoints:
  """The checkpoints of one run."""

  def __init__(
    self,
    workdir: pathlib.Path,
    c: Config,
    method: Method,
    peers: Peers | None = None,
    contents: Mapping[str, str] | None = None,
  ):
    """Opens the checkpoints in the folder of a run.

    Args:
      contents: `diloco.data.contents` of this process; None if it reads no text.
    """
    self._workdir, self._c, self._method = workdir, c, method
    self._peers, self._contents = peers or Peers(), contents or {}
    self._saving: int | None = None  # The step that Orbax writes in the background.
    self._failed: Exception | None = None  # Why the newest save failed, if it did.
    self._size = 0  # Bytes of a checkpoint.
    hush()
    if self._peers.count > 1:  # Goes before `hush`'s filter, which drops Orbax's logs.
      logs.getLogger("absl").filters.insert(0, self._on_log)
    handlers = ocp.DefaultCheckpointHandlerRegistry()
    # Compression is off: zstd makes trained parameters only 8% smaller and would take
    # most of the time of a checkpoint (scripts/benchmarks/bench_checkpoint.py).
    plain = ocp.PyTreeCheckpointHandler(use_compression=False)
    handlers.add("state", ocp.args.PyTreeSave, plain)
    self._manager: ocp.CheckpointManager | BucketManager
    if remote.address_of(workdir):
      self._manager = BucketManager(workdir, c.checkpoint.keep, self._peers)
      return
    self._manager = ocp.CheckpointManager(
      folder_of(workdir),
      options=ocp.CheckpointManagerOptions(
        preservation_policy=preservation_policy.LatestN(c.checkpoint.keep),
        cleanup_tmp_directories=True,  # Deletes unfinished checkpoints of killed runs.
        async_options=ocp.AsyncOptions(timeout_secs=_LIMIT_S),
      ),
      handler_registry=handlers,
    )

  @property
  def latest(self) -> int | None:
    return self._manager.latest_step()

  def save(self, step: int, state: TrainState, record: Record) -> None:
    """Starts to save. Copies the arrays before it returns, so they may be donated.

    If the previous save has timed out, this save takes its place.

    Raises:
      ConfigError: a checkpoint of this step or a later step exists.
      ConfigError, TryAgain: the disk is full, or the previous save failed (see `wait`).
    """
    # Waits for exchange jobs, because saving also uses the devices of all processes.
    self._method.sync.place.settle()
    tree = tree_of(state)
    sums = checksums.compute(tree, self._peers)
    coded = [(p, x.payload.shape[1]) for p, x in state.outer.in_flight.items()]
    record = dataclasses.replace(record, checksums=sums, in_flight=coded)
    late = self._saving
    try:
      self.wait()
    except TryAgain:
      if not isinstance(of_system(self._failed), TimeoutError):
        raise
      print_line(f"Saving step {late} timed out; saves step {step} in its place.")
      self._failed = None
    self._size = disk.needed(tree)
    disk.check(self._workdir, step, self._size)
    self._saving = step
    with self._explained(step):
      saved = self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(tree), record=ocp.args.JsonSave(record.to_json())
        ),
      )
    if not saved:
      raise ConfigError(
        f"workdir is {str(self._workdir)!r}, where step {step} cannot be saved since a"
        f" checkpoint of step {self.latest} is there; choose another --workdir, or move"
        " that checkpoint away."
      )

  def restore(self) -> Stored | None:
    """Reads the newest undamaged checkpoint; returns its arrays as a `TrainState`.

    Returns:
      The checkpoint; None if the run has no checkpoints.

    Raises:
      ConfigError: the checkpoint was made with another config, or see `read_newest`.
      TryAgain: the disk has no room for the checkpoints that follow.
    """
    steps = self._peers.broadcast(steps_of(self._workdir))
    if not steps:
      self._check_room()
      return None
    like = lambda step, record: tree_of(self._like(step, record))
    remedy = "choose another --workdir, or move these away to train from the start"
    stored = read_newest(self._workdir, steps, like, remedy, self._peers)
    step, record = stored.step, stored.record
    self._set_aside([s for s in steps if s > step])
    state = state_of(stored.arrays, self._like(step, record))
    mixture = resume.mixture(record.contents, self._contents, step)
    told = [x for x in (self._check(record, step), mixture) if x]
    record = dataclasses.replace(record, mixtures=[*record.mixtures, *told])
    if self._peers.index == 0:
      fsdp = self._method.sync.mesh.shape[FSDP]
      resume.warn_of_other_shards(self._c, record.fsdp, fsdp)
      if record.finished and step == self._c.train.steps:
        whole = files.read_json(self._workdir / "summary.json")
        missing = "nothing was trained." if whole else "its result is computed again."
        print_line(f"This run finished before, at step {step}; {missing}")
      else:
        print_line(f"Going on from the checkpoint of step {step}.")
      for sentence in told:
        print_line(sentence)
    if record.finished and step < self._c.train.steps:
      # The end may have sent at a step number that a later step has again.
      ledger = record.ledger | {"latest": [0, 0]}
      record = dataclasses.replace(record, finished=False, drained=step, ledger=ledger)
    if not record.finished:
      self._check_room()
    return Stored(step, record, state)

  def _check_room(self) -> None:
    size = disk.needed(tree_of(self._method.abstract(drained=True)))
    disk.check_room(self._workdir, size, self._c.checkpoint, self._c.train.steps)

  def _like(self, step: int, record: Record) -> TrainState:
    """Describes the state of a checkpoint of this run.

    Raises:
      ConfigError: the checkpoint was made with another config.
    """
    self._check(record, step)
    method = self._method.after_drain(record.drained)
    is_part = plugins.transport(record.config["overlap"]["transport"]).needs
    # Records of earlier versions have one size for all payloads.
    sizes = dict.fromkeys(method.sync.schedule.in_flight(step), record.fsdp)
    fsdp = sizes | dict(record.in_flight)
    return method.abstract(step, fsdp, drained=record.finished or bool(is_part))

  def _check(self, record: Record, step: int) -> str:
    texts = (record.contents, self._contents)
    diverged = (files.read_json(self._workdir / resume.DIVERGED) or {}).get("step", 0)
    return resume.check(record.config, self._c, step, *texts, diverged > step)

  def _set_aside(self, unreadable: list[int]) -> None:
    """Moves unreadable checkpoints out of the folder that Orbax reads.

    Raises:
      ConfigError: a checkpoint cannot be moved.
    """
    for step in unreadable if self._peers.index == 0 else ():
      to = _unused(self._workdir / "unreadable" / str(step))
      try:
        if isinstance(self._manager, BucketManager):
          self._manager.set_aside(step, to.name)
        else:
          to.parent.mkdir(exist_ok=True)
          (folder_of(self._workdir) / str(step)).rename(to)
      except OSError as error:
        raise ConfigError(
          f"--workdir is {self._workdir}, where the damaged checkpoint of step {step}"
          f" cannot be moved to {to} ({error.strerror}); move it away."
        ) from error
      print_line(f"Moved the checkpoint of step {step}, which cannot be read, to {to}.")
    if unreadable:
      self._peers.broadcast(None)
      self._manager.reload()

  def wait(self) -> None:
    """Waits until the last checkpoint is written.

    Raises:
      ConfigError, TryAgain: the checkpoint could not be written.
    """
    if self._saving is not None:
      with self._explained(self._saving):
        self._manager.wait_until_finished()
    self._saving = None

  def close(self) -> None:
    """Does what `wait` does, and ends the threads of Orbax."""
    try:
      self.wait()
    finally:
      logs.getLogger("absl").removeFilter(self._on_log)
      try:
        self._manager.close()
      except Exception:  # After a failed save, `close` may fail, too.
        if not self._failed:
          raise
      # Orbax's `close` writes one more file into an unfinished checkpoint.
      self._remove_parts()

  @contextlib.contextmanager
  def _explained(self, step: int) -> Iterator[None]:
    """Turns an error of Orbax's writing into an error whose message is one sentence.

    Raises:
      ConfigError, TryAgain: the checkpoint cannot be written.
    """
    try:
      yield
    except ConfigError:
      raise
    except Exception as error:  # Orbax and TensorStore have no type for a full disk.
      if memory.explain(error):
        raise
      self._saving, self._failed = None, error
      raise self._unwritten(step, error) from None

  def _unwritten(self, step: int, error: Exception) -> Exception:
    """Removes the unfinished checkpoint; returns the error that explains the failure.

    If the cause is the loss of another process, this process reports the loss and ends.
    """
    self._peers.await_loss()
    self._remove_parts()
    return disk.unwritten(self._workdir, step, self._size, error)

  def _remove_parts(self) -> None:
    """Deletes unfinished checkpoints to free the disk."""
    parts = folder_of(self._workdir)
    if self._peers.index:
      return
    for _ in range(10):  # Deleting fails while threads still write to a checkpoint.
      for part in parts.glob("*.orbax-checkpoint-tmp"):
        shutil.rmtree(part, ignore_errors=True)

  def _on_log(self, record: logs.LogRecord) -> bool:
    """Ends all processes when Orbax logs that a process cannot write.

    Orbax itself would wait for the other processes for 20 minutes first.
    """
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, Exception) and self._saving and of_orbax(record.pathname):
      print_line("")  # Ends the line of the progress bar.
      told = explain(self._unwritten(self._saving, error))
      assert told  # `explain` has a message for each error of `_unwritten`.
      self._peers.fail(*told)
    return True


def _unused(path: pathlib.Path) -> pathlib.Path:
  """Returns the path; if it exists, appends the first number that makes a new path."""
  names = itertools.chain([path.name], (f"{path.name}.{n}" for n in itertools.count(1)))
  return next(p for p in map(path.with_name, names) if not p.exists())


def tree_of(state: TrainState) -> dict[str, Any]:
  """Returns the state as nested dicts and lists, without its empty parts."""
  tree = {"params": state.params, "opt_state": state.opt_state}
  tree |= {
    "theta": list(state.outer.theta),
    "outer_opt_state": list(state.outer.opt_state),
    "codec_state": list(state.outer.codec_state),
    "own": list(state.outer.own),
    "in_flight": {p: x.payload for p, x in state.outer.in_flight.items()},
  }
  return {name: part for name, part in tree.items() if jax.tree.leaves(part)}


def state_of(tree: dict[str, Any], like: TrainState) -> TrainState:
  """Inverts `tree_of`: returns a TrainState of the structure of `like`."""
  leaves, structure = jax.tree.flatten(like)
  numbered = jax.tree.unflatten(structure, range(len(leaves)))
  by_number = dict(zip(jax.tree.leaves(tree_of(numbered)), jax.tree.leaves(tree)))
  return jax.tree.unflatten(structure, [by_number[i] for i in range(len(leaves))])
