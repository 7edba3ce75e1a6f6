"""Checkpoints of another config or that cannot be read, by one process or several."""

import json
import socket
import threading

import conftest
import jax
import numpy as np
import pytest

from diloco import config as config_lib
from diloco.algorithm.state import TrainState
from diloco.run import checkpoint
from diloco.run import processes as distributed

RECORD = {"finished": False}


@pytest.fixture
def c(tiny):
  return config_lib.resolve(tiny)


def state(value: float) -> TrainState:
  return TrainState(
    {"w": jax.numpy.full((2, 3), value)}, {"n": jax.numpy.int32(1)}, None
  )


def like(step, record) -> TrainState:
  del step, record
  return state(0)


def save(workdir, c, steps):
  """Checkpoints of these steps, whose parameters are the step."""
  checkpoints = checkpoint.Checkpoints(workdir, c)
  for step in steps:
    checkpoints.save(step, state(step), RECORD)
    checkpoints.wait()
  checkpoints.close()


def damage(workdir, step: int, part: str = "state") -> None:
  """Takes the data out of a checkpoint, as if it had not all been written."""
  for file in (workdir / "checkpoints" / str(step) / part).rglob("*"):
    if file.is_file() and (part == "record" or "METADATA" not in file.name):
      file.unlink()


def names(folder) -> list[str]:
  return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("part", ["state", "record"])
def test_what_was_passed_over_is_moved_and_its_step_saved_again(
  c, tmp_path, capsys, part
):
  save(tmp_path, c, [10, 12])
  for _ in range(2):  # The second time its place is taken.
    damage(tmp_path, 12, part)
    checkpoints = checkpoint.Checkpoints(tmp_path, c)
    restored = checkpoints.restore(like)
    assert (restored.step, restored.record["finished"]) == (10, False)
    np.testing.assert_array_equal(restored.state.params["w"], np.full((2, 3), 10.0))
    assert checkpoints.latest == 10
    checkpoints.save(12, state(12), RECORD)
    checkpoints.wait()
    assert checkpoints.restore(like).state.params["w"][0, 0] == 12
    checkpoints.close()
  assert names(tmp_path / "checkpoints") == ["10", "12"]
  assert names(tmp_path / "unreadable") == ["12", "12.1"]
  assert f"to {tmp_path / 'unreadable' / '12.1'}." in capsys.readouterr().err


def test_checkpoints_of_which_none_can_be_read_are_no_fresh_start(c, tmp_path):
  save(tmp_path, c, [10, 12])
  damage(tmp_path, 10)
  damage(tmp_path, 12, "record")
  checkpoints = checkpoint.Checkpoints(tmp_path, c)
  message = r"\(steps 12, 10\) cannot be read; choose another --workdir, or move"
  with pytest.raises(config_lib.ConfigError, match=message):
    checkpoints.restore(like)
  assert names(tmp_path / "checkpoints") == ["10", "12"]
  assert checkpoint.Checkpoints(tmp_path / "new", c).restore(like) is None


def test_what_is_not_saved_is_an_error(c, tmp_path):
  save(tmp_path, c, [12])
  checkpoints = checkpoint.Checkpoints(tmp_path, c)
  message = "step 11 cannot be saved since a checkpoint of step 12 is there"
  with pytest.raises(config_lib.ConfigError, match=message):
    checkpoints.save(11, state(11), RECORD)


def test_a_run_goes_on_after_an_upgrade_that_adds_a_field(tiny, c, tmp_path):
  save(tmp_path, c, [10])
  file = tmp_path / "checkpoints" / "10" / "record" / "metadata"
  record = json.loads(file.read_text())
  del record["config"]["outer"]["fedpart"]
  file.write_text(json.dumps(record))
  assert checkpoint.Checkpoints(tmp_path, c).restore(like).step == 10
  tiny.outer.fedpart = True  # What the old version did not know, it did not do.
  other = checkpoint.Checkpoints(tmp_path, config_lib.resolve(tiny))
  with pytest.raises(config_lib.ConfigError, match=r"outer.fedpart: False -> True\)"):
    other.restore(like)


def restore_as_two(workdir, c, read) -> list:
  """What each of two processes restores or raises; read(p, checkpoints) patches it."""
  ends = socket.socketpair()
  peers = [distributed.Peers(p, 2, {1 - p: ends[p]}) for p in range(2)]
  found = [None, None]

  def restore(p: int) -> None:
    checkpoints = checkpoint.Checkpoints(workdir, c, peers[p])
    read(p, checkpoints)
    try:
      found[p] = checkpoints.restore(like)
    except config_lib.ConfigError as error:
      found[p] = error

  threads = [threading.Thread(target=restore, args=(p,), daemon=True) for p in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  for p in peers:
    p._closing = True  # Or the end of the sockets would end this process.
  for end in ends:
    end.shutdown(socket.SHUT_RDWR)
  return found


def test_two_processes_pass_over_what_neither_can_read(c, tmp_path):
  save(tmp_path, c, [10, 12])
  damage(tmp_path, 12)
  found = restore_as_two(tmp_path, c, lambda p, checkpoints: None)
  assert [x.step for x in found] == [10, 10]
  assert names(tmp_path / "unreadable") == ["12"]


@pytest.mark.parametrize("part", ["_read_state", "_read_record"])
def test_what_one_process_alone_cannot_read_ends_all(c, tmp_path, part):
  save(tmp_path, c, [10, 12])

  def fail(*args):
    raise OSError("stale file handle\nmore")

  def read(p, checkpoints):
    if p == 1:
      setattr(checkpoints, part, fail)

  found = restore_as_two(tmp_path, c, read)
  for error in found:
    assert isinstance(error, config_lib.ConfigError)
    assert "step 12 process 1 cannot read (stale file handle) while" in str(error)
    assert "see that it is the same folder on all machines" in str(error)
  assert names(tmp_path / "checkpoints") == ["10", "12"]


def saved(c) -> dict:
  return json.loads(json.dumps(config_lib.resolve(c).to_dict()))


def test_fields_that_the_runs_code_did_not_have_count_as_their_defaults():
  c = conftest.tiny_config()
  old = saved(c)
  del old["outer"]["fedpart"]
  checkpoint.check_same_config(old, config_lib.resolve(c), step=3)
  c.outer.fedpart = True
  with pytest.raises(config_lib.ConfigError, match=r"outer.fedpart: False -> True"):
    checkpoint.check_same_config(old, config_lib.resolve(c), step=3)


def test_a_field_that_is_gone_is_a_difference():
  c = conftest.tiny_config()
  old = saved(c)
  old["outer"]["warp"] = 2
  with pytest.raises(config_lib.ConfigError, match=r"outer.warp: 2 -> '.absent.'"):
    checkpoint.check_same_config(old, config_lib.resolve(c), step=3)
