"""Modes of JAX that a host program sets, and how many CPU devices there are."""

import os

import jax
import numpy as np
import pytest
import running
from conftest import first_of, update

import diloco
from diloco import train
from diloco.algorithm.streaming import make_streaming
from diloco.cli import evaluate, generate
from diloco.config import resolve
from diloco.errors import ConfigError
from diloco.mesh.devices import make_mesh
from diloco.together import training as together

# All at once; JAX_DISABLE_JIT, which the trainer refuses, has a test of its own.
MODES = {
  "jax_enable_x64": True,
  "jax_numpy_dtype_promotion": "strict",
  "jax_numpy_rank_promotion": "raise",
  "jax_default_prng_impl": "rbg",
  "jax_threefry_partitionable": False,
  "jax_transfer_guard": "disallow",
  "jax_debug_nans": True,
  "jax_debug_infs": True,
  "jax_debug_key_reuse": True,
  "jax_check_tracer_leaks": True,
}


@pytest.fixture
def set_modes():
  """Sets modes for all threads, as environment variables do."""
  before = dict(jax.config.values)
  before["jax_transfer_guard"] = "allow"  # None would leave the guard on.

  def set_all(modes: dict):
    for name, value in modes.items():
      jax.config.update(name, value)

  yield set_all
  set_all({name: before[name] for name in (*MODES, "jax_disable_jit")})


def synchronised(m: int, transport: str, **wire):
  """Outer parameters and replicas after two syncs, one of them overlapped."""
  draw = lambda seed: np.random.default_rng(seed).normal(size=(m, 6, 4))
  moves = [jax.device_put(draw(t).astype(np.float32)) for t in range(6)]
  params_M = {"w": moves.pop()}
  how = {"sync_every": 2, "tau": 1, "alpha": 0.5, "transport": transport}
  method = diloco.streaming(params_M, wire=diloco.WireConfig(**wire), **how)
  state = method.init(params_M)
  for t, move in enumerate(moves, start=1):
    params_M, state, _ = method.step(t, {"w": params_M["w"] - move}, state)
  params_M, state, _ = method.drain(5, params_M, state)
  result = jax.device_get((params_M, method.params(state)))
  assert [x.shape for x in jax.tree.leaves(method.abstract_state(params_M, 4).theta)]
  method.close()
  return result


@pytest.mark.parametrize(
  ("m", "transport", "wire"),
  [
    (2, "device", {"compressor": "random", "format": "e3m0", "density": 0.5}),
    (2, "host", {"format": "e3m0"}),
    (2, "device", {"format": "fp32", "exchange": "psum"}),
    (1, "device", {"format": "fp32"}),
  ],
)
def test_the_library_syncs_alike_in_all_modes(m, transport, wire, set_modes):
  plain = synchronised(m, transport, **wire)
  set_modes({**MODES, "jax_disable_jit": True})
  found = synchronised(m, transport, **wire)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, y)


def test_parameters_of_64_bits_are_refused(set_modes):
  set_modes({"jax_enable_x64": True})
  with pytest.raises(ConfigError, match="leaf w of params_M has the type float64"):
    diloco.streaming({"w": np.ones((2, 3))}, sync_every=1)


def test_the_trainer_refuses_to_train_without_jit(tiny, tmp_path, set_modes):
  set_modes({"jax_disable_jit": True})
  (tmp_path / "member").mkdir()
  for start in (
    lambda: train.train(tiny, tmp_path / "run"),
    lambda: together.train([together.Member(resolve(tiny), tmp_path / "member")]),
  ):
    with pytest.raises(ConfigError, match="JAX_DISABLE_JIT is set"):
      start()
  assert not (tmp_path / "run").exists()


def test_diagnostics_which_write_nan_refuse_to_stop_at_nan(tiny, set_modes):
  update(tiny, {"diagnostics.every": 3})
  c = resolve(tiny)
  set_modes({"jax_debug_nans": True})
  with pytest.raises(ConfigError, match=r"every is 3, .* JAX_DEBUG_NANS"):
    make_streaming(c, make_mesh(c, jax.devices()[:1]))


@pytest.mark.parametrize(
  "fields",
  first_of(
    "whole runs",
    {"overlap.transport": "host"},
    {"overlap.tau": 2},
    {"wire.exchange": "psum", "wire.format": "fp32"},
    {"replicas": 1},
    {"algorithm": "data_parallel"},
  ),
)
def test_the_trainer_trains_alike_in_all_modes(tiny, tmp_path, fields, set_modes):
  few_programs = {"fragments.pattern": "whole", "model.num_layers": 1}
  update(tiny, {**few_programs, **fields})
  plain = train.train(tiny, tmp_path / "plain")
  set_modes(MODES)
  found = train.train(tiny, tmp_path / "modes")
  assert found["eval_loss"] == plain["eval_loss"]
  workdir = str(tmp_path / "modes")
  assert generate.main([workdir, "--tokens=2"]) == 0
  assert evaluate.main([workdir, "--heldout"]) == 0


@pytest.mark.parametrize(
  ("flags", "expected"), [("", 2), ("--xla_force_host_platform_device_count=3", 3)]
)
def test_the_cpu_is_divided_unless_flags_do_it(flags, expected):
  code = "import jax; from diloco.mesh.devices import divide_cpu; divide_cpu(2)"
  env = running.environment(XLA_FLAGS=flags)
  done = running.python("-c", f"{code}; print(len(jax.devices()))", env=env)
  cores = len(os.sched_getaffinity(0))
  assert int(done.stdout) == (expected if flags else min(expected, cores)), done.stderr
