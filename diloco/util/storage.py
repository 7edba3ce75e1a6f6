"""Reads and writes files in a folder or a bucket, by the same methods. No JAX.

A folder is on a disk, or on a file system of several machines. A bucket has an address
with s3://, gs://, az:// or another scheme of the package `obstore`. `obstore` has no
dependencies, works with all clouds, and can create a file only if the file is absent.
It writes each file by one request.
"""

import abc
import contextlib
import datetime
import errno
import functools
import os
import pathlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from diloco.errors import ConfigError, passing
from diloco.util.command import make_folder, optional
from diloco.util.files import is_address, local_path

_STALE_S = 3600.0  # Seconds. An older unfinished file is from a killed process.
_TRIES = {"max_retries": 3, "retry_timeout": datetime.timedelta(seconds=20)}
# Machines of a cloud ask this server for credentials, if there are no others.
_METADATA = "169.254.169.254"
_SILENT_S = 60  # A request has failed after this time without an answer.
_UPLOAD = 6_000_000  # Bytes that the slowest link uploads in _SILENT_S.
_CLIENT = {
  "timeout": "1day",  # A large file may take long on a slow link.
  "connect_timeout": "10s",  # The error about a lost server must be fast.
  "allow_http": True,
}


class Storage(abc.ABC):
  """Files by name, such as `sites/0`.

  All methods raise OSError if the disk, the network or the server fails; the caller may
  then repeat the call.

  Attributes:
    poll_s: seconds between two checks for new files.
  """

  poll_s: float

  @abc.abstractmethod
  def get(self, name: str) -> bytes | None:
    """Returns the bytes of a file; None if the file does not exist."""

  @abc.abstractmethod
  def put(self, name: str, data: bytes) -> None:
    """Writes or replaces a file; readers never see a part of the file."""

  def create(self, name: str, data: bytes) -> bool:
    """Creates a file; returns False if the file exists with other bytes.

    The answer to a successful request may be lost, and the request may be repeated. So
    a file with the same bytes counts as written by this call. Readers never see a part
    of the file.
    """
    return self._create(name, data) or self.get(name) == data

  @abc.abstractmethod
  def _create(self, name: str, data: bytes) -> bool:
    """Creates a file; returns False if the file exists."""

  @abc.abstractmethod
  def delete(self, name: str) -> None:
    """Deletes a file, if it exists."""

  @abc.abstractmethod
  def names(self, folder: str) -> list[str]:
    """Lists the names of a folder's files; the list may be old or incomplete."""


class Folder(Storage):
  """A folder of this machine."""

  poll_s = 0.02

  def __init__(self, root: pathlib.Path):
    self._root = root

  def get(self, name: str) -> bytes | None:
    try:
      return (self._root / name).read_bytes()
    except FileNotFoundError:
      return None

  def put(self, name: str, data: bytes) -> None:
    with self._unfinished(name, data) as path:
      path.replace(self._root / name)

  def _create(self, name: str, data: bytes) -> bool:
    with self._unfinished(name, data) as path:
      try:
        # Unlike a rename, a link replaces no file. The new file is complete at once.
        (self._root / name).hardlink_to(path)
      except FileExistsError:
        return False
    return True

  def delete(self, name: str) -> None:
    (self._root / name).unlink(missing_ok=True)

  def names(self, folder: str) -> list[str]:
    try:
      return os.listdir(self._root / folder)
    except FileNotFoundError:
      return []

  def clear(self) -> None:
    """Deletes the unfinished files of killed processes."""
    with self._unfinished("now", b"") as path:
      now = path.stat().st_mtime  # The clock of the file system.
      for other in self._root.rglob("*.tmp"):
        with contextlib.suppress(OSError):
          if now - other.stat().st_mtime > _STALE_S:
            other.unlink()

  @contextlib.contextmanager
  def _unfinished(self, name: str, data: bytes) -> Iterator[pathlib.Path]:
    """Writes a temporary file with a unique name; deletes it in the end."""
    path = self._root / f"{name}.{secrets.token_hex(4)}.tmp"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
      yield path
    finally:
      path.unlink(missing_ok=True)


class Bucket(Storage):
  """A bucket, or a folder in it; without credentials, its methods raise ConfigError."""

  poll_s = 1.0

  def __init__(self, make_store: Callable[[int], Any]):
    """Takes a function that makes a store of `obstore.store`.

    The function takes the seconds after which a request without an answer fails.
    """
    import obstore

    self._obstore, self._make_store = obstore, functools.cache(make_store)
    self._store = self._make_store(_SILENT_S)
    self._has_answered = False

  def _for_upload(self, data: bytes) -> Any:
    """Returns a store that waits long enough: no answer comes before the last byte."""
    return self._make_store(_SILENT_S << (len(data) // _UPLOAD).bit_length())

  def get(self, name: str, most: int = 0) -> bytes | None:
    """Returns the bytes of a file, or only its first `most` bytes."""
    options: Any = {"range": (0, most)} if most else None
    with self._request(), contextlib.suppress(FileNotFoundError):
      return bytes(self._obstore.get(self._store, name, options=options).bytes())
    return None

  def put(self, name: str, data: bytes) -> None:
    with self._request():
      self._obstore.put(self._for_upload(data), name, data, use_multipart=False)

  def _create(self, name: str, data: bytes) -> bool:
    with self._request():
      try:
        put = self._obstore.put
        put(self._for_upload(data), name, data, mode="create", use_multipart=False)
      except self._obstore.exceptions.AlreadyExistsError:
        return False
    return True

  def delete(self, name: str) -> None:
    with self._request(), contextlib.suppress(FileNotFoundError):
      self._obstore.delete(self._store, name)

  def names(self, folder: str) -> list[str]:
    return [name.removeprefix(f"{folder}/") for name in self.listed(folder)]

  def listed(self, folder: str = "") -> dict[str, float]:
    """Returns {name: time of writing, in seconds since 1970} of files at any depth."""
    with self._request():
      pages = self._obstore.list(self._store, folder)
      return {x["path"]: x["last_modified"].timestamp() for page in pages for x in page}

  def children(self, folder: str) -> tuple[list[str], list[str]]:
    """Returns the names of a folder's files, and the names of its subfolders."""
    with self._request():
      listing = self._obstore.list_with_delimiter(self._store, folder)
    paths = [x["path"] for x in listing["objects"]], listing["common_prefixes"]
    files, folders = ([x.rpartition("/")[2] for x in some] for some in paths)
    return files, folders

  def move(self, name: str, to: str) -> None:
    """Gives a file another name."""
    with self._request():
      self._obstore.rename(self._store, name, to)

  @contextlib.contextmanager
  def _request(self) -> Iterator[None]:
    """Turns the errors of obstore, which have many lines, into an OSError."""
    exceptions = self._obstore.exceptions
    refused = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    try:
      yield
      self._has_answered = True
    except OSError:
      raise
    except exceptions.BaseError as error:
      if _METADATA in str(error) and not self._has_answered:
        raise ConfigError(
          "this machine has no credentials for the bucket; give them as other programs"
          " take them, such as in GOOGLE_APPLICATION_CREDENTIALS or AWS_ACCESS_KEY_ID."
        ) from error
      # Not EIO, because EIO may also mean a damaged file.
      number = errno.EACCES if isinstance(error, refused) else errno.ECONNABORTED
      raise OSError(number, _short(error)) from error


def _short(error: object) -> str:
  return str(error).partition("\n")[0][:300]


def _open_bucket(stores: Any, address: str, seconds: int) -> Any:
  if address.startswith(("memory:", "file:")):
    return stores.from_url(address)
  client = _CLIENT | {"read_timeout": f"{seconds}s"}
  return stores.from_url(address, retry_config=_TRIES, client_options=client)


def open_storage(address: str, flag: str, writes: bool = True) -> Storage:
  """Opens a folder or a bucket.

  Args:
    address: a path of this machine, or an address such as s3://BUCKET/NAME.
    flag: the flag or field with the address, for messages.
    writes: whether files will be written; if true, makes a folder that does not exist.

  Raises:
    ConfigError: the package obstore is not installed; the folder does not exist;
      nothing can be written; or two processes could create the same file.
    OSError: the file system or the network fails, perhaps only for a short time.
  """
  is_bucket = is_address(address)
  if is_bucket:
    needs = f"{flag} is {address!r}, and buckets need"
    stores = optional("obstore.store", needs, "bucket")
  try:
    if is_bucket:
      storage: Storage = Bucket(functools.partial(_open_bucket, stores, address))
    else:
      folder = make_folder(address, flag) if writes else local_path(address, flag)
      if not folder.is_dir():
        raise ConfigError(f"{flag} is {address!r}, but there is no such folder.")
      storage = Folder(folder)
    if not writes:
      return storage
    if isinstance(storage, Folder):
      storage.clear()
    probe = f"{secrets.token_hex(4)}.tmp"
    storage.create(probe, b"one")
    is_exclusive = not storage.create(probe, b"two")
    storage.delete(probe)
  except Exception as error:
    if isinstance(error, ConfigError) or passing(error):
      raise
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    raise ConfigError(
      f"{flag} is {address!r}, where nothing can be written ({_short(why)});"
      " give a folder with hard links, or a bucket, that this machine can write."
    ) from error
  if not is_exclusive:
    raise ConfigError(
      f"{flag} is {address!r}, where two processes can create the same file; give"
      " another folder or bucket."
    )
  return storage
