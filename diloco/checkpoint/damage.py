"""Reads checkpoints with their arrays; `record.py` reads the rest.

A reader gets either exactly what was saved, or an error with the reason. Checksums find
damage that the file formats do not reveal.
"""

import errno
import pathlib
import zlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import orbax.checkpoint as ocp

from diloco.checkpoint import bucket, checksums
from diloco.checkpoint.record import Record, folder_of, read_record
from diloco.errors import ConfigError, passing
from diloco.mesh import memory
from diloco.processes.peers import Peers, print_line
from diloco.util import remote
from diloco.util.orbax_errors import hush, reason_of
from diloco.util.types import PyTree

T = TypeVar("T")


class Stored(NamedTuple):
  """A checkpoint that was read.

  Attributes:
    step: number of finished inner steps.
    record: everything that was saved except arrays.
    arrays: the arrays that `like` of `read_newest` describes, or a `TrainState`.
  """

  step: int
  record: Record
  arrays: PyTree


def read_newest(
  workdir: pathlib.Path,
  steps: list[int],
  like: Callable[[int, Record], PyTree],
  remedy: str,
  peers: Peers | None = None,
) -> Stored:
  """Reads the newest checkpoint that is not damaged.

  Args:
    workdir: folder of the run.
    steps: the checkpoints to try, newest first.
    like: given a step and its record, describes the arrays to read (`read_arrays`).
    remedy: advice to the user, for the error if all checkpoints are damaged.
    peers: the processes that all call this function; None: only this process.

  Raises:
    ConfigError: all checkpoints are damaged, or some processes can read a checkpoint
      and others cannot, because the processes see different files (an older checkpoint
      would not help).
    Exception: the system reports an error that may pass (`errors.passing`), or memory
      is too small.
  """
  hush()
  peers = peers or Peers()
  damaged = dict[int, str]()
  for step in steps:
    stored, reason = _read(workdir, step, like)
    by_process = peers.all_gather(reason)
    unable = [p for p, x in enumerate(by_process) if x]
    if stored and not unable:
      reason = _changed(stored, peers)
      if not reason:
        for other, why in damaged.items() if peers.index == 0 else ():
          print_line(
            f"The checkpoint of step {other} is damaged ({why}); took step {step}."
          )
        return stored
    elif (
      len(unable) < peers.count
      and len({*peers.all_gather(_files(folder_of(workdir) / str(step)))}) > 1
    ):
      raise ConfigError(
        f"--workdir is {workdir}, whose checkpoint of step {step} process {unable[0]}"
        f" cannot read ({by_process[unable[0]]}) while others can; see that it is the"
        " same folder on all machines, and start again."
      )
    damaged[step] = reason or by_process[unable[0]]
    stored = None  # Frees the arrays before the next checkpoint is read.
  s = "s" if len(steps) > 1 else ""
  raise ConfigError(
    f"--workdir is {workdir}, whose checkpoint{s} of step{s}"
    f" {', '.join(map(str, steps))} cannot be read (of step {steps[0]}:"
    f" {damaged[steps[0]]}); {remedy}."
  )


def read_arrays(workdir: pathlib.Path, step: int, like: PyTree) -> PyTree:
  """Reads arrays of a checkpoint directly to the devices.

  Uses Orbax's handler without a CheckpointManager, so no process waits for another one.

  Args:
    workdir: folder of the run.
    step: step of the checkpoint.
    like: shapes, dtypes and shardings of the saved tree, or of some of its parts:
      `params`, `opt_state`, `theta`, `outer_opt_state`, `codec_state`, `own`,
      `in_flight`.

  Raises:
    Exception: arrays are missing or damaged; Orbax has no narrower type for this.
  """
  if remote.address_of(workdir):
    return bucket.read_arrays(workdir, step, like)
  place = lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype)
  args = ocp.args.PyTreeRestore(
    item=like, restore_args=jax.tree.map(place, like), partial_restore=True
  )
  folder = folder_of(workdir) / str(step) / "state"
  return ocp.PyTreeCheckpointHandler().restore(folder, args=args)


def _read(
  workdir: pathlib.Path, step: int, like: Callable[[int, Record], PyTree]
) -> tuple[Stored | None, str | None]:
  """Reads a checkpoint; returns (checkpoint, None), or (None, reason) on failure."""
  record, reason = _tried(lambda: read_record(workdir, step))
  if not record:
    return None, reason
  wanted = like(step, record)  # An error here is no damage: the record is as saved.
  arrays, reason = _tried(lambda: read_arrays(workdir, step, wanted))
  return (None, reason) if reason else (Stored(step, record, arrays), None)


def _tried(read: Callable[[], T]) -> tuple[T | None, str | None]:
  """Returns (what `read` returns, None), or (None, reason) if files are damaged."""
  try:
    return read(), None
  except ConfigError:
    raise
  except Exception as error:  # Damaged files make Orbax raise any exception.
    if memory.explain(error):
      raise  # An older checkpoint needs as much memory, so it would fail, too.
    # Passing errors, such as too many open files, are no damage. EIO may be a bad disk.
    if (cause := passing(error)) and cause.errno != errno.EIO:
      raise
    return None, reason_of(error)


def _files(folder: pathlib.Path) -> int:
  """Returns a digest of the names and sizes of a folder's files."""
  paths = sorted(p for p in folder.rglob("*") if p.is_file())
  sizes = [(str(p.relative_to(folder)), p.stat().st_size) for p in paths]
  return zlib.crc32(repr(sizes).encode())


def _changed(stored: Stored, peers: Peers) -> str | None:
  """Returns a reason that names changed arrays; None if all arrays are as saved."""
  names = checksums.changed(stored.arrays, stored.record.checksums, peers)
  more = f" and of {len(names) - 1} more arrays" if len(names) > 1 else ""
  return (
    f"the values of {names[0]}{more} are not those that were saved" if names else None
  )
