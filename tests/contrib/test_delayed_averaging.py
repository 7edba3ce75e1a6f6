"""Delayed averaging; tests/algorithm/test_outer_reference.py has its NumPy form."""

import shutil

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diloco
from diloco.aot.programs import Programs
from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.mesh.devices import make_mesh
from diloco.train import train

TEXT = "delayed_averaging(of='quantize')"
FIELDS = {"plugins": ("delayed_averaging",), "wire.compressor": TEXT}


def library(**given):
  params_M = diloco.replicate({"w": jnp.zeros((3, 4)), "z": jnp.zeros(5)}, 1)
  args = {"sync_every": 4, "tau": 3, "wire": diloco.WireConfig(TEXT, "fp32")}
  args |= {"fragments": lambda path: int(path == "z")}
  outer = diloco.OuterConfig("sgd", 1.0)
  return params_M, diloco.streaming(params_M, outer=outer, **args | given)


def test_one_replica_with_rate_one_trains_as_if_it_never_synced():
  """The outer parameters become those that it sent; its later steps are added."""
  params_M, method = library()
  state, received = method.init(params_M), 0
  for t in range(1, 14):
    params_M = jax.tree.map(lambda x, t=t: x + 2.0 ** (t % 5), params_M)
    params_M, state, events = method.step(t, params_M, state)
    received += sum(event.kind == "receive" for event in events)
  assert received == 4
  want = sum(2.0 ** (t % 5) for t in range(1, 14))
  for leaf in jax.tree.leaves(params_M):
    np.testing.assert_array_equal(leaf, np.full(leaf.shape, want))


def test_the_library_refuses_what_cannot_work():
  with pytest.raises(ConfigError, match=r"overlap.alpha is 0.5; choose 0"):
    library(alpha=0.5)
  with pytest.raises(ConfigError, match=r"overlap.tau is 0: no inner step runs"):
    library(tau=0)


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
    ({"wire.compressor": TEXT.replace("quantize", "zip")}, "of is 'zip'; choose one"),
  ],
)
def test_what_cannot_work_is_refused(tiny, fields, message):
  conftest.update(tiny, FIELDS)
  conftest.update(tiny, fields)
  with pytest.raises(ConfigError, match=message):
    resolve(tiny)


def test_the_dry_run_has_its_programs(tiny):
  conftest.update(tiny, FIELDS)
  c = resolve(tiny)
  found = Programs(c, make_mesh(c, jax.devices()[:1])).lower
  assert {"send", "update", "merge", "steps since the send", "keep"} <= set(found)
