"""The lines that tell which program XLA compiles, and how many there are."""

import jax
import jax.numpy as jnp
import pytest
from cpu_devices import run

from diloco.mesh import compiling


@pytest.fixture
def announced(monkeypatch):
  monkeypatch.setattr(compiling, "_PATIENCE", 0.05)
  for _ in range(2):  # As when a notebook calls a command's main twice.
    compiling.announce_compilations()
  # XLA once crashed when it wrote the long program to the cache, which nobody reads.
  limit = "jax_persistent_cache_min_compile_time_secs"
  before = jax.config.values[limit]
  jax.config.update(limit, 1e9)
  yield
  jax.config.update(limit, before)
  jax.monitoring.unregister_event_duration_listener(compiling._listen)
  compiling.announce_compilations.cache_clear()


def slow_to_compile(x):
  for i in range(400):
    x = jnp.sin(x @ x) + i
  return x


@pytest.mark.integration("compiles for long")
def test_a_long_compilation_is_announced_once(announced, capfd):
  program = jax.jit(slow_to_compile)
  for _ in range(2):
    program(jnp.ones((8, 8)))
  assert capfd.readouterr().err.count("Compiling slow_to_compile ...\n") == 1


def test_a_quick_compilation_is_not_announced(announced, capfd, monkeypatch):
  monkeypatch.setattr(compiling, "_PATIENCE", 60)
  jax.jit(lambda x: x + 1)(jnp.ones(3))
  assert compiling._clock.timer is None  # It was cancelled.
  assert "Compiling" not in capfd.readouterr().err


# Prints the programs that a whole run compiles, for fragments of each size. Up to four
# inner steps hide an exchange: fewer with many fragments, as sends are frequent.
COUNT = """
import contextlib, json, tempfile
import conftest, jax
from diloco import train

def count(size):
  c = conftest.tiny_config()
  c.model.num_layers, c.fragments.size = 4, size
  c.train.steps, c.sync_every, c.overlap.tau = 23, 10, 4
  c.checkpoint.every = 0  # What is in flight, and is saved, differs.
  events = []
  jax.clear_caches()
  listen = lambda event, duration, **_: events.append(event)
  jax.monitoring.register_event_duration_secs_listener(listen)
  with tempfile.TemporaryDirectory() as workdir, contextlib.redirect_stdout(None):
    train.train(c, workdir)
  jax.monitoring.clear_event_listeners()
  return events.count("/jax/core/compile/backend_compile_duration")

print(json.dumps([count(size) for size in (4, 1)]))
"""


@pytest.mark.integration("compiles two whole runs")
def test_a_run_compiles_as_many_programs_for_each_number_of_fragments():
  few, many = run(2, "-c", COUNT)
  assert few == many
