"""Finds the fastest settings that change no result beyond rounding.

  python -m diloco tune --config=configs/sample.py
  python -m diloco tune --config=chinchilla:335M,M=2 --config.model.seq_len=1024

Times the inner step on the devices that are here. It tries the values of one field
after the other, each in turn with the fastest so far, and prints a row for each:

ms     median time of an inner step of all replicas
ratio  time of the fastest before over this time

The last line has the flags of the fastest settings. The text is not read.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags

from diloco.algorithm import optimizers
from diloco.algorithm.inner import inner_step
from diloco.algorithm.make import make_plan
from diloco.algorithm.state import init_state
from diloco.config import Config, ConfigError, changed, command_line, resolve
from diloco.mesh import memory, sharding
from diloco.mesh.devices import make_mesh

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "A file with get_config(), or a name: sample, chinchilla:1.3B,M=2."
)
_SECONDS = flags.DEFINE_float(
  "seconds", 1.0, "Seconds of timed steps per row.", lower_bound=0.0
)
# A setting replaces another if its step takes at most this share of the time: smaller
# differences are noise.
_BETTER = 0.98
Fields = dict[str, Any]
# Times two configs in turn; returns both times in seconds. Raises MemoryError if the
# second needs too much memory.
Timer = Callable[[Config, Config], tuple[float, float]]


def candidates(c: Config) -> Iterator[list[Fields]]:
  """Yields values to try, for one field or for fields that depend on each other."""
  pairs = itertools.product(("none", "dots", "full"), (1, 0))
  blocks = [{"model.remat": remat, "model.unroll": unroll} for remat, unroll in pairs]
  yield blocks
  powers = [2**k for k in range(c.train.batch_size.bit_length())]
  yield [{"train.accumulate": n} for n in powers]
  chunks = [n for n in (2**k for k in range(6, 16)) if n < c.model.seq_len]
  yield [{"model.loss_chunk": n} for n in (0, *chunks)]
  yield blocks  # Another microbatch may want other values.


def search(c: Config, timer: Timer) -> Fields:
  """Prints the rows; returns the fastest fields that differ from the config's."""
  best = dict[str, Any]()
  for fields in itertools.chain(*candidates(c)):
    text, current = " ".join(f"{k}={v}" for k, v in fields.items()), changed(c, best)
    try:
      trial = changed(c, best | fields)
      if trial == current:
        continue
      before, now = timer(current, trial)
    except ConfigError:  # A batch cannot be divided so, for example.
      continue
    except MemoryError:
      print(f"{text:<38} out of memory")
      continue
    print(f"{text:<38}{1e3 * now:10.2f}{before / now:8.2f}")
    if now < _BETTER * before:
      best |= fields
  return best


class Steps:
  """Compiles inner steps, and times them on one state."""

  def __init__(self, c: Config):
    self._c, self._mesh = c, make_mesh(c)
    self._begin()
    shape = (c.models, c.train.batch_size // c.models, c.model.seq_len)
    tokens = np.random.default_rng(0).integers(0, c.model.vocab_size, shape, np.int32)
    place = sharding.batch_sharding(self._mesh, c.one_model)
    self._rest = (jax.device_put(tokens, place), optimizers.tuned(c))

  def _begin(self) -> None:
    """Makes the first state. The outer state is kept for the memory that it takes."""
    with jax.set_mesh(self._mesh):
      self._state = init_state(self._c, self._mesh, make_plan(self._c, self._mesh))
    self._held = [self._state.params, self._state.opt_state]

  def _seconds(self, c: Config) -> float:
    """Runs one step, which compiles the first time; returns its time."""
    start = time.perf_counter()
    with jax.set_mesh(self._mesh):
      *self._held[:], metrics = inner_step(*self._held, *self._rest, c=c)
    jax.block_until_ready(metrics)
    return time.perf_counter() - start

  def __call__(self, *pair: Config) -> tuple[float, float]:
    """Times two configs in turn; raises MemoryError if there is too little memory."""
    try:
      for c in pair:  # Compiles, without the clock.
        self._seconds(c)
    except jax.errors.JaxRuntimeError as error:
      if not memory.explain(error):
        raise
      self._begin()  # The step may have freed the state.
      raise MemoryError from error
    rows = list[list[float]]()
    end = time.perf_counter() + _SECONDS.value
    while len(rows) < 3 or time.perf_counter() < end:
      rows.append([self._seconds(c) for c in pair])
    before, now = map(statistics.median, zip(*rows))
    return before, now


def main(_: list[str]) -> None:
  c = resolve(_CONFIG.value)
  steps = Steps(c)
  print(f"{'setting':<38}{'ms':>10}{'ratio':>8}")
  best = search(c, steps)
  before, now = steps(c, changed(c, best))
  settings = " ".join(f"--config.{field}={value}" for field, value in best.items())
  print(
    f"{before / now:.2f} times as fast as the config: {settings or 'no other flag'}"
  )


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  command_line.run(main)
