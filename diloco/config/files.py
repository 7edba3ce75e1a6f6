"""Files that several processes use. No JAX."""

import errno
import fcntl
from typing import IO

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
