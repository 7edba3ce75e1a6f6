"""The methods of configs/methods.py: what each changes, and that it trains."""

import functools

import conftest
import jax
import numpy as np
import plugins  # noqa: F401  Registers `bigram`.
import pytest

from diloco.algorithm.streaming import make_streaming
from diloco.aot.programs import Programs
from diloco.config import resolve
from diloco.contrib import warm_start
from diloco.log import metrics
from diloco.mesh.devices import make_mesh
from diloco.train import train
from diloco.util.command import load_module

METHODS = load_module("methods", "get_config", "methods")
OUTER_STEP = {"send", "merge", "update"}
# Other replicas: other shapes everywhere.
SHAPES = {"inner step", "bytes", "schedule", *OUTER_STEP}
# {method: (the method that it changes, what it changes)}; see `computed`.
CHANGES = {
  "diloco": ("streaming", {"bytes", "schedule", *OUTER_STEP}),
  "diloco_4": ("diloco", SHAPES),
  "local_adamw": ("diloco", {"update", "numbers"}),
  "fedpart": ("streaming", {"inner step"}),
  "topk": ("streaming", {"send", "update", "bytes"}),
  "random": ("streaming", {"send", "update", "bytes"}),
  "dare": ("random", {"send"}),
  "snoo": ("diloco", SHAPES),
  "error_feedback": ("streaming", {"send"}),
  "sparseloco": ("local_adamw", {"send", "update", "bytes"}),
  "muon": ("data_parallel", {"inner step"}),
  "muon_diloco": ("diloco", {"inner step"}),
  "muloco": ("muon_diloco", {"send", "update", "bytes"}),
  "des_loc": ("local_adamw", {"first_moments", "second_moments"}),
  "sparta": ("diloco", {"sparta"}),
  "warm_start": ("diloco", {"joint step", "follow", "schedule"}),
  "warm_start_zero": ("warm_start", {"follow"}),
}


@functools.cache
def computed(name: str) -> dict:
  """Lowers a method's programs in the tiny config.

  Returns:
    Texts of the programs by name, `follow` for what the warm start does when a fragment
    is due; bytes of a sync, the schedule, and the numbers of the outer step.
  """
  # On one device all shardings are equivalent, so JAX may return a program that an
  # earlier test lowered, with other shardings in its text.
  jax.clear_caches()
  config = conftest.tiny_config()
  config.model.name = "bigram"  # A small model is lowered quickly.
  METHODS.use(config, name)
  c = resolve(config)
  mesh = make_mesh(c, jax.devices()[:1])
  programs, sync = Programs(c, mesh), make_streaming(c, mesh)
  with jax.set_mesh(mesh):
    found = {name: lower().as_text() for name, lower in programs.lower.items()}
    if c.joint_steps:
      outer = programs.state.outer
      theta, opt_state = outer.theta[0], outer.opt_state[0]
      found["follow"] = warm_start._accumulate.lower(
        *(theta, opt_state, theta, sync.tuned),
        momentum=c.of(warm_start.WarmStart).momentum,
        outer=sync.outer,
        mesh=mesh,
      ).as_text()
  if sync.fragments:
    found["bytes"] = [sync.sync_bytes(p) for p in range(len(sync.fragments))]
    found |= {"schedule": sync.schedule, "numbers": sync.tuned}
  return found


@pytest.mark.integration("lowers the programs of all methods")
@pytest.mark.parametrize("name", CHANGES)
def test_a_method_changes_these_programs_and_no_other(name):
  base, expected = CHANGES[name]
  before, after = computed(base), computed(name)
  assert {
    part for part in {*before, *after} if before.get(part) != after.get(part)
  } == expected


def test_every_method_is_compared():
  assert {*CHANGES, "streaming", "data_parallel"} == {*METHODS.METHODS}


@pytest.mark.slow("trains 80 steps of every method")
@pytest.mark.parametrize("name", METHODS.METHODS)
def test_every_method_trains(name, tiny, tmp_path):
  tiny.train.steps, tiny.inner.learning_rate = 80, 0.01
  METHODS.use(tiny, name)
  train(tiny, tmp_path)
  losses = [record["loss"] for record in metrics.read(tmp_path)]
  assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.1
