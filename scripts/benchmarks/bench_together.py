"""Times runs that train together against one run, and shows their memory.

  python scripts/benchmarks/bench_together.py --config=batch_32 --runs=1,2,4,8
  python scripts/benchmarks/bench_together.py --config=chinchilla:35M,M=2 --memory
  python scripts/benchmarks/bench_together.py --config=... --memory --topology=h100:1

A time is the least time of several rounds of H inner steps with their outer steps,
without evaluations. The table shows the tokens of all runs together; a CPU second is a
second of one core. With --memory, nothing runs: XLA reports the memory of the inner
step, with parameters and optimizer state. --topology compiles for a chip that this
machine does not have (docs/aot.md).
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import config_flags

from diloco.algorithm.method import Method, make_method
from diloco.aot import topology
from diloco.config import Config, changed, command_line, resolve
from diloco.mesh.devices import make_mesh
from diloco.together.training import Together, inner_together, numbers_of

_CONFIG = config_flags.DEFINE_config_file("config", None, "The config to time.")
_RUNS = flags.DEFINE_list("runs", ["1", "2", "4", "8"], "Counts of runs.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Rounds; the table has the least time.")
_MEMORY = flags.DEFINE_bool("memory", False, "Show memory instead of times.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "With --memory: h100:1, v5e:1x1, ...")


class Bench:
  """Trains R runs with different seeds on random tokens."""

  def __init__(self, c: Config, count: int):
    self.c, self.count, self.mesh, self.t = c, count, make_mesh(c), 0
    self.method: Method = make_method(c, self.mesh)
    shape = tokens_shape(c)
    if count > 1:
      numbers = numbers_of([changed(c, {"seed": r}) for r in range(count)])
      self.method, shape = Together(c, self.method.sync, numbers), (count, *shape)
    self.state = self.method.init()
    tokens = np.random.default_rng(0).integers(0, c.model.vocab_size, shape)
    self.tokens = jnp.asarray(tokens, jnp.int32)

  def round(self) -> tuple[float, float]:
    """Runs H steps of all runs; returns wall seconds, and CPU seconds of all cores."""
    start, busy, state = time.perf_counter(), time.process_time(), self.state
    for _ in range(self.c.sync_every):
      self.t += 1
      steps = range(self.t, self.t + 1)
      state, _ = self.method.inner(steps, state, [self.tokens])
      _, state, _ = self.method.outer(self.t, state)
    self.state = jax.block_until_ready(state)
    return time.perf_counter() - start, time.process_time() - busy


def tokens_shape(c: Config) -> tuple[int, int, int]:
  return c.models, c.train.batch_size // c.models, c.model.seq_len


def memory(c: Config, count: int, mesh: Mesh) -> tuple[int, int]:
  """Compiles the inner step; returns bytes of its arguments and of temporary arrays."""
  place = NamedSharding(mesh, P())  # One device.
  shape = lambda x, *s: jax.ShapeDtypeStruct((*s, *x.shape), x.dtype, sharding=place)
  led = lambda x: shape(x, count)
  inner = jax.tree.map(shape, numbers_of([c] * count).inner)
  with jax.set_mesh(mesh):
    state = jax.tree.map(led, make_method(c, mesh).abstract())
    tokens = led(jax.ShapeDtypeStruct(tokens_shape(c), jnp.int32))
    args = (state.params, state.opt_state, tokens, inner)
    lowered = inner_together.lower(*args, c=c)
    found = lowered.compile().memory_analysis()
  return found.argument_size_in_bytes, found.temp_size_in_bytes


def main(argv) -> None:
  del argv
  c = resolve(_CONFIG.value)
  counts = [int(count) for count in _RUNS.value]
  if _MEMORY.value:
    mesh = make_mesh(c)
    if _TOPOLOGY.value:
      mesh = topology.make_mesh(c, topology.describe(_TOPOLOGY.value))
    print("runs   arguments   temporary (GB)")
    for count in counts:
      arguments, temporary = memory(c, count, mesh)
      print(f"{count:>4} {arguments / 1e9:>11.2f} {temporary / 1e9:>11.2f}", flush=True)
    return
  with jax.set_mesh(make_mesh(c)):
    benches = [Bench(c, count) for count in counts]
    for _ in range(3):  # Compiles; every later round sends all fragments.
      for bench in benches:
        bench.round()
    rounds = [[bench.round() for bench in benches] for _ in range(_REPEATS.value)]
  print("runs    tokens/s of all   tokens per CPU second")
  for bench, seconds in zip(benches, np.min(rounds, axis=0)):
    wall, busy = bench.count * c.tokens_per_step * c.sync_every / seconds
    print(f"{bench.count:>4} {wall:>18,.0f} {busy:>23,.0f}")


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  command_line.run(main)
