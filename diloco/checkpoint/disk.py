"""Checks the free disk space for checkpoints; makes the error of a failed write."""

import contextlib
import errno
import math
import os
import pathlib
import shutil
from typing import Any

import jax

from diloco import errors
from diloco.checkpoint.record import steps_of
from diloco.errors import ConfigError, TryAgain
from diloco.spec.fields import CheckpointConfig
from diloco.util import remote
from diloco.util.orbax_errors import reason_of

_METADATA = 2048  # Limit of the bytes on the disk that an array needs besides values.


def needed(tree: Any) -> int:
  """Returns the bytes of a checkpoint on the disk, from its global arrays or shapes."""
  leaves = jax.tree.leaves(tree)
  values = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
  return values + _METADATA * len(leaves)


def at_once(c: CheckpointConfig, steps: int) -> int:
  """Returns how many checkpoints a run of `steps` inner steps has at once, at most."""
  # `keep` + 1, because the oldest is deleted only when the newest is complete.
  return min(c.keep + 1, -(-steps // c.every) if c.every else 1)


def check_room(
  workdir: pathlib.Path, size: int, c: CheckpointConfig, steps: int
) -> None:
  """Checks that the disk has room for all checkpoints that a run keeps at once.

  Args:
    workdir: folder of the run, which need not exist.
    size: bytes of a checkpoint.
    steps: inner steps of the run.

  Raises:
    TryAgain: the free disk space is too small.
  """
  if remote.address_of(workdir):
    return
  most, there = at_once(c, steps), len(steps_of(workdir))
  place = next(p for p in (workdir, *workdir.absolute().parents) if p.is_dir())
  disk = shutil.disk_usage(place)
  if disk.total and disk.free < (most - there) * size:
    raise TryAgain(
      f"--workdir is {workdir}, where {_text(disk.free)} are free, but {most - there}"
      f" more checkpoints of {_text(size)} will be there at once; make room, raise the"
      " quota, or lower checkpoint.keep."
    )


def check(workdir: pathlib.Path, step: int, size: int) -> None:
  """Checks that the disk has room for the checkpoint of a step.

  Raises:
    TryAgain: fewer bytes are free than `size`, the bytes of the checkpoint.
  """
  disk = shutil.disk_usage(workdir)
  if disk.total and disk.free < size and not remote.address_of(workdir):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise unwritten(workdir, step, size, full)


def unwritten(
  workdir: pathlib.Path, step: int, size: int, error: Exception
) -> ConfigError | TryAgain:
  """Makes the error that says why a checkpoint cannot be written, with a remedy.

  Args:
    step: step of the checkpoint.
    size: bytes of the checkpoint.
    error: the error of Orbax or of the system.
  """
  older = list[int]()
  with contextlib.suppress(OSError):  # The bucket may be out of reach.
    older = [s for s in steps_of(workdir) if s < step]
  start = f"the checkpoint of step {older[0]}" if older else "the start"
  what = (
    f"--workdir is {workdir}, where the checkpoint of step {step} cannot be written"
    f" ({reason_of(error)})"
  )
  goes_on = f"the same command goes on from {start}."
  if errors.is_full(error):
    free = shutil.disk_usage(workdir).free
    return TryAgain(
      f"{what}: it needs {_text(size)} and {_text(free)} are free; make room or raise"
      f" the quota, then {goes_on}"
    )
  if errors.of_system(error) and not errors.passing(error):
    return ConfigError(f"{what}; mend this, then {goes_on}")
  return TryAgain(f"{what}; {goes_on}")


def _text(size: int) -> str:
  return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
