"""Runs that train together get the files and the losses that they get alone."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import tiny_config, update

from diloco import session, train
from diloco.algorithm.method import make_method
from diloco.config import add_plugins, changed, resolve
from diloco.log import metrics
from diloco.mesh.devices import make_mesh
from diloco.processes import stop
from diloco.sweep import job, table
from diloco.sweep import worker as run_together
from diloco.together import training as together
from diloco.util import files

# Seed, outer rate, outer momentum and inner rate of each run.
POINTS = ((0, 0.3, 0.9, 3e-3), (0, 0.6, 0.5, 3e-3), (1, 0.3, 0.9, 6e-3), (1, 0.6, 0, 0))
SAME = ("tokens", "steps", "syncs", "fragments", "bytes_sent_per_replica", "device")


def make_config(algorithm: str, seed: int, outer: float, momentum: float, inner: float):
  c = tiny_config()
  c.model.num_layers = 2
  c.algorithm, c.seed, c.train.steps = algorithm, seed, 9
  c.outer.learning_rate, c.inner.learning_rate = outer, inner
  c.outer.optimizer = f"sgd(momentum={momentum}, nesterov=True)"
  c.eval.every, c.sync_every = 4, 3
  c.outer.final_sync = True
  if algorithm == "streaming":
    c.wire.compressor = "random"
    add_plugins(c, "sparta", "des_loc", "diagnostics")
    c.sparta.share, c.sparta.every, c.des_loc.first_every = 0.02, 2, 3
    c.diagnostics.every = 2
  return c


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """Trains a run alone, once; gives its folder."""
  found = {}

  def run(algorithm, point):
    if (algorithm, point) not in found:
      folder = found[algorithm, point] = tmp_path_factory.mktemp("alone")
      train.train(make_config(algorithm, *point), folder)
    return found[algorithm, point]

  return run


def folders_of(place, algorithm, points):
  """Writes the config.json of runs."""
  folders = [place / str(i) for i in range(len(points))]
  for folder, point in zip(folders, points):
    folder.mkdir()
    config = table.as_json(resolve(make_config(algorithm, *point)))
    (folder / "config.json").write_text(json.dumps(config))
  return folders


def train_together(algorithm, points, folders):
  configs = [resolve(make_config(algorithm, *point)) for point in points]
  together.train([together.Member(c, folder) for c, folder in zip(configs, folders)])


def close(found, want):
  """Compares numbers in lists and dicts; counts and names are equal."""
  if isinstance(want, dict):
    assert found.keys() == want.keys()
    for name in found.keys() - {"time", "tokens_per_s", "wall_s"}:
      close(found[name], want[name])
  elif isinstance(want, list):
    assert len(found) == len(want)
    for pair in zip(found, want):
      close(*pair)
  elif isinstance(want, float):
    np.testing.assert_allclose(found, want, rtol=2e-4, atol=1e-6)
  else:
    assert found == want


def check(found, want):
  """Compares the files of two runs."""
  for kind in ("step", "send", "receive", "merge", "eval"):
    close(metrics.read(found, kind), metrics.read(want, kind))
  for folder in (found, want):
    assert (folder / "checkpoints" / "9").is_dir()
  a, b = (json.loads((f / "summary.json").read_text()) for f in (found, want))
  close(a, b)
  assert {name: a[name] for name in SAME} == {name: b[name] for name in SAME}


def test_each_run_of_a_group_draws_the_numbers_of_its_own_seed():
  """In one sync of DiLoCo, whose compressor keeps values that a seed draws."""
  c = tiny_config()
  update(c, {"algorithm": "diloco", "fragments.pattern": "whole", "overlap.tau": 0})
  update(c, {"wire.compressor": "random", "model.num_layers": 1, "sync_every": 1})
  plain = resolve(c)
  runs, mesh = [changed(plain, {"seed": seed}) for seed in (3, 4)], make_mesh(plain)

  def sync(method):
    state = method.init()
    params = jax.tree.map(lambda x: 1.5 * x, state.params)
    _, state, _ = method.outer(1, dataclasses.replace(state, params=params))
    return state.outer.theta[0]

  close_to = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
  with jax.set_mesh(mesh):
    group = together.Together(
      plain, make_method(plain, mesh).sync, together.numbers_of(runs)
    )
    found = sync(group)
    for r, own in enumerate(runs):
      alone = sync(make_method(own, mesh))
      jax.tree.map(close_to, group.of_run(found, r), alone)


@pytest.mark.slow("groups of whole runs")
@pytest.mark.parametrize("algorithm", ["streaming", "diloco", "data_parallel"])
def test_runs_that_train_together_equal_single_runs(tmp_path, alone, algorithm):
  folders = folders_of(tmp_path, algorithm, POINTS)
  train_together(algorithm, POINTS, folders)
  measured = metrics.read(folders[0], "merge")
  assert bool(measured) == (algorithm == "streaming")  # By the diagnostics.
  some = POINTS if algorithm == "streaming" else (POINTS[0], POINTS[3])
  for point in some:
    check(folders[POINTS.index(point)], alone(algorithm, point))
  losses = {metrics.read(folder)[-1]["loss"] for folder in folders}
  assert len(losses) == (3 if algorithm == "data_parallel" else 4)


@pytest.mark.slow("whole runs")
def test_warm_starts_run_together(tmp_path):
  folders = folders_of(tmp_path, "streaming", POINTS[:2])
  made = [make_config("streaming", *point) for point in POINTS[:2]]
  for c in made:
    update(c, {"warm_start.steps": 4})
  configs = [resolve(c) for c in made]
  together.train([together.Member(c, f) for c, f in zip(configs, folders)])
  train.train(configs[1], tmp_path / "alone")
  check(folders[1], tmp_path / "alone")
  followed = (metrics.read(f, "warm_start") for f in (folders[1], tmp_path / "alone"))
  close(*followed)


@pytest.mark.integration("groups of whole runs")
def test_runs_stopped_together_go_on_together_or_alone(tmp_path, alone, monkeypatch):
  folders = folders_of(tmp_path, "streaming", POINTS[:3])
  take = session.Batches.__next__

  def stop_at_the_end(batches):
    count.append(0)
    if len(count) == 14:  # Two seeds, step 7.
      os.kill(os.getpid(), signal.SIGTERM)
    return take(batches)

  count: list[int] = []
  monkeypatch.setattr(session.Batches, "__next__", stop_at_the_end)
  train_together("streaming", POINTS[:3], folders)
  for folder in folders:
    assert not (folder / "summary.json").exists()
    assert (folder / "checkpoints" / "7").is_dir()
  train_together("streaming", POINTS[:2], folders[:2])
  train.train(make_config("streaming", *POINTS[2]), folders[2])
  for folder, point in zip(folders, POINTS):
    check(folder, alone("streaming", point))


@pytest.mark.slow("groups of whole runs")
def test_a_run_that_diverges_leaves_the_others_alone(tmp_path, alone):
  """Also shows the process that a sweep starts."""
  worse = (*POINTS[1][:3], 1e30)
  folders = folders_of(tmp_path, "streaming", (POINTS[0], worse, POINTS[2]))
  assert job.run(*map(str, folders)) == 0
  ends = [files.read_json(folder / "ended.json") for folder in folders]
  assert [end["failed"] for end in ends] == [False, True, False]
  assert "of replica 0 is nan at step" in ends[1]["error"]
  assert not (folders[1] / "summary.json").exists()
  check(folders[0], alone("streaming", POINTS[0]))
  check(folders[2], alone("streaming", POINTS[2]))
  first, _, last = [(folder / "log.txt").read_text() for folder in folders]
  assert "Training together: 0 1 2." in first
  assert "evaluation   outer parameters" in last


@pytest.mark.slow("groups of whole runs")
def test_runs_that_fail_alone_leave_the_rest_of_the_group(tmp_path, alone):
  """A group with a saved run trains one by one."""
  worse = (*POINTS[1][:3], 1e30)
  folders = folders_of(tmp_path, "streaming", (worse, POINTS[1], POINTS[0]))
  (folders[1] / "checkpoints" / "4").mkdir(parents=True)  # Nothing is in it.
  shutil.copytree(alone("streaming", POINTS[0]), folders[2], dirs_exist_ok=True)
  for name in ("summary.json", "log.txt"):
    (folders[2] / name).unlink(missing_ok=True)
  assert job.run(*map(str, folders)) == 0
  ends = [files.read_json(folder / "ended.json") for folder in folders]
  assert [end["failed"] for end in ends] == [True, True, False]
  assert "of replica 0 is nan at step" in ends[0]["error"]
  assert "step 4 cannot be read" in ends[1]["error"]
  assert (folders[2] / "summary.json").exists()


# A worker on a device that has memory for two runs.
TWO_FIT = """
import sys
import jax
from diloco.sweep import worker
from diloco.together import training

train = training.train

def train_two(runs):
  if len(runs) > 2:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: allocating 9 GiB")
  return train(runs)

training.train = train_two
sys.exit(worker.main())
"""


@pytest.mark.slow("groups of whole runs")
def test_a_group_that_does_not_fit_is_halved(tmp_path, alone):
  folders = folders_of(tmp_path, "streaming", POINTS)
  command = [sys.executable, "-c", TWO_FIT, *map(str, folders)]
  told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
  assert "With 4 runs at once, out of memory: " in told
  groups = [line for line in told.splitlines() if line.startswith("Training together")]
  names = ["Training together: 0 1.", "Training together: 2 3."]
  assert groups == ["Training together: 0 1 2 3.", *names]
  for folder, point in zip(folders, POINTS):
    check(folder, alone("streaming", point))


def test_a_crash_is_not_blamed_on_the_divergence_of_another_run(tmp_path):
  log = tmp_path / "log.txt"
  lines = ["failed: the loss of replica 0 is nan at step 10", "Killed by a fault"]
  assert job._after("failed: ", lines) == ["the loss of replica 0 is nan at step 10"]
  assert job._error(str(log), lines, 1) == "exit status 1: Killed by a fault"


def test_sigterm_ends_all_groups_of_a_process(tmp_path, monkeypatch):
  folders, trained = folders_of(tmp_path, "streaming", POINTS), []

  def stopped(group):
    trained.append(len(group))
    return True

  # Its thread would end the tests at their second Ctrl-C.
  monkeypatch.setattr(stop, "watch_signals", lambda: None)
  monkeypatch.setattr(together, "train", stopped)
  monkeypatch.setattr(
    run_together, "_by_position", lambda runs, most: [runs[:2], runs[2:]]
  )
  assert run_together.main([*map(str, folders)]) == 0
  assert trained == [2]
