"""Runs whose folder is in a bucket, against a server that answers over HTTP."""

import logging
import signal
import subprocess
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import running
import tensorstore
import tiny_config
from conftest import first_of, records

from diloco import train
from diloco.checkpoint import bucket as bucket_lib
from diloco.checkpoint import checksums
from diloco.checkpoint.bucket import BucketManager, read_arrays
from diloco.checkpoint.record import steps_of
from diloco.cli import compare, evaluate, export, status
from diloco.errors import ConfigError
from diloco.interop import load
from diloco.processes.peers import Peers
from diloco.util import files, remote

pytest.importorskip("moto.server")
pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def server(s3):
  logging.getLogger("werkzeug").setLevel(logging.ERROR)  # A line for each request.
  return s3


@pytest.fixture(params=["s3", "gs"])
def address(request, server, tmp_path):
  server.on_put = lambda path: None
  return f"{request.param}://bucket/{tmp_path.name}"


def args(tree, step=0):
  record = ocp.args.JsonSave({"step": step})
  return ocp.args.Composite(state=ocp.args.PyTreeSave(tree), record=record)


def manager(address, keep=1):
  folder = remote.local_copy(address, "--workdir", writes=True)
  return BucketManager(folder, keep, Peers()), folder


def arrays():
  key = jax.random.key(0)
  return {
    "matrix": jax.random.normal(key, (6, 4, 10)).astype("bfloat16"),
    "list": [jax.numpy.arange(7, dtype="uint8"), jax.numpy.float32(3.5)],
    "none": jax.numpy.zeros((0, 3)),
  }


def test_a_checkpoint_is_read_as_it_was_saved(address, monkeypatch):
  monkeypatch.setattr(bucket_lib, "_CHUNK", 40)  # The matrix has 12 chunks.
  tree = arrays()
  saver, folder = manager(address, keep=2)
  (folder / "runs").mkdir()
  (folder / "runs" / "note.txt").write_text("one")
  for step in (1, 2, 3):
    assert saver.save(step, args(tree))
    saver.wait_until_finished()
  assert not saver.save(2, args(tree))
  assert (saver.latest_step(), steps_of(folder)) == (3, [3, 2])
  found = read_arrays(folder, 3, tree)
  for name, x in checksums.named(tree).items():
    read = checksums.named(found)[name]
    assert read.dtype == x.dtype
    np.testing.assert_array_equal(read, x)
  inside = remote.bucket_of(folder).names("checkpoints/3/matrix")
  assert len(inside) == 13
  with pytest.raises(ValueError, match="shape"):
    read_arrays(folder, 3, {"matrix": tree["list"][0]})
  with pytest.raises(ValueError, match=r"other/.zarray is missing"):
    read_arrays(folder, 3, {"other": tree["list"][0]})
  saver.set_aside(3, "3")
  assert steps_of(folder) == [2]
  assert "3.json" in remote.bucket_of(folder).names("unreadable/3")
  # A copy elsewhere has the small files only, also those of a group of sites.
  large = ["snapshots/000000004.state", "payloads/000000004.site-0"]
  for name in [*large, "snapshots/000000004.head"]:
    remote.bucket_of(folder).put(name, b"of a group")
  copy = remote.local_copy(address, "it")
  assert (copy / "runs" / "note.txt").read_text() == "one"
  assert (copy / "snapshots/000000004.head").exists()
  assert not any((copy / name).exists() for name in large)
  saver.close()


def test_other_programs_read_the_arrays(address, tmp_path):
  saver, folder = manager(address)
  saver.save(1, args(arrays()))
  saver.close()
  bucket = remote.bucket_of(folder)
  for name in bucket.names("checkpoints/1/matrix"):
    (tmp_path / name).write_bytes(bucket.get(f"checkpoints/1/matrix/{name}"))
  kept = {"driver": "file", "path": f"{tmp_path}/"}
  read = tensorstore.open({"driver": "zarr", "kvstore": kept}).result()
  np.testing.assert_array_equal(read.read().result(), arrays()["matrix"])


def test_a_half_written_checkpoint_is_none(address, monkeypatch):
  saver, folder = manager(address)
  saver.save(1, args(arrays()))
  saver.wait_until_finished()
  put = saver._bucket.put

  def fail(name, data):
    if name.endswith("2/list/1/0"):
      raise ConnectionResetError("lost")
    put(name, data)

  monkeypatch.setattr(saver._bucket, "put", fail)
  saver.save(2, args(arrays()))
  with pytest.raises(ConnectionResetError):
    saver.wait_until_finished()
  assert steps_of(folder) == [1]
  assert remote.bucket_of(folder).names("checkpoints/2")
  again, folder = manager(address)  # The next start deletes the parts.
  assert again.latest_step() == 1
  assert not remote.bucket_of(folder).names("checkpoints/2")


def test_what_another_process_writes_already_stays_until_the_next_start(address):
  saver, folder = manager(address)
  ahead = "checkpoints/5/list/1/0"
  remote.bucket_of(folder).put(ahead, b"of process 1")
  for step in (2, 3):
    saver.save(step, args(arrays()))
    saver.wait_until_finished()
  bucket = remote.bucket_of(folder)
  assert bucket.get(ahead) == b"of process 1"
  assert not bucket.names("checkpoints/2")
  again, folder = manager(address)
  assert again.latest_step() == 3
  assert bucket.get(ahead) is None


def test_a_lower_keep_deletes_only_when_a_newer_checkpoint_is_whole(address):
  saver, folder = manager(address, keep=2)
  for step in (1, 2):
    saver.save(step, args(arrays()))
    saver.wait_until_finished()
  again, _ = manager(address, keep=1)
  assert steps_of(folder) == [2, 1]  # Step 2 may turn out to be damaged.
  again.save(3, args(arrays()))
  again.wait_until_finished()
  assert steps_of(folder) == [3]
  assert not remote.bucket_of(folder).names("checkpoints/1")


def test_the_run_that_starts_last_has_the_folder(address):
  first, folder = manager(address)
  manager(address)
  first.save(1, args(arrays()))
  with pytest.raises(ConfigError, match="has started to train; this run ends"):
    first.wait_until_finished()
  bucket = remote.bucket_of(folder)
  assert not [name for name in bucket.listed() if name.startswith("checkpoints/1/")]


@pytest.mark.parametrize("place", ["gs://bucket/../x", "file:///x", "s3://"])
def test_what_is_no_folder_of_a_bucket_is_refused(place):
  with pytest.raises(ConfigError, match="give one such as s3://BUCKET/RUN"):
    remote.local_copy(place, "--workdir")


def test_a_bucket_that_is_not_there_is_refused(server, tiny):
  with pytest.raises((ConfigError, OSError), match="nowhere"):
    train.train(tiny, "s3://nowhere/run")


CONFIG = f"--config={running.ROOT / 'tests' / 'tiny_config.py'}"


def start(address, *more):
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
  words = ["-m", "diloco.main", f"--workdir={address}", CONFIG, *more]
  return running.start(*words, **pipes)


# With half of the first checkpoint written, with all of the second one but its record,
# and between the last checkpoint and the summary.
MOMENTS = ["/4/theta/1/", "/8.json", "/killed/summary.json"]


@pytest.mark.parametrize("moments", first_of("kills a run", MOMENTS[1:2], MOMENTS))
def test_killed_and_resumed_bit_for_bit(server, tmp_path, capsys, moments):
  address, whole = f"s3://bucket/{tmp_path.name}/killed", tmp_path / "whole"
  for moment in moments:
    process = start(address, "--config.checkpoint.every=4")

    def kill(path, process=process, moment=moment):
      if moment in path:
        process.send_signal(signal.SIGKILL)
        raise OSError

    server.on_put = kill
    out, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, out
  server.on_put = lambda path: None
  c = tiny_config.get_config()
  c.checkpoint.every = 4
  train.train(c, address)
  assert f"{address}/summary.json" in capsys.readouterr().out
  train.train(c, whole)

  copy = remote.local_copy(address, "it")
  for kind in ("step", "send", "receive"):
    assert records(copy, kind) == records(whole, kind)
  losses = [files.read_json(f / "summary.json")["eval_loss"] for f in (copy, whole)]
  assert losses[0] == losses[1]
  ours, theirs = load.load(address), load.load(whole)
  jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
  reads_it(address, whole, tmp_path)


def reads_it(address, whole, tmp_path):
  """All commands that read a run read it from the bucket."""
  shown = running.shown(status.main, address)
  assert address in shown
  assert "finished" in shown
  assert status.main([address.rpartition("/")[0]]) == 0
  assert f"{address}/compare.png" in running.shown(compare.main, address, whole)
  out = tmp_path / "export"
  assert export.main([address, f"--output={out}"]) == 0
  assert (out / "model.safetensors").is_file()
  assert evaluate.main([address, "--heldout"]) == 0
  names = remote.bucket_of(remote.local_copy(address, "it")).listed()
  assert {"compare.png", "evaluation_12.json"} <= {*names}


def test_the_summary_comes_after_the_last_checkpoint(server, tmp_path):
  written = list[str]()

  def put(path):
    if "/12/" in path:
      time.sleep(0.2)
    written.append(path)

  server.on_put = put
  train.train(tiny_config.get_config(), f"s3://bucket/{tmp_path.name}")
  server.on_put = lambda path: None
  ends = [path.rpartition("/")[2] for path in written]
  assert ends.index("12.json") < ends.index("summary.json")


@pytest.mark.slow("runs of several processes")
def test_processes_share_nothing_but_the_bucket(server, tmp_path):
  """Two processes with two devices each save; a single one goes on."""
  address = f"s3://bucket/{tmp_path.name}"
  launch = ["-m", "diloco", "launch_local", "-n2", "--devices=2", "--", CONFIG]
  more = ["--config.checkpoint.every=4", "--config.train.steps=12"]
  ran = running.python(*launch, f"--workdir={address}", *more, timeout=600)
  assert ran.returncode == 0, ran.stdout + ran.stderr
  assert files.read_json(remote.local_copy(address, "it") / "summary.json")
  longer = ("--config.train.steps=16", "--config.inner.decay_steps=12")
  process = start(address, *more[:1], *longer)
  out, _ = process.communicate(timeout=300)
  assert process.returncode == 0, out
  assert "Extends the run from 12 to 16 steps" in out
