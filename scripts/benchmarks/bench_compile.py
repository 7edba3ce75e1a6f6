"""Measures compilation: seconds for two depths, programs for several numbers P.

  python scripts/benchmarks/bench_compile.py

Depth: the seconds to compile the inner step of 6 and of 48 layers of the same width,
with 16-bit activations and recomputed blocks as in configs/chinchilla.py. Prints the
medians of --repeats compilations.

Fragments: the number of programs that XLA compiles in a whole run of a small model,
from initialisation to the last evaluation, for several numbers of fragments P. The run
uses two devices, so inner steps hide the exchanges.
"""

import contextlib
import tempfile

import jax
import numpy as np
from absl import flags, logging

from diloco import train
from diloco.aot.programs import Programs
from diloco.config import command_line, default_config, resolve
from diloco.mesh import devices as run_mesh

_DEPTHS = (6, 48)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Number of compilations per depth.")
_DIM = flags.DEFINE_integer("dim", 512, "Width of the models of both depths.")


def small_config(layers: int, dim: int):
  """Returns the config of a model with 2,048 pieces and 128 positions."""
  c = default_config()
  c.model.update({"num_layers": layers, "dim": dim, "num_heads": max(dim // 64, 1)})
  c.model.update({"vocab_size": 2048, "seq_len": 128, "remat": "full"})
  c.train.batch_size, c.train.steps = 8, 48
  return c


def compile_seconds(layers: int, dim: int) -> float:
  """Compiles the inner step of a model with `layers` layers; returns the seconds."""
  c = resolve(small_config(layers, dim))
  programs = Programs(c, run_mesh.make_mesh(c, jax.devices()[:1]))
  jax.clear_caches()
  return programs.compile("inner step").compile_s


def count_programs(size: int) -> tuple[int, int]:
  """Runs a small model; returns the numbers of fragments and of compiled programs."""
  c = small_config(layers=12, dim=32)
  c.fragments.size, c.sync_every = size, 16
  # Up to five inner steps hide an exchange: fewer if P is large, as sends are frequent.
  c.overlap.tau = 5
  c.model.dtype, c.log.tensorboard, c.eval.tokens = "float32", False, 4096
  c.log.sample_tokens = 1
  events = []
  jax.clear_caches()
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: events.append(event)
  )
  with tempfile.TemporaryDirectory() as workdir, contextlib.redirect_stdout(None):
    train.train(c, workdir)
  jax.monitoring.clear_event_listeners()
  fragments = len(resolve(c).make_fragments())
  return fragments, events.count("/jax/core/compile/backend_compile_duration")


def main(argv) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)  # Orbax logs a page per checkpoint.
  jax.config.update("jax_num_cpu_devices", 2)
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
  times = [
    [compile_seconds(n, _DIM.value) for n in _DEPTHS] for _ in range(_REPEATS.value)
  ]
  few, many = np.median(times, axis=0)
  for n, seconds in zip(_DEPTHS, (few, many)):
    print(f"{n:>3} layers of width {_DIM.value}: compiled in {seconds:.2f} s")
  print(f"48 to 6 layers: {many / few:.2f}")
  for size in (12, 6, 3, 2, 1):
    fragments, programs = count_programs(size)
    print(f"P = {fragments:>2} fragments: {programs} programs compiled in a whole run")


if __name__ == "__main__":
  command_line.run(main)
