"""The files of a group: in a folder that all sites see, or in a bucket. No JAX.

Sites ask for files by their names, which follow from the numbers of rounds and sites.
So nothing waits for a listing; listings only find what may be deleted. A file is a JSON
line, bytes, and the CRC-32 of both. A file that is cut short or damaged counts as one
that is not there yet, and is read again later.
"""

import abc
import contextlib
import errno
import json
import os
import pathlib
import secrets
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from diloco.errors import ConfigError
from diloco.util.command import make_folder

FOLDERS = ("journal", "payloads", "sites", "snapshots")
# What file systems without hard links answer.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}


class Store(abc.ABC):
  """Files by name, such as `sites/0`.

  All methods raise OSError if the file system fails.

  Attributes:
    is_exclusive: whether of several processes that create a file one alone succeeds.
    poll_s: seconds between two looks for news.
  """

  is_exclusive = True
  poll_s: float

  @abc.abstractmethod
  def get(self, name: str) -> bytes | None:
    """Returns the bytes of a file; None if it is not there."""

  @abc.abstractmethod
  def put(self, name: str, data: bytes) -> None:
    """Writes a file, or replaces one."""

  @abc.abstractmethod
  def create(self, name: str, data: bytes) -> bool:
    """Writes a file; returns False if it is there already."""

  @abc.abstractmethod
  def delete(self, name: str) -> None:
    """Deletes a file, if it is there."""

  @abc.abstractmethod
  def names(self, folder: str) -> list[str]:
    """Lists the names of a folder's files, perhaps late and not all of them."""

  def read(self, name: str) -> tuple[dict[str, Any], memoryview] | None:
    """Returns what `pack` has joined; None if the file is not there in whole."""
    return unpack(self.get(name) or b"")


def pack(head: Mapping[str, Any], *bodies: bytes | memoryview) -> bytes:
  """Joins a JSON object and bytes, with a checksum."""
  data = b"".join((json.dumps(head).encode(), b"\n", *bodies))
  return data + zlib.crc32(data).to_bytes(4)


def unpack(content: bytes) -> tuple[dict[str, Any], memoryview] | None:
  """Returns what `pack` has joined; None for any other bytes."""
  whole, end = memoryview(content), content.find(b"\n")
  if zlib.crc32(whole[:-4]).to_bytes(4) != whole[-4:]:
    return None
  with contextlib.suppress(RecursionError, ValueError):
    head = json.loads(content[:end])
    return (head, whole[end + 1 : -4]) if isinstance(head, dict) else None
  return None


class Folder(Store):
  """A folder of this machine: a disk, or a file system of several machines."""

  poll_s = 0.02

  def __init__(self, root: pathlib.Path):
    """Makes the folders of a group."""
    self._root = root
    for folder in FOLDERS:
      (root / folder).mkdir(parents=True, exist_ok=True)

  def get(self, name: str) -> bytes | None:
    try:
      return (self._root / name).read_bytes()
    except FileNotFoundError:
      return None

  def put(self, name: str, data: bytes) -> None:
    with self._unfinished(name, data) as path:
      path.replace(self._root / name)

  def create(self, name: str, data: bytes) -> bool:
    own = self._root / name
    with self._unfinished(name, data) as path:
      try:
        # Unlike a rename, a link replaces nothing; and the file is complete at once.
        own.hardlink_to(path)
      except FileExistsError:
        # Over NFS the answer to a link that worked may be lost, and asked for again.
        return path.stat().st_nlink == 2
      except OSError as error:
        if error.errno not in _NO_LINKS:
          raise
        self.is_exclusive = False
        if own.exists():
          return False
        path.replace(own)
    return True

  def delete(self, name: str) -> None:
    (self._root / name).unlink(missing_ok=True)

  def names(self, folder: str) -> list[str]:
    return os.listdir(self._root / folder)

  @contextlib.contextmanager
  def _unfinished(self, name: str, data: bytes) -> Iterator[pathlib.Path]:
    """Writes a file that nobody reads, with a name that nobody else has."""
    path = self._root / f"{name}.{secrets.token_hex(4)}.tmp"
    try:
      with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
      yield path
    finally:
      path.unlink(missing_ok=True)


class Bucket(Store):
  """What `fsspec` reaches by an address: gs://, s3:// and others."""

  poll_s = 1.0

  def __init__(self, address: str):
    """Opens the bucket, with the credentials that its package finds.

    Raises:
      ImportError: the package of this kind of address is not installed.
      ValueError: there is no such kind of address.
    """
    import fsspec

    self._files, root = fsspec.core.url_to_fs(address, use_listings_cache=False)
    self._root = root.rstrip("/")
    with self._as_os_error():
      for folder in FOLDERS:
        self._files.makedirs(f"{self._root}/{folder}", exist_ok=True)

  def get(self, name: str) -> bytes | None:
    with self._as_os_error(), contextlib.suppress(FileNotFoundError):
      return self._files.cat_file(f"{self._root}/{name}")
    return None

  def put(self, name: str, data: bytes) -> None:
    with self._as_os_error():
      self._files.pipe_file(f"{self._root}/{name}", data)

  def create(self, name: str, data: bytes) -> bool:
    path = f"{self._root}/{name}"
    with self._as_os_error():
      if not self.is_exclusive and self._files.exists(path):
        return False
      with contextlib.suppress(FileExistsError):
        self._files.pipe_file(path, data, mode="create")
        return True
    return False

  def delete(self, name: str) -> None:
    with self._as_os_error(), contextlib.suppress(FileNotFoundError):
      self._files.rm_file(f"{self._root}/{name}")

  def names(self, folder: str) -> list[str]:
    with self._as_os_error(), contextlib.suppress(FileNotFoundError):
      found = self._files.ls(f"{self._root}/{folder}", detail=False)
      return [path.rpartition("/")[2] for path in found]
    return []

  @contextlib.contextmanager
  def _as_os_error(self) -> Iterator[None]:
    """Each package has errors of its own for a network that fails."""
    try:
      yield
    except OSError:
      raise
    except Exception as error:
      raise OSError(f"{type(error).__name__}: {error}") from error


def is_store(address: str) -> bool:
  """Returns whether the value of --coordinator is a folder or a bucket."""
  return "/" in address


def open_store(address: str) -> Store:
  """Opens the files of a group, and finds out whether creating is exclusive.

  Raises:
    ConfigError: nothing can be written there, or a package is not installed.
  """
  try:
    if "://" in address:
      store: Store = Bucket(address)
    else:
      store = Folder(make_folder(address, "--coordinator"))
    probe = f"sites/{secrets.token_hex(4)}.probe"
    store.create(probe, b"")
    if store.is_exclusive:
      store.is_exclusive = not store.create(probe, b"")
    store.delete(probe)
  except (ImportError, OSError, ValueError) as error:
    _refuse(address, error)
  return store


def _refuse(address: str, error: Exception) -> NoReturn:
  if isinstance(error, ConfigError):
    raise error
  raise ConfigError(
    f"--coordinator is {address!r}, where nothing can be written ({error}); give a"
    " folder or a bucket that all sites can write."
  ) from error
