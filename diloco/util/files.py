"""Reads, writes, locks and names files that several processes use. No JAX."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import secrets
import socket
import tempfile
from collections.abc import Iterator
from typing import IO, Any, BinaryIO

from diloco.errors import ConfigError
from diloco.util.types import Json

# Folder for this process's copies of folders in buckets (`remote.local_copy`).
COPIES = pathlib.Path(tempfile.gettempdir()) / f"diloco-{secrets.token_hex(6)}"
_LONGEST = 255  # The most bytes that a file's name can have.
# Errors of file systems without locks, such as Lustre without the mount option flock.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


def shown(text: object) -> str:
  """Returns a text for the user: the path of a local copy becomes its address."""
  return re.sub(rf"{re.escape(str(COPIES))}/(\w+)/", r"\1://", str(text))


def is_address(place: str | os.PathLike) -> bool:
  """Returns whether a place is an address such as s3://BUCKET/RUN, and not a path."""
  return "://" in os.fspath(place)


def local_path(text: str | os.PathLike, name: str) -> pathlib.Path:
  """Checks a path that a user gave, and expands `~`; every user's path passes here.

  Args:
    name: the flag or field with the path, for error messages.

  Raises:
    ConfigError: the path is empty, or cannot exist on this machine.
  """
  text = os.fspath(text)
  path, reason = os.path.expanduser(text), ""
  if not text.strip():
    raise ConfigError(f"{name} is empty; give a path (is a shell variable unset?).")
  if re.match(r"[A-Za-z][\w+.-]+:/", text):  # pathlib makes gs:/ of gs://
    reason = "an address; give a path of this machine, such as that of a mounted bucket"
  elif path.startswith("~"):
    reason = f"but there is no such user; write ./{text} if that is a name"
  elif "\0" in path or path != path.encode(errors="replace").decode():
    reason = "which is no text in UTF-8; rename it, or give a link to it"
  elif any(len(part.encode()) > _LONGEST for part in path.split("/")):
    reason = f"with a name of more than {_LONGEST} bytes, which no file can have"
  if reason:
    raise ConfigError(f"{name} is {text!r}, {reason}.")
  return pathlib.Path(path)


def folders_with(name: str, folder: pathlib.Path) -> str:
  """Returns " (did you mean A or B?)" if folders in or above a folder have `name`.

  Args:
    name: name of the file or folder to look for.
    folder: the folder that the user gave; it lacks `name`.
  """
  around = [p for p in folder.absolute().parents[:2] if (p / name).exists()]
  inside = (sorted(folder.glob(f"{'*/' * depth}{name}")) for depth in (1, 2))
  folders = around or [path.parent for path in next(filter(None, inside), [])]
  return f" (did you mean {' or '.join(map(str, folders[:3]))}?)" if folders else ""


def try_lock(file: IO) -> bool:
  """Locks an open file until all its descriptors close; False if it is locked already.

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


def holder() -> str:
  """Names this process for a lock file: one line for people, one for `has_ended`."""
  return f"process {os.getpid()} on {socket.gethostname()}\n{_processes()}\n"


def has_ended(holder: str) -> bool:
  """Returns whether `holder` names a process that is known to have ended.

  Nothing is known about a process of another boot, machine or container, which may have
  the same host name.
  """
  known = re.fullmatch(rf"process (\d+) on .*\n{re.escape(_processes())}\n", holder)
  return bool(known and not pathlib.Path(f"/proc/{known[1]}").exists())


def _processes() -> str:
  """Identifies boot and namespace, in which process numbers are unique."""
  with contextlib.suppress(OSError):  # Only Linux has these files.
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"boot {boot}, {os.readlink('/proc/self/ns/pid')}"
  return f"unknown to {os.getpid()}"


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
  """Opens a temporary file, which becomes `path` when it is complete and on disk.

  A pipe or a device such as /dev/stdout is written directly; otherwise root would
  replace it by a file.
  """
  if path.exists() and not path.is_file():
    with path.open("wb") as file:
      yield file
    return
  unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    with unfinished.open("wb+") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    unfinished.rename(path)
  except BaseException as error:
    unfinished.unlink(missing_ok=True)
    if isinstance(error, OSError) and error.errno and not error.filename:
      error.filename = str(path)  # A write error has no file name.
    raise


def cut_half_line(path: pathlib.Path) -> None:
  """Removes an incomplete last line, which a killed process may have left."""
  with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
    file.truncate(file.read().rfind(b"\n") + 1)


def read_json(path: pathlib.Path) -> Json | None:
  """Reads a JSON file; None if the file is absent or holds no JSON object."""
  with contextlib.suppress(FileNotFoundError, RecursionError, ValueError):
    value = json.loads(path.read_bytes())
    return value if isinstance(value, dict) else None
  return None


def require_json(path: pathlib.Path, field: str) -> Json:
  """Reads a JSON file in a folder that a field or a flag gives.

  Raises:
    ConfigError: the file is absent, holds no JSON object, or cannot be read.
  """
  cause: OSError | None = None
  try:
    if (content := read_json(path)) is not None:
      return content
  except OSError as error:
    cause = error
  reason = cause.strerror if cause else "it is missing or damaged"
  raise ConfigError(
    f"{field} is {str(path.parent)!r}, whose {path.name} cannot be read ({reason});"
    " write it again, or give another folder."
  ) from cause


def write(path: pathlib.Path, content: bytes | str) -> None:
  """Writes a file; if the process is killed meanwhile, the old file (if any) stays."""
  with replacing(path) as file:
    file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file like `write`, and makes its folder."""
  path.parent.mkdir(parents=True, exist_ok=True)
  write(path, json.dumps(value, indent=2) + "\n")
