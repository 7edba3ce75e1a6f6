"""Counts the programs that XLA compiles in a whole run, for several numbers P.

  python scripts/benchmarks/bench_compile.py

The run of a small model lasts from initialisation to the last evaluation, with several
numbers of fragments P. It uses two devices, so inner steps hide the exchanges.
bench_step.py has the seconds to compile inner steps of two depths.
"""

import contextlib
import tempfile

import jax
from absl import logging

from diloco import train
from diloco.config import command_line, default_config, resolve


def count_programs(size: int) -> tuple[int, int]:
  """Runs a small model; returns the numbers of fragments and of compiled programs."""
  c = default_config()
  c.model.update({"num_layers": 12, "dim": 32, "num_heads": 1, "dtype": "float32"})
  c.model.update({"vocab_size": 2048, "seq_len": 128, "remat": "full"})
  c.train.batch_size, c.train.steps = 8, 48
  c.fragments.size, c.sync_every = size, 16
  # Up to five inner steps hide an exchange: fewer if P is large, as sends are frequent.
  c.overlap.tau = 5
  c.log.tensorboard, c.log.sample_tokens, c.eval.tokens = False, 1, 4096
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
  for size in (12, 6, 3, 2, 1):
    fragments, programs = count_programs(size)
    print(f"P = {fragments:>2} fragments: {programs} programs compiled in a whole run")


if __name__ == "__main__":
  command_line.run(main)
