"""Room on the disk is asked for; what cannot be written says why."""

import errno
import os
import shutil
import types

import jax
import pytest

from diloco.checkpoint import disk
from diloco.errors import ConfigError, TryAgain
from diloco.spec.fields import CheckpointConfig


def fill(monkeypatch, free: int, total: int = 10**12):
  usage = types.SimpleNamespace(total=total, free=free)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_a_checkpoint_needs_its_values_and_little_more():
  tree = {"a": jax.numpy.zeros((1000, 1000)), "b": jax.numpy.zeros(4, "bfloat16")}
  assert 4_000_008 < disk.needed(tree) < 4_010_000


def test_a_disk_without_room_is_explained_in_one_sentence(tmp_path, monkeypatch):
  fill(monkeypatch, free=1_300_000_000)
  disk.check(tmp_path, 40, 1_300_000_000)
  with pytest.raises(TryAgain) as error:
    disk.check(tmp_path, 40, 5_200_000_000)
  sentence = (
    f"--workdir is {tmp_path}, where the checkpoint of step 40 cannot be written (No"
    " space left on device): it needs 5.2 GB and 1.3 GB are free; make room or raise"
    " the quota, then the same command goes on from the start."
  )
  assert str(error.value) == sentence
  (tmp_path / "checkpoints" / "30").mkdir(parents=True)
  (tmp_path / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir()
  with pytest.raises(TryAgain, match=r"goes on from the checkpoint of step 30\.$"):
    disk.check(tmp_path, 40, 5_200_000_000)


def test_a_file_system_that_does_not_tell_its_size_is_tried(tmp_path, monkeypatch):
  fill(monkeypatch, free=0, total=0)
  disk.check(tmp_path, 40, 10**9)


@pytest.mark.parametrize(
  ("error", "kind", "rest"),
  [
    (PermissionError(errno.EACCES, "Permission denied", "/"), ConfigError, "mend"),
    (OSError(errno.ESTALE, os.strerror(errno.ESTALE)), TryAgain, "the same command"),
    (ValueError("no [os_error_code='27' ...]"), ConfigError, "mend this, then"),
    (TimeoutError("0 of 2 futures"), TryAgain, "the same command"),
    (RuntimeError("UNAVAILABLE"), TryAgain, "the same command"),
  ],
)
def test_the_cause_is_named_and_room_only_if_it_lacks(tmp_path, error, kind, rest):
  found = disk.unwritten(tmp_path, 40, 10**9, error)
  assert type(found) is kind
  assert f"cannot be written ({disk.reason_of(error)}); {rest}" in str(found)
  assert "room" not in str(found)


@pytest.mark.parametrize(
  ("every", "there", "most"), [(0, 0, 1), (60, 0, 2), (10, 0, 3), (10, 2, 1)]
)
def test_a_run_starts_if_its_checkpoints_fit(tmp_path, monkeypatch, every, there, most):
  c = CheckpointConfig(every=every, keep=2)
  for step in range(there):
    (tmp_path / "run" / "checkpoints" / str(step)).mkdir(parents=True)
  fill(monkeypatch, free=most * 10**9)
  disk.check_room(tmp_path / "run", 10**9, c, steps=100)
  fill(monkeypatch, free=most * 10**9 - 1)
  sentence = rf"{most} more checkpoints of 1\.0 GB will be there at once; .*\.keep\.$"
  with pytest.raises(TryAgain, match=sentence):
    disk.check_room(tmp_path / "run", 10**9, c, steps=100)
