"""What lies in a run's folder `checkpoints`, and how it is read.

Each checkpoint is a folder whose name is its step. `state` holds the arrays, in the
format of Orbax; `record` holds the rest, as JSON. Whoever reads a checkpoint gets what
was saved or a reason: checksums show damage that the format of the files does not show.
"""

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from diloco.config import ConfigError
from diloco.run import checksums, memory
from diloco.run.orbax_errors import hush, reason_of
from diloco.run.peers import Peers, say

Tree = Any


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
    drained: `Schedule.drained` of an extended run.
    checksums: {name: checksum} of the arrays; empty if an older version saved them.
  """

  config: dict[str, Any]
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  ledger: dict[str, Any] = dataclasses.field(default_factory=dict)
  spent: dict[str, Any] = dataclasses.field(default_factory=dict)
  finished: bool = False
  fsdp: int = 1
  drained: int = 0
  checksums: dict[str, int] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    """Returns the fields and a checksum of them, for a JSON file."""
    fields = json.loads(json.dumps(dataclasses.asdict(self)))
    return {**fields, "crc32": _crc32(fields)}


class Stored(NamedTuple):
  """A checkpoint that was read: its step, its record and the arrays asked for."""

  step: int
  record: Record
  arrays: Tree


def folder_of(workdir: pathlib.Path) -> pathlib.Path:
  """Returns the folder of a run's checkpoints, which may not exist yet.

  Raises:
    ConfigError: something else is there.
  """
  folder = (workdir / "checkpoints").absolute()
  if folder.exists() and not folder.is_dir():
    raise ConfigError(
      f"--workdir is {workdir}, where `checkpoints` is a file and not a folder; move it"
      " away or choose another --workdir."
    )
  return folder


def steps_of(workdir: pathlib.Path) -> list[int]:
  """Returns the steps of the checkpoints in a workdir, newest first."""
  names = (p.name for p in folder_of(workdir).glob("*"))
  return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def read_newest(
  workdir: pathlib.Path,
  steps: list[int],
  like: Callable[[int, Record], Tree],
  remedy: str,
  peers: Peers | None = None,
) -> Stored:
  """Reads the newest checkpoint that is whole.

  Args:
    workdir: folder of the run.
    steps: the checkpoints to try, newest first.
    like: describes the arrays to read, for `read_arrays`, from the step and the record.
    remedy: what the user can do if no checkpoint is whole.
    peers: the processes, all in this function; default this one.

  Raises:
    ConfigError: no checkpoint is whole, or some processes cannot read one that others
      can: then older checkpoints are no remedy.
  """
  hush()
  peers = peers or Peers()
  damaged = dict[int, str]()
  for step in steps:
    found, reason = _read(workdir, step, like)
    by_process = peers.all_gather(reason)
    unable = [p for p, x in enumerate(by_process) if x]
    if found and not unable:
      reason = _changed(found, peers)
      if not reason:
        for other, why in damaged.items() if peers.index == 0 else ():
          say(f"The checkpoint of step {other} is damaged ({why}); took step {step}.")
        return found
    elif len(unable) < peers.count:
      raise ConfigError(
        f"--workdir is {workdir}, whose checkpoint of step {step} process {unable[0]}"
        f" cannot read ({by_process[unable[0]]}) while others can; see that it is the"
        " same folder on all machines, and start again."
      )
    damaged[step] = str(reason)
    found = None  # Otherwise the arrays stay in memory while the next are read.
  s = "s" if len(steps) > 1 else ""
  raise ConfigError(
    f"--workdir is {workdir}, whose checkpoint{s} of step{s}"
    f" {', '.join(map(str, steps))} cannot be read (of step {steps[0]}:"
    f" {damaged[steps[0]]}); {remedy}."
  )


def read_record(workdir: pathlib.Path, step: int) -> Record:
  """Reads the record of a checkpoint.

  Raises:
    ValueError, OSError, TypeError: the record is missing or damaged.
  """
  path = folder_of(workdir) / str(step) / "record" / "metadata"
  text = path.read_bytes()
  try:
    fields = json.loads(text)
    saved = fields.pop("crc32", None)  # Older versions wrote none.
    whole = saved in (None, _crc32(fields))
  except (ValueError, TypeError, AttributeError):  # Not JSON, or no dict.
    whole = False
  if not whole:
    raise ValueError(f"{path} has another content than was saved")
  return Record(**fields)


def read_arrays(workdir: pathlib.Path, step: int, like: Tree) -> Tree:
  """Reads arrays of a checkpoint, each straight to its devices.

  Uses a handler of Orbax alone, in which no process waits for another.

  Args:
    workdir: folder of the run.
    step: step of the checkpoint.
    like: shapes, dtypes and shardings of the saved tree, or of some of its parts:
      `params`, `opt_state`, `theta`, `outer_opt_state`, `codec_state`, `in_flight`.

  Raises:
    Exception: arrays are missing or damaged; Orbax has no narrower type for this.
  """
  place = lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype)
  args = ocp.args.PyTreeRestore(
    item=like, restore_args=jax.tree.map(place, like), partial_restore=True
  )
  folder = folder_of(workdir) / str(step) / "state"
  return ocp.PyTreeCheckpointHandler().restore(folder, args=args)


def _read(
  workdir: pathlib.Path, step: int, like: Callable[[int, Record], Tree]
) -> tuple[Stored | None, str | None]:
  """Reads a checkpoint on this process; else returns the reason why not."""
  try:
    record = read_record(workdir, step)
    arrays = read_arrays(workdir, step, like(step, record))
    return Stored(step, record, arrays), None
  except ConfigError:
    raise
  except Exception as error:  # Damaged files make Orbax raise any exception.
    if memory.explain(error):
      raise  # Older checkpoints take as much memory.
    return None, reason_of(error)


def _changed(found: Stored, peers: Peers) -> str | None:
  """Says which arrays are not those that were saved; None if all are."""
  names = checksums.changed(found.arrays, found.record.checksums, peers)
  more = f" and of {len(names) - 1} more arrays" if len(names) > 1 else ""
  return (
    f"the values of {names[0]}{more} are not those that were saved" if names else None
  )


def _crc32(fields: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
