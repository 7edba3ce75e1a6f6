"""Free disk for a checkpoint, and the error if there is too little."""

import errno
import os
import pathlib
import shutil
from typing import Any

import jax

from diloco.checkpoint.record import steps_of
from diloco.errors import ConfigError

_METADATA = 2048  # Bytes on the disk that an array takes besides its values, at most.


def needed(tree: Any) -> int:
  """Returns how many bytes a checkpoint of these global arrays takes on the disk."""
  leaves = jax.tree.leaves(tree)
  return sum(x.nbytes for x in leaves) + _METADATA * len(leaves)


def check(workdir: pathlib.Path, step: int, size: int) -> None:
  """Checks that the disk has room for a whole checkpoint.

  Raises:
    ConfigError: less is free than `size`, the bytes of the checkpoint of this step.
  """
  disk = shutil.disk_usage(workdir)
  if disk.total and disk.free < size:
    raise ConfigError(unwritten(workdir, step, size, os.strerror(errno.ENOSPC)))


def unwritten(workdir: pathlib.Path, step: int, size: int, reason: str) -> str:
  """Explains why a checkpoint of `size` bytes cannot be written, and what to do."""
  free = shutil.disk_usage(workdir).free
  older = [s for s in steps_of(workdir) if s < step]
  start = f"the checkpoint of step {older[0]}" if older else "the start"
  return (
    f"--workdir is {workdir}, where the checkpoint of step {step} cannot be written"
    f" ({reason}): it needs {_text(size)} and {_text(free)} are free; make room or"
    f" raise the quota, then the same command goes on from {start}."
  )


def _text(size: int) -> str:
  return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
