"""Files that several processes use. No JAX."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator
from typing import IO, Any, BinaryIO

# Some file systems know no locks, for example Lustre without the mount option flock.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


def try_lock(file: IO) -> bool:
  """Locks an open file until all its descriptors close; False if another has it.

  The system releases the lock when the process ends, even if the process is killed. On
  NFS the lock holds for all machines. On a file system without locks, every process
  gets the lock.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError as error:
    if error.errno not in _NO_LOCKS:
      raise
  return True


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
  """Opens a temporary file, which becomes `path` when it is complete and on disk."""
  unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    with unfinished.open("wb+") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    unfinished.rename(path)
  except BaseException:
    unfinished.unlink(missing_ok=True)
    raise


def cut_half_line(path: pathlib.Path) -> None:
  """Removes the end of the last line that a kill has cut short, if there is one."""
  with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
    file.truncate(file.read().rfind(b"\n") + 1)


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
  """Reads a JSON file; None if the file is absent or holds no JSON object."""
  try:
    value = json.loads(path.read_bytes())
  except (FileNotFoundError, RecursionError, ValueError):
    return None
  return value if isinstance(value, dict) else None


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file; if killed meanwhile, leaves the old file or none."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with replacing(path) as file:
    file.write((json.dumps(value, indent=2) + "\n").encode())
