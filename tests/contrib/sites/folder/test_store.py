"""Files in folders and buckets: whole or not there, and created once."""

import errno
import pathlib
import uuid
from concurrent import futures

import pytest
import wreck

from diloco.contrib.sites.folder.store import Folder, open_store, pack, unpack
from diloco.errors import ConfigError


@pytest.fixture(params=["a disk", "no links", "a bucket", "an old bucket"])
def store(request, tmp_path, monkeypatch):
  if "bucket" in request.param:
    if request.param == "an old bucket":
      from fsspec.implementations.memory import MemoryFileSystem

      put = MemoryFileSystem.pipe_file
      old = lambda self, path, value, mode=None, **_: put(self, path, value)
      monkeypatch.setattr(MemoryFileSystem, "pipe_file", old)
    return open_store(f"memory://{uuid.uuid4().hex}/group")
  if request.param == "no links":
    monkeypatch.setattr(pathlib.Path, "hardlink_to", no_links)
  return open_store(f"{tmp_path}/group")


def no_links(*_):
  raise OSError(errno.EPERM, "Operation not permitted")


def test_files_are_written_read_listed_and_deleted(store):
  assert store.get("sites/0") is None
  store.put("sites/0", b"one")
  store.put("sites/0", b"two")
  assert store.get("sites/0") == b"two"
  assert store.names("sites") == ["0"]  # No trace of what `open_store` has tried.
  store.delete("sites/0")
  store.delete("sites/0")
  assert store.names("sites") == []


def test_a_file_is_created_once(store, request):
  weak = request.node.callspec.params["store"] in ("no links", "an old bucket")
  assert store.is_exclusive == (not weak)
  assert store.create("journal/0", b"one")
  assert not store.create("journal/0", b"two")
  assert store.get("journal/0") == b"one"
  assert store.names("journal") == ["0"]


def test_of_many_that_create_a_file_at_once_one_succeeds(tmp_path):
  stores = [Folder(tmp_path) for _ in range(8)]
  with futures.ThreadPoolExecutor(8) as pool:
    for turn in range(20):
      make = lambda i, turn=turn: stores[i].create(f"journal/{turn}", b"%d" % i * 9999)
      made = [*pool.map(make, range(8))]
      assert sum(made) == 1
      assert stores[0].get(f"journal/{turn}") == b"%d" % made.index(True) * 9999


def test_threads_of_a_process_may_write_one_file_at_once(tmp_path):
  store = Folder(tmp_path)
  with futures.ThreadPoolExecutor(8) as pool:
    for _ in pool.map(lambda i: store.put("sites/0", b"%d" % i * 9999), range(100)):
      pass
  assert len(store.get("sites/0")) in (9999, 2 * 9999)
  assert store.names("sites") == ["0"]


def test_a_lost_answer_of_nfs_does_not_count_as_a_rival(tmp_path, monkeypatch):
  link = pathlib.Path.hardlink_to

  def linked_twice(path, target):
    link(path, target)
    link(path, target)

  monkeypatch.setattr(pathlib.Path, "hardlink_to", linked_twice)
  assert Folder(tmp_path).create("journal/0", b"one")


def test_any_part_of_a_file_counts_as_no_file(tmp_path):
  store = Folder(tmp_path)
  data = pack({"round": 3}, b"ab\n", b"c\x00")
  for end in range(len(data)):
    (tmp_path / "journal/0").write_bytes(data[:end])
    assert store.read("journal/0") is None
  (tmp_path / "journal/0").write_bytes(data)
  head, body = store.read("journal/0")
  assert (head, bytes(body)) == ({"round": 3}, b"ab\nc\x00")


def test_every_damage_is_found(tmp_path):
  path, data = tmp_path / "own", pack({"a": [1]}, bytes(range(256)))
  path.write_bytes(data)
  for name, harm in wreck.all_of(tmp_path, flips=100):
    path.write_bytes(data)
    harm(tmp_path)
    print(name)
    assert not path.exists() or unpack(path.read_bytes()) is None


@pytest.mark.parametrize(
  ("address", "said"),
  [
    ("/proc/nowhere", "'/proc/nowhere', where nothing can be written"),
    ("foo://bucket/a", "Protocol not known: foo"),
    ("gs://bucket/a", "gcsfs"),
    ("s3://bucket/a", "s3fs"),
  ],
)
def test_an_address_that_cannot_work_is_one_sentence(address, said):
  with pytest.raises(ConfigError, match=said) as error:
    open_store(address)
  assert "\n" not in str(error.value)
  assert str(error.value).startswith("--coordinator is ")
