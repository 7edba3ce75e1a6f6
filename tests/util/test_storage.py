"""Files in folders and buckets: whole or not there, and created once."""

import errno
import os
import pathlib
import time
from concurrent import futures

import pytest

from diloco.errors import ConfigError
from diloco.util import remote
from diloco.util import storage as storage_lib
from diloco.util.storage import Bucket, Folder, open_storage

obstore = pytest.importorskip("obstore")


@pytest.fixture(params=["a disk", "memory", "s3"])
def storage(request, tmp_path):
  if request.param == "a disk":
    return open_storage(f"{tmp_path}/group", "--group")
  if request.param == "memory":
    store = obstore.store.MemoryStore()
    return Bucket(lambda seconds: store)
  request.getfixturevalue("s3")
  return open_storage(f"s3://bucket/{tmp_path.name}", "--group")


def test_files_are_written_read_listed_and_deleted(storage):
  assert storage.get("sites/0") is None
  assert storage.names("sites") == []
  storage.put("sites/0", b"one")
  storage.put("sites/0", b"two")
  storage.put("other", b"")
  assert storage.get("sites/0") == b"two"
  assert storage.names("sites") == ["0"]
  storage.delete("sites/0")
  storage.delete("sites/0")
  assert storage.names("sites") == []
  storage.put("large", large := os.urandom(6 << 20))  # Not in parts.
  assert storage.get("large") == large


def test_a_file_is_created_once(storage):
  assert storage.create("journal/0", b"one")
  assert not storage.create("journal/0", b"two")
  assert storage.create("journal/0", b"one")  # As if the answer had been lost.
  assert storage.get("journal/0") == b"one"
  assert storage.names("journal") == ["0"]
  assert storage.create("journal/1", bytes(6 << 20))
  assert not storage.create("journal/1", b"two")


def test_of_many_that_create_a_file_at_once_one_succeeds(storage):
  with futures.ThreadPoolExecutor(8) as pool:
    for turn in range(5):
      make = lambda i, turn=turn: storage.create(f"journal/{turn}", b"%d" % i * 9999)
      made = [*pool.map(make, range(8))]
      assert sum(made) == 1
      assert storage.get(f"journal/{turn}") == b"%d" % made.index(True) * 9999


def test_threads_may_write_one_file_at_once(tmp_path):
  storage = Folder(tmp_path)
  with futures.ThreadPoolExecutor(8) as pool:
    for _ in pool.map(lambda i: storage.put("sites/0", b"%d" % i * 9999), range(100)):
      pass
  assert len(storage.get("sites/0")) in (9999, 2 * 9999)
  assert storage.names("sites") == ["0"]


@pytest.mark.parametrize("fault", ["lost before", "lost after", "twice"])
def test_a_request_that_is_lost_or_comes_twice_counts_once(s3, tmp_path, fault):
  storage = open_storage(f"s3://bucket/{tmp_path.name}", "--group")

  def write(call):
    for _ in range(9):
      try:
        return call()
      except OSError:  # The caller tries again.
        continue
    raise AssertionError("it never works")

  s3.faults[:] = [fault, fault]
  assert write(lambda: storage.create("journal/0", b"one"))
  assert not storage.create("journal/0", b"two")
  s3.faults[:] = [fault]
  write(lambda: storage.put("sites/0", b"three"))
  s3.faults.clear()
  assert storage.get("journal/0") == b"one"
  assert storage.get("sites/0") == b"three"


def test_an_answer_that_comes_late_is_that_of_the_one_who_wrote(s3, tmp_path):
  storage = open_storage(f"s3://bucket/{tmp_path.name}", "--group")
  s3.faults[:] = ["late"]
  s3.late.clear()
  s3.goes_on.clear()
  with futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(storage.create, "journal/0", b"one")
    assert s3.late.wait(60)
    assert not storage.create("journal/0", b"two")
    s3.goes_on.set()
    assert first.result(60)
  assert storage.get("journal/0") == b"one"


def test_a_request_without_an_answer_fails(s3, tmp_path, monkeypatch):
  monkeypatch.setattr(storage_lib, "_SILENT_S", 2)
  monkeypatch.setitem(storage_lib._TRIES, "max_retries", 0)
  storage = open_storage(f"s3://bucket/{tmp_path.name}", "--group")
  s3.faults[:] = ["late"]
  s3.goes_on.clear()
  with pytest.raises(OSError, match="journal/0"):
    storage.put("journal/0", b"one")
  s3.goes_on.set()


def test_of_closed_rounds_only_the_headers_are_copied(s3, tmp_path):
  address = f"s3://bucket/{tmp_path.name}"
  storage = open_storage(address, "--group")
  storage.put("journal/0.round", b"head\n" + bytes(2 << 20))
  storage.put("lease", b"one")
  copy = remote.local_copy(address, "GROUP")
  assert (copy / "journal/0.round").read_bytes() == b"head\n" + bytes((1 << 20) - 5)
  assert (copy / "lease").read_bytes() == b"one"


def test_a_large_upload_has_more_time_for_its_answer():
  store, seconds = obstore.store.MemoryStore(), []
  bucket = Bucket(lambda some: seconds.append(some) or store)
  for size in (1, 5, 6, 11, 12, 30):  # At 6 MB a minute.
    bucket.put("file", bytes(size * 1_000_000))
  assert seconds == [60, 120, 240, 480]


def test_what_killed_processes_left_is_deleted_when_it_is_old(tmp_path):
  (tmp_path / "sites").mkdir()
  old, new = tmp_path / "sites/0.cafe.tmp", tmp_path / "lease.1234.tmp"
  for path in (old, new, tmp_path / "mine"):
    path.write_bytes(b"half")
  for path in (old, tmp_path / "mine"):
    os.utime(path, (time.time() - 4000,) * 2)
  open_storage(str(tmp_path), "--group")
  found = {path.name for path in tmp_path.rglob("*") if path.is_file()}
  assert found == {new.name, "mine"}


def fails(number):
  def call(*_):
    raise OSError(number, os.strerror(number))

  return call


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a_folder_without_hard_links_is_refused(tmp_path, monkeypatch, number):
  monkeypatch.setattr(pathlib.Path, "hardlink_to", fails(number))
  with pytest.raises(ConfigError, match="give a folder with hard links, or a bucket"):
    open_storage(f"{tmp_path}/group", "--group")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EROFS, errno.ENOSPC])
def test_an_error_that_may_pass_is_no_mistake(tmp_path, monkeypatch, number):
  monkeypatch.setattr(pathlib.Path, "hardlink_to", fails(number))
  with pytest.raises(OSError, match=os.strerror(number)) as error:
    open_storage(f"{tmp_path}/group", "--group")
  assert not isinstance(error.value, ConfigError)


def test_a_server_that_is_away_is_no_mistake_of_the_user(monkeypatch):
  monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
  for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
    monkeypatch.setenv(name, "any")
  monkeypatch.setitem(storage_lib._TRIES, "max_retries", 0)
  with pytest.raises(OSError, match=r"127\.0\.0\.1:9") as error:
    open_storage("s3://bucket/run", "--group")
  assert "\n" not in str(error.value)


def test_a_machine_without_credentials_is_a_mistake_before_the_first_answer():
  bucket = Bucket(lambda seconds: obstore.store.MemoryStore())
  asks = "Error performing GET http://169.254.169.254/latest/api/token"

  def request():
    with bucket._request():
      raise obstore.exceptions.GenericError(asks)

  with pytest.raises(ConfigError, match="no credentials for the bucket; give them"):
    request()
  bucket.put("file", b"")
  with pytest.raises(OSError, match=r"169\.254"):
    request()


def test_a_bucket_that_lets_two_create_a_file_is_refused(tmp_path, monkeypatch):
  create = lambda self, name, data: self.put(name, data) or True
  monkeypatch.setattr(Bucket, "_create", create)
  with pytest.raises(ConfigError, match="two processes can create the same file"):
    open_storage(f"memory:///{tmp_path.name}", "--group")


@pytest.mark.parametrize(
  ("address", "said"),
  [
    ("/proc/nowhere", "'/proc/nowhere', where nothing can be written"),
    ("foo://bucket/a", "Unable to recognise URL"),
    ("s3://", "Unable to recognise URL"),
  ],
)
def test_an_address_that_cannot_work_is_one_sentence(address, said):
  with pytest.raises(ConfigError, match=said) as error:
    open_storage(address, "--group")
  assert "\n" not in str(error.value)
  assert str(error.value).startswith(f"--group is {address!r}")
