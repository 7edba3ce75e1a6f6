"""Files that several processes use. No JAX."""

import errno
import fcntl
import json
import pathlib
from typing import IO, Any

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


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file; if killed meanwhile, leaves the old file or none."""
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f".{path.name}.part")
  part.write_text(json.dumps(value, indent=2) + "\n")
  part.replace(path)
