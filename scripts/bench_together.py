"""Times runs that train together against one run, and shows their memory.

  python scripts/bench_together.py --config=configs/sample.py --runs=1,2,4,8
  python scripts/bench_together.py --config=configs/chinchilla.py:35M,M=2 --memory

A time is the least of several rounds of H inner and outer steps, without evaluations.
The table has the tokens/s of all runs of a launch. The memory is XLA's for the inner
step, with parameters and optimizer state; nothing runs.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from diloco.algorithm.inner import inner_step
from diloco.algorithm.plan import make_plan
from diloco.algorithm.state import abstract_state, init_state
from diloco.config import Config, changed, command_line, resolve
from diloco.run.mesh import make_mesh
from diloco.run.together import numbers_of, over_runs, step

_CONFIG = config_flags.DEFINE_config_file("config", None, "The config to time.")
_RUNS = flags.DEFINE_list("runs", ["1", "2", "4", "8"], "Counts of runs.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Rounds; the table has the least time.")
_MEMORY = flags.DEFINE_bool("memory", False, "Show memory instead of times.")


class Bench:
  """Trains R runs with different seeds on random tokens."""

  def __init__(self, c: Config, count: int):
    self.c, self.count, self.mesh = c, count, make_mesh(c)
    self.plan, self.t = make_plan(c, self.mesh), 0
    self.numbers = numbers_of([changed(c, {"seed": r}) for r in range(count)])
    init = functools.partial(init_state, c, self.mesh, self.plan)
    self.state = jax.vmap(init)(self.numbers.seed)
    shape = (count, *tokens_shape(c))
    tokens = np.random.default_rng(0).integers(0, c.model.vocab_size, shape)
    self.tokens = jnp.asarray(tokens, jnp.int32)

  def round(self) -> float:
    """Runs H steps of all runs; returns the seconds."""
    start = time.perf_counter()
    for _ in range(self.c.sync_every):
      self.t += 1
      launch = functools.partial(step, self.c, range(self.t, self.t + 1))
      arrays = (self.state, self.tokens)
      (self.state, _), _ = over_runs(self.plan, self.numbers, launch, arrays)
    jax.block_until_ready(self.state)
    return time.perf_counter() - start


def tokens_shape(c: Config) -> tuple[int, int, int]:
  return c.models, c.train.batch_size // c.models, c.model.seq_len


def memory(c: Config, count: int) -> tuple[int, int]:
  """Compiles the inner step; returns bytes of its arguments and of temporary arrays."""
  mesh = make_mesh(c)
  led = lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype)
  with jax.set_mesh(mesh):
    state = jax.tree.map(led, abstract_state(c, mesh, None))
    tokens = led(jax.ShapeDtypeStruct(tokens_shape(c), jnp.int32))
    inner = numbers_of([c] * count).inner
    one = functools.partial(inner_step, c=c)
    together = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None, 0)), donate_argnums=(0, 1))
    lowered = together.lower(state.params, state.opt_state, tokens, None, inner)
    found = lowered.compile().memory_analysis()
  return found.argument_size_in_bytes, found.temp_size_in_bytes


def main(argv) -> None:
  del argv
  c = resolve(_CONFIG.value)
  counts = [int(count) for count in _RUNS.value]
  if _MEMORY.value:
    print("runs   arguments   temporary (GB)")
    for count in counts:
      arguments, temporary = memory(c, count)
      print(f"{count:>4} {arguments / 1e9:>11.2f} {temporary / 1e9:>11.2f}", flush=True)
    return
  with jax.set_mesh(make_mesh(c)):
    benches = [Bench(c, count) for count in counts]
    for _ in range(3):  # Compiles, and reaches the rounds with every send.
      for bench in benches:
        bench.round()
    rounds = [[bench.round() for bench in benches] for _ in range(_REPEATS.value)]
  print("runs    tokens/s of all")
  for bench, seconds in zip(benches, np.min(rounds, axis=0)):
    rate = bench.count * c.tokens_per_step * c.sync_every / seconds
    print(f"{bench.count:>4} {rate:>15,.0f}")


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  command_line.run(main)
