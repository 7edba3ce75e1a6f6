"""Lets commands read a run in a bucket: copies its small files. No JAX.

A command with the argument s3://BUCKET/RUN works in a temporary folder of this machine,
whose path ends in s3/BUCKET/RUN. `checkpoint/bucket.py` handles checkpoints.
"""

import atexit
import concurrent.futures
import os
import pathlib
import secrets
import shutil

from diloco.errors import ConfigError
from diloco.util import files
from diloco.util.storage import Bucket, open_storage

LOCK = ".lock"  # This file names the process that writes to the folder.
REQUESTS = 16  # The most requests at the same time.
# Folders of a run, or of a group of sites, that are not copied: they are large. So are
# the files *.state of a group.
_LARGE = {"checkpoints", "unreadable", "payloads"}
# The first bytes of a closed round of a group that are copied: more than its header.
_HEADER = 1 << 20


def local_copy(
  place: str | os.PathLike, flag: str, writes: bool = False
) -> pathlib.Path:
  """Returns a path unchanged; for an address, a folder with copies of its small files.

  Args:
    place: a path of this machine, or an address.
    flag: the flag or field with the place, for messages.
    writes: whether files will be written to the address.

  Raises:
    ConfigError: see `files.local_path` and `storage.open_storage`.
    OSError: the network fails, perhaps only for a short time.
  """
  if not files.is_address(place):
    return files.local_path(place, flag)
  address = os.fspath(place).rstrip("/")
  scheme, _, rest = address.partition("://")
  if {"", ".", ".."} & {*rest.split("/")}:
    raise ConfigError(
      f"{flag} is {address!r}, an address of no bucket; give one such as"
      " s3://BUCKET/RUN."
    )
  storage, folder = open_storage(address, flag, writes), files.COPIES / scheme / rest
  assert isinstance(storage, Bucket)
  if not files.COPIES.is_dir():
    atexit.register(shutil.rmtree, files.COPIES, ignore_errors=True)
  shutil.rmtree(folder, ignore_errors=True)  # Removes an older copy.
  folder.mkdir(parents=True)
  times = {
    name: changed
    for name, changed in storage.listed().items()
    if not _LARGE & {*name.split("/")} and not name.endswith(".state")
  }

  def copy(name: str) -> None:
    most = _HEADER if name.endswith(".round") else 0
    if (data := storage.get(name, most)) is not None:
      path = folder / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(data)
      os.utime(path, 2 * (times[name],))

  with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
    list(pool.map(copy, times))
  return folder


def address_of(path: pathlib.Path) -> str:
  """Returns the address that a path is a copy of; "" if the path is not a copy."""
  return files.shown(path) if path.is_relative_to(files.COPIES) else ""


def bucket_of(folder: pathlib.Path) -> Bucket | None:
  """Opens the bucket that a folder is a copy of; None if the folder is not a copy."""
  if not (address := address_of(folder)):
    return None
  storage = open_storage(address, "--workdir", writes=False)
  assert isinstance(storage, Bucket)
  return storage


def put_back(path: pathlib.Path) -> None:
  """Copies a file to the bucket, if the file's folder is the copy of a bucket."""
  if bucket := bucket_of(path.parent):
    bucket.put(path.name, path.read_bytes())


class Mirror:
  """Copies changes in a local copy to its bucket, until another run uses the bucket."""

  def __init__(self, folder: pathlib.Path, bucket: Bucket):
    """Takes over the bucket's folder; `push` of earlier processes fails from now on."""
    self._folder, self._bucket = folder, bucket
    self._holder = f"{files.holder()}{secrets.token_hex(8)}\n".encode()
    self._known = self._state()
    bucket.put(LOCK, self._holder)

  def check(self) -> None:
    """Refuses to go on if another run has taken the bucket's folder over.

    Raises:
      ConfigError: another run has the folder.
      OSError: the network fails.
    """
    holder = self._bucket.get(LOCK) or b""
    if holder != self._holder:
      other = holder.decode(errors="replace").partition("\n")[0] or "another process"
      raise ConfigError(
        f"--workdir is {address_of(self._folder)}, where {other} has started to train;"
        " this run ends; let one run at a time use the folder."
      )

  def push(self) -> None:
    """Makes the small files in the bucket equal to the files in the folder.

    Raises:
      ConfigError, OSError: see `check`.
    """
    self.check()
    now = self._state()
    for name in self._known.keys() - now.keys():
      self._bucket.delete(name)
    for name, state in now.items():
      if self._known.get(name) != state:
        self._bucket.put(name, (self._folder / name).read_bytes())
    self._known = now

  def _state(self) -> dict[str, tuple[int, int]]:
    """Returns {name: (last change in ns, size in bytes)}, without hidden files."""
    paths = (p for p in self._folder.rglob("*") if p.is_file() and p.name[0] != ".")
    stats = {p.relative_to(self._folder).as_posix(): p.stat() for p in paths}
    return {name: (s.st_mtime_ns, s.st_size) for name, s in stats.items()}
