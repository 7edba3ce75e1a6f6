"""Delayed averaging; tests/algorithm/test_outer_reference.py has its NumPy form."""

import shutil

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.algorithm.streaming import make_streaming
from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.mesh.devices import make_mesh
from diloco.train import train

FIELDS = {"plugins": ("delayed_averaging",), "delayed_averaging.on": True}


def test_one_replica_with_rate_one_trains_as_if_it_never_synced(tiny):
  """The outer parameters become those that it sent; its later steps are added."""
  conftest.update(tiny, FIELDS | {"wire.format": "fp32", "overlap.tau": 3})
  tiny.replicas, tiny.sync_every, tiny.fragments.size = 1, 4, 1
  tiny.outer.optimizer, tiny.outer.learning_rate = "sgd", 1.0
  c = resolve(tiny)
  shapes = {"blocks": {"w": (c.model.num_layers, 3, 4)}, "embed": {"z": (5,)}}
  sync = make_streaming(c, make_mesh(c, jax.devices()[:1]), shapes)
  is_shape = lambda x: isinstance(x, tuple)
  zeros = lambda shape: jnp.zeros((1, *shape))
  with jax.set_mesh(sync.mesh):
    params_M, received = jax.tree.map(zeros, shapes, is_leaf=is_shape), 0
    state = sync.init(params_M)
    for t in range(1, 14):
      params_M = jax.tree.map(lambda x, t=t: x + 2.0 ** (t % 5), params_M)
      params_M, state, events = sync.step(t, params_M, state)
      received += sum(event.kind == "receive" for event in events)
  assert received >= 4
  want = sum(2.0 ** (t % 5) for t in range(1, 14))
  for leaf in jax.tree.leaves(params_M):
    np.testing.assert_array_equal(leaf, np.full(leaf.shape, want))


@pytest.mark.integration("trains one and a half small models")
def test_a_run_resumes_exactly_while_fragments_are_in_flight(tiny, tmp_path):
  whole, part = tmp_path / "whole", tmp_path / "part"
  conftest.update(tiny, FIELDS | {"overlap.tau": 3, "train.steps": 14})
  tiny.checkpoint.every = 7  # Fragments 1, 2 and 3 are on the way.
  first = train(tiny, whole)
  shutil.copytree(whole, part)
  shutil.rmtree(part / "checkpoints" / "14")
  (part / "summary.json").unlink()
  assert train(tiny, part)["eval_loss"] == first["eval_loss"]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"overlap.alpha": 0.5}, r"but overlap.alpha is 0.5; choose 0"),
    ({"overlap.taus": (1, 2)}, r"but overlap.taus is \(1, 2\); choose equal ones"),
    ({"overlap.tau": 0}, r"overlap.tau is 0: no inner step runs during an exchange"),
  ],
)
def test_what_cannot_work_is_refused(tiny, fields, message):
  conftest.update(tiny, FIELDS)
  conftest.update(tiny, fields)
  with pytest.raises(ConfigError, match=message):
    resolve(tiny)
