"""Checkpoints that cannot be read or belong to another config, in 1 or 2 processes."""

import contextlib
import dataclasses
import errno
import os
import queue
import shutil
import threading
import time
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from bare_method import open_checkpoints, state
from threads import at_once, connected

from diloco.algorithm.method import make_method
from diloco.checkpoint import damage, resume
from diloco.checkpoint.checkpoints import Checkpoints, Record
from diloco.config import add_plugins, changed, resolve
from diloco.errors import ConfigError, TryAgain
from diloco.mesh.devices import make_mesh
from diloco.processes.peers import Peers
from diloco.util import files


@pytest.fixture
def c(tiny):
  return resolve(tiny)


def save(workdir, c, steps):
  """Saves checkpoints of these steps; the parameters of each equal its step."""
  checkpoints = open_checkpoints(workdir, c)
  for step in steps:
    checkpoints.save(step, state(step), Record(c.to_dict()))
    checkpoints.wait()
  checkpoints.close()


def empty(workdir, step: int, part: str = "state") -> None:
  """Deletes the data of a checkpoint, as if it had not been written completely."""
  for file in (workdir / "checkpoints" / str(step) / part).rglob("*"):
    if file.is_file() and (part == "record" or "METADATA" not in file.name):
      file.unlink()


def names(folder) -> list[str]:
  return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("part", ["state", "record"])
def test_an_unreadable_checkpoint_is_moved_and_saved_again(c, tmp_path, capsys, part):
  save(tmp_path, c, [10, 12])
  for _ in range(2):  # The second time unreadable/12 exists already.
    empty(tmp_path, 12, part)
    checkpoints = open_checkpoints(tmp_path, c)
    restored = checkpoints.restore()
    assert (restored.step, restored.record.finished) == (10, False)
    np.testing.assert_array_equal(restored.arrays.params["w"], state(10).params["w"])
    assert checkpoints.latest == 10
    checkpoints.save(12, state(12), Record(c.to_dict()))
    checkpoints.wait()
    assert checkpoints.restore().arrays.params["w"][0, 0] == 12
    checkpoints.close()
  assert names(tmp_path / "checkpoints") == ["10", "12"]
  assert names(tmp_path / "unreadable") == ["12", "12.1"]
  assert f"to {tmp_path / 'unreadable' / '12.1'}." in capsys.readouterr().err


def test_a_run_does_not_start_again_if_no_checkpoint_can_be_read(c, tmp_path):
  save(tmp_path, c, [10, 12])
  empty(tmp_path, 10)
  empty(tmp_path, 12, "record")
  checkpoints = open_checkpoints(tmp_path, c)
  message = r"of steps 12, 10 cannot be read \(of step 12: No such file .*\); choose"
  with pytest.raises(ConfigError, match=message):
    checkpoints.restore()
  assert names(tmp_path / "checkpoints") == ["10", "12"]
  assert open_checkpoints(tmp_path / "new", c).restore() is None


def test_an_extended_run_knows_where_it_was_drained(c, tmp_path):
  c = changed(c, {"inner.decay_steps": 12, "train.steps": 12})
  old, ledger = changed(c, {"train.steps": 8}).to_dict(), {"latest": [10, 400]}
  record = Record(old, ledger=ledger, finished=True)
  with contextlib.closing(open_checkpoints(tmp_path, c)) as checkpoints:
    checkpoints.save(8, state(8), record)
    checkpoints.wait()
    restored = checkpoints.restore().record
  assert (restored.drained, restored.finished) == (8, False)
  # The bytes of the end are not added to those of the new step 10.
  assert restored.ledger["latest"] == [0, 0]


@pytest.mark.parametrize("of_earlier_version", [False, True])
def test_payloads_keep_the_fsdp_that_encoded_them(
  tiny, tmp_path, monkeypatch, of_earlier_version
):
  """Whatever the mesh has when they are saved."""
  tiny.overlap.tau = 2
  c = resolve(tiny)
  method = make_method(c, make_mesh(c))
  sent = sorted(method.sync.schedule.in_flight(5))
  like = method.abstract(5, dict.fromkeys(sent if of_earlier_version else sent[:1], 2))
  record = Record(c.to_dict(), fsdp=2 if of_earlier_version else 1)
  if of_earlier_version:
    to_json = Record.to_json
    old = lambda record: to_json(dataclasses.replace(record, in_flight=[]))
    monkeypatch.setattr(Record, "to_json", old)
  with contextlib.closing(Checkpoints(tmp_path, c, method)) as checkpoints:
    zeros = lambda x: jax.numpy.zeros(x.shape, x.dtype, device=x.sharding)
    checkpoints.save(5, jax.tree.map(zeros, like), record)
    checkpoints.wait()
    found = checkpoints.restore().arrays.outer.in_flight
  assert {p: found[p].payload.shape[1] for p in sent} == {
    p: like.outer.in_flight[p].payload.shape[1] for p in sent
  }


def test_a_lower_rate_is_noted_and_allowed_before_the_step_that_diverged(c, tmp_path):
  save(tmp_path, c, [10])
  lower = changed(c, {"outer.learning_rate": 0.1})
  files.write_json(tmp_path / resume.DIVERGED, {"step": 11})
  with contextlib.closing(open_checkpoints(tmp_path, lower)) as checkpoints:
    said = "The run diverged; it goes on with outer.learning_rate: 0.4 -> 0.1."
    assert checkpoints.restore().record.mixtures == [said]
    files.write_json(tmp_path / resume.DIVERGED, {"step": 10})  # It was overcome.
    with pytest.raises(ConfigError, match="made with another config"):
      checkpoints.restore()


def test_a_step_that_cannot_be_saved_is_an_error(c, tmp_path):
  save(tmp_path, c, [12])
  checkpoints = open_checkpoints(tmp_path, c)
  message = "step 11 cannot be saved since a checkpoint of step 12 is there"
  with pytest.raises(ConfigError, match=message):
    checkpoints.save(11, state(11), Record(c.to_dict()))


def test_nothing_is_written_where_there_is_no_room(c, tmp_path, monkeypatch):
  save(tmp_path, c, [10])
  checkpoints = open_checkpoints(tmp_path, c)
  with monkeypatch.context() as patch:
    full = types.SimpleNamespace(total=10**12, free=100)
    patch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(TryAgain, match=r"it needs 0\.0 MB and 0\.0 MB are free"):
      checkpoints.save(12, state(12), Record(c.to_dict()))
  assert names(tmp_path / "checkpoints") == ["10"]
  checkpoints.save(12, state(12), Record(c.to_dict()))
  checkpoints.close()
  assert open_checkpoints(tmp_path, c).restore().step == 12


def test_a_clock_set_forward_during_a_save_changes_nothing(c, tmp_path, monkeypatch):
  clock, write, ahead = time.time, ocp.JsonCheckpointHandler._save_fn, []
  monkeypatch.setattr(time, "time", lambda: clock() + sum(ahead))

  async def set_forward(*args):
    await write(*args)
    ahead.append(3 * 24 * 3600)  # A laptop wakes up after days.
    time.sleep(0.3)  # Orbax looks at the clock every 0.1 s.

  monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", set_forward)
  save(tmp_path, c, [10, 12])
  assert len(ahead) == 2
  assert open_checkpoints(tmp_path, c).restore().step == 12


def test_a_save_that_times_out_leaves_it_to_the_next(c, tmp_path, monkeypatch, capsys):
  finalize, saves = ocp.PyTreeCheckpointHandler.finalize, []

  def late_once(handler, directory):
    saves.append(directory)
    if len(saves) == 1:
      raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    finalize(handler, directory)

  monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", late_once)
  checkpoints = open_checkpoints(tmp_path, c)
  checkpoints.save(10, state(10), Record(c.to_dict()))
  checkpoints.save(12, state(12), Record(c.to_dict()))
  checkpoints.close()
  said = "Saving step 10 timed out; saves step 12 in its place."
  assert said in capsys.readouterr().err
  assert names(tmp_path / "checkpoints") == ["12"]
  assert open_checkpoints(tmp_path, c).restore().step == 12


def test_too_many_open_files_are_no_damage(c, tmp_path, monkeypatch):
  save(tmp_path, c, [10, 12])

  def refused(*args):
    raise ValueError(f"Error opening file [os_error_code='{errno.EMFILE}' ...]")

  checkpoints = open_checkpoints(tmp_path, c)
  with monkeypatch.context() as patch:
    patch.setattr(damage, "read_arrays", refused)
    with pytest.raises(ValueError, match="os_error_code"):
      checkpoints.restore()
  assert names(tmp_path / "checkpoints") == ["10", "12"]
  assert checkpoints.restore().step == 12


@pytest.fixture
def full_disk(monkeypatch):
  """Lets Orbax's thread fail at the end of a save, when the arrays are written."""

  def fail(handler, directory):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", fail)


def test_an_error_of_the_saving_thread_is_told_once(c, tmp_path, full_disk, capfd):
  checkpoints = open_checkpoints(tmp_path, c)
  checkpoints.save(10, state(10), Record(c.to_dict()))
  with pytest.raises(TryAgain, match=r"step 10 cannot be written .* from the start"):
    checkpoints.close()
  checkpoints = open_checkpoints(tmp_path, c)
  assert checkpoints.restore() is None
  checkpoints.save(12, state(12), Record(c.to_dict()))
  with pytest.raises(TryAgain, match=r"step 12 cannot be written \(No space left"):
    checkpoints.save(14, state(14), Record(c.to_dict()))
  checkpoints.close()
  assert names(tmp_path / "checkpoints") == []
  assert capfd.readouterr().err == ""


def test_close_does_not_tell_the_error_again(c, tmp_path, full_disk, monkeypatch):
  def close(manager):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  # Orbax does so, now and then, after an error in the JSON record.
  monkeypatch.setattr(ocp.CheckpointManager, "close", close)
  with pytest.raises(OSError, match="No space left"):
    open_checkpoints(tmp_path, c).close()
  checkpoints = open_checkpoints(tmp_path, c)
  checkpoints.save(12, state(12), Record(c.to_dict()))
  with pytest.raises(TryAgain, match="step 12 cannot be written"):
    checkpoints.wait()
  checkpoints.close()
  assert names(tmp_path / "checkpoints") == []


class Pair(Peers):
  """The first of two processes; the other never answers. `told` is what it reports."""

  def __init__(self, is_lost: bool):
    super().__init__(0, 2)
    self.is_lost, self.told = is_lost, queue.Queue()

  def all_gather(self, value):
    return [value]

  def await_loss(self):
    if self.is_lost:
      self.told.put(("process 1 of 2 is gone", 1))
      raise SystemExit(1)  # The class itself ends the process.

  def fail(self, message, code=1):
    self.told.put((message, code))


def test_processes_end_at_once_when_one_cannot_write(c, tmp_path, full_disk):
  pair = Pair(is_lost=False)
  checkpoints = open_checkpoints(tmp_path, c, pair)
  checkpoints.save(12, state(12), Record(c.to_dict()))
  message, code = pair.told.get(timeout=60)  # Nobody called `wait` or `save`.
  assert "step 12 cannot be written (No space left on device)" in message
  assert code == 1


def test_a_lost_process_is_named_where_a_save_fails_for_it(c, tmp_path, monkeypatch):
  def fail(*args, **kwargs):
    raise RuntimeError("UNAVAILABLE: the other process did not come to a barrier")

  monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
  pair = Pair(is_lost=True)
  checkpoints = open_checkpoints(tmp_path, c, pair)
  with pytest.raises(SystemExit):
    checkpoints.save(12, state(12), Record(c.to_dict()))
  assert pair.told.get(timeout=60) == ("process 1 of 2 is gone", 1)
  assert pair.told.empty()  # Nobody is told to make room on the disk.


def test_a_part_that_a_kill_left_is_removed(c, tmp_path):
  save(tmp_path, c, [10])
  part = tmp_path / "checkpoints" / "12.orbax-checkpoint-tmp"
  shutil.copytree(tmp_path / "checkpoints" / "10", part)
  checkpoints = open_checkpoints(tmp_path, c)
  assert checkpoints.restore().step == 10
  checkpoints.save(14, state(14), Record(c.to_dict()))
  checkpoints.close()
  assert names(tmp_path / "checkpoints") == ["10", "14"]


def restore_as_two(workdir, c) -> list:
  """What each of two processes restores or raises; the processes are threads."""
  peers = connected(2)

  def restore(p: int):
    checkpoints = open_checkpoints(workdir, c, peers[p])
    try:
      return checkpoints.restore()
    except ConfigError as error:
      return error
    finally:
      peers[p].close()

  found = at_once(restore, range(2))
  return [found[0], found[1]]


def test_two_processes_skip_a_checkpoint_that_neither_can_read(c, tmp_path):
  save(tmp_path, c, [10, 12])
  empty(tmp_path, 12)
  found = restore_as_two(tmp_path, c)
  assert [x.step for x in found] == [10, 10]
  assert names(tmp_path / "unreadable") == ["12"]


def test_two_processes_skip_what_one_reads_wrongly(c, tmp_path, monkeypatch, capsys):
  save(tmp_path, c, [10, 12])
  read = damage.read_arrays

  def misread(workdir, step, like):
    arrays = read(workdir, step, like)
    if threading.current_thread().name == "process 1" and step == 12:
      arrays["params"]["w"] = -arrays["params"]["w"]
    return arrays

  monkeypatch.setattr(damage, "read_arrays", misread)
  found = restore_as_two(tmp_path, c)
  assert [x.step for x in found] == [10, 10]
  said = "values of params/w are not those that were saved"
  assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize("part", ["read_arrays", "read_record"])
@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_what_one_process_cannot_read_ends_all_if_it_sees_other_files(
  c, tmp_path, monkeypatch, part, is_elsewhere
):
  """Damage of a part that only one process reads is damage, as any other."""
  save(tmp_path, c, [10, 12])
  read, files = getattr(damage, part), damage._files
  is_one = lambda: threading.current_thread().name == "process 1"

  def fail_in_one(workdir, step, *more):
    if is_one() and step == 12:
      raise OSError("stale file handle\nmore")
    return read(workdir, step, *more)

  seen = lambda folder: files(tmp_path if is_one() and is_elsewhere else folder)
  monkeypatch.setattr(damage, part, fail_in_one)
  monkeypatch.setattr(damage, "_files", seen)
  found = restore_as_two(tmp_path, c)
  if not is_elsewhere:
    assert [x.step for x in found] == [10, 10]
    return
  for error in found:
    assert isinstance(error, ConfigError)
    assert "step 12 process 1 cannot read (stale file handle) while" in str(error)
    assert "see that it is the same folder on all machines" in str(error)
  assert names(tmp_path / "checkpoints") == ["10", "12"]


FP32 = {"wire.format": "fp32"}


@pytest.mark.parametrize(
  ("fields", "before", "warns"),
  [
    ({}, 4, True),
    ({}, 2, False),
    ({"wire.format": "bf16"}, 4, False),
    ({"wire.format": "bf16", "wire.compressor": "topk"}, 4, True),
    ({"algorithm": "data_parallel"}, 4, False),
    ({"overlap.transport": "sites"}, 4, False),
    (FP32 | {"sparta.share": 0.1}, 4, True),
    (FP32 | {"des_loc.first_every": 4}, 4, False),
    (FP32 | {"des_loc.first_every": 4, "des_loc.format": "e3m0"}, 4, True),
  ],
)
def test_going_on_with_other_shards_is_told(tiny, monkeypatch, fields, before, warns):
  said = []
  monkeypatch.setattr(resume.logging, "warning", said.append)
  add_plugins(tiny, "sparta", "des_loc")
  tiny.update_from_flattened_dict(fields)
  resume.warn_of_other_shards(resolve(tiny), before, 2)
  assert [text[:25] for text in said] == ["mesh.fsdp was 4 and is 2:"] * warns
