"""The methods of configs/methods.py: optax takes their optimizers, and they train."""

import jax
import numpy as np
import pytest

from diloco.algorithm.methods import between_syncs
from diloco.algorithm.plan import make_plan
from diloco.algorithm.state import abstract_state
from diloco.config import resolve
from diloco.config.command_line import load_module
from diloco.run import metrics
from diloco.run.mesh import make_mesh
from diloco.train import train

METHODS = load_module("methods", "get_config", "methods")


@pytest.mark.parametrize("name", METHODS.METHODS)
def test_the_state_of_every_method_can_be_made(name, tiny):
  METHODS.use(tiny, name)
  c = resolve(tiny)
  mesh = make_mesh(c, jax.devices()[:1])
  assert abstract_state(c, mesh, make_plan(c, mesh)).opt_state
  between_syncs.check(c)
  assert len(c.averages()) == (2 if name == "des_loc" else name == "sparta")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS.METHODS)
def test_every_method_trains(name, tiny, tmp_path):
  tiny.train.steps, tiny.inner.learning_rate = 80, 0.01
  METHODS.use(tiny, name)
  train(tiny, tmp_path)
  losses = [record["loss"] for record in metrics.read(tmp_path)]
  assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.1
