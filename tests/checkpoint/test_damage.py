"""Damaged files: whoever reads a checkpoint gets what was saved, or an older one."""

import itertools
import shutil

import jax
import numpy as np
import pytest
import wreck
from bare_method import open_checkpoints, state

from diloco.checkpoint import checkpoints as checkpoint
from diloco.checkpoint import damage
from diloco.checkpoint.record import Record, steps_of
from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.interop import load


def bits(tree) -> list[bytes]:
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture
def c(tiny):
  return resolve(tiny)


@pytest.fixture
def saved(c, tmp_path):
  """A run's folder with the checkpoints of steps 10 and 12."""
  checkpoints = open_checkpoints(tmp_path / "saved", c)
  for step in (10, 12):
    checkpoints.save(step, state(step), Record(c.to_dict(), data={"0": [step]}))
  checkpoints.close()
  return tmp_path / "saved"


# Orbax forgets a coroutine when it cannot read a part of an array.
@pytest.mark.integration("restores dozens of damaged checkpoints")
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_no_damage_of_any_file_changes_a_run_or_stops_it(saved, c, tmp_path):
  newest, found = saved / "checkpoints" / "12", {10: 0, 12: 0}
  for number, (name, harm) in enumerate(wreck.all_of(newest, flips=8)):
    workdir = tmp_path / str(number)
    shutil.copytree(saved, workdir)
    harm(workdir / "checkpoints" / "12")
    checkpoints = open_checkpoints(workdir, c)
    step, record, restored = checkpoints.restore()
    assert bits(restored) == bits(state(step)), name
    assert record.data == {"0": [step]}, name
    assert checkpoints.latest == step, name
    checkpoints.close()
    found[step] += 1
  # Some files are not needed: the log of the save, and the trees before they merge.
  assert min(found.values()) > 20


@pytest.mark.parametrize("part", ["state", "record"])
def test_damage_of_the_only_checkpoint_is_told_in_one_sentence(saved, part):
  like = lambda step, record: checkpoint.tree_of(state(0))
  for file in (saved / "checkpoints" / "12" / part).rglob("*"):
    if file.is_file():
      wreck.flip(file, 0.5)
  with pytest.raises(ConfigError) as error:
    damage.read_newest(saved, [12], like, "train again")
  assert "whose checkpoint of step 12 cannot be read (of step 12: " in str(error.value)
  assert str(error.value).count("\n") == 0
  assert len(str(error.value)) < 500


def test_a_damaged_checkpoint_is_named_and_leaves_memory(saved, monkeypatch, capsys):
  read, alive = damage.read_arrays, []

  def spy(*args):
    alive.append(sum(x.shape == (40, 30) for x in jax.live_arrays()))
    return read(*args)

  like = lambda step, record: {"params": {"w": state(0).params["w"]}}
  changed = itertools.chain(["damaged"], itertools.repeat(None))
  monkeypatch.setattr(damage, "read_arrays", spy)
  monkeypatch.setattr(damage, "_changed", lambda *args: next(changed))
  assert damage.read_newest(saved, [12, 10], like, "train again").step == 10
  assert alive[0] == alive[1]
  said = "".join(capsys.readouterr())
  assert "The checkpoint of step 12 is damaged (damaged); took step 10." in said


def test_too_little_memory_is_no_damage(saved, monkeypatch):
  def fail(*args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

  monkeypatch.setattr(damage, "read_arrays", fail)
  with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
    damage.read_newest(saved, [12, 10], lambda *args: {}, "train again")


def test_a_fault_in_the_code_is_no_damage(saved):
  with pytest.raises(ZeroDivisionError):
    damage.read_newest(saved, [12, 10], lambda step, _: 1 / (step - 12), "train again")


def test_a_file_named_checkpoints_is_refused(c, tmp_path):
  (tmp_path / "checkpoints").write_text("")
  message = "where `checkpoints` is a file and not a folder; move it away or choose"
  with pytest.raises(ConfigError, match=message):
    open_checkpoints(tmp_path, c)
  with pytest.raises(ConfigError, match=message):
    load.load(tmp_path)


def test_the_newest_checkpoint_comes_first(tmp_path):
  for name in ("9", "10", "100", "11.orbax-checkpoint-tmp"):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
  assert steps_of(tmp_path) == [100, 10, 9]
