"""Times the compiled pieces of training and prints a table.

  python scripts/bench_step.py --config=configs/sample.py

inner: M replicas against data-parallel at the same global batch; the same for 6 and 48
layers, with compile times; the outer step of one fragment (encode, exchange, decode,
optimizer, merge) against a plain copy of the fragment's float32 values.
"""

import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags
from ml_collections import config_flags

from diloco import config as config_lib
from diloco.algorithm import inner as inner_lib
from diloco.algorithm import outer as outer_lib
from diloco.algorithm import state as state_lib
from diloco.config import command_line
from diloco.model import sharding as mesh_lib
from diloco.run import mesh as run_mesh

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to time.")
_REPEATS = flags.DEFINE_integer("repeats", 10, "Timed calls; the median is printed.")


def changed(**fields):
  c = ml_collections.ConfigDict(_CONFIG.value.to_dict())
  c.update_from_flattened_dict(fields)
  return config_lib.resolve(c)


class Bench:
  """One config's compiled programs and a state to run them on."""

  def __init__(self, c):
    self.c, self.mesh = c, run_mesh.make_mesh(c)
    with jax.set_mesh(self.mesh):
      optimizer = inner_lib.make_optimizer(c)
      self.outer = None
      if c.algorithm != "data_parallel":
        self.outer = outer_lib.make_outer(c, self.mesh)
      self.state = state_lib.init_state(c, self.mesh, optimizer, self.outer)
      m = config_lib.trained_replicas(c)
      shape = (m, c.train.batch_size // m, c.model.seq_len)
      tokens = np.random.default_rng(0).integers(0, c.model.vocab_size, shape)
      sharding = mesh_lib.batch_sharding(self.mesh, c.algorithm == "data_parallel")
      self.tokens = jax.device_put(tokens.astype(np.int32), sharding)
      start = time.perf_counter()
      self.step = (
        inner_lib.make_inner_step(c)
        .lower(self.state.params, self.state.opt_state, self.tokens, None)
        .compile()
      )
      self.compile_s = time.perf_counter() - start
    self.params, self.opt_state = self.state.params, self.state.opt_state

  def inner(self) -> float:
    """Seconds of one inner step."""
    start = time.perf_counter()
    self.params, self.opt_state, metrics = self.step(
      self.params, self.opt_state, self.tokens, None
    )
    jax.block_until_ready(metrics)
    return time.perf_counter() - start


def in_turn(*timers) -> list[float]:
  """Medians of several timers, called in turn so that drift hits all alike."""
  for timer in timers:
    timer()
  rows = [[timer() for timer in timers] for _ in range(_REPEATS.value)]
  return [float(np.median(column)) for column in zip(*rows)]


def timed(f, *args) -> float:
  start = time.perf_counter()
  jax.block_until_ready(f(*args))
  return time.perf_counter() - start


def outer_times(bench: Bench) -> dict[str, float]:
  """Milliseconds of the pieces of fragment 0's outer step and of a copy."""
  outer, p = bench.outer, 0
  copy = jax.jit(lambda tree: jax.tree.map(lambda x: x + 0, tree))
  with jax.set_mesh(bench.mesh):
    params, layers = bench.params, outer.layers[p]
    theta, opt_state = bench.state.outer.theta[p], bench.state.outer.opt_state[p]
    key, everyone = jax.random.key(0), np.ones(bench.c.replicas, bool)
    payload, _ = outer.send(params, theta, layers, key)
    part = jax.jit(outer_lib.take)(params, theta, layers)
    fresh = lambda tree: jax.tree.map(jnp.copy, tree)

    def update():
      args = jax.block_until_ready((fresh(theta), fresh(opt_state)))
      return timed(outer.transport.update, *args, payload)

    def merge():
      args = jax.block_until_ready(fresh(params))
      return timed(outer.merge, args, theta, layers, everyone)

    send = lambda: timed(outer.send, params, theta, layers, key)
    names = ("copy", "send", "update", "merge")
    times = in_turn(lambda: timed(copy, part), send, update, merge)
  return {name: 1e3 * t for name, t in zip(names, times)}


def main(argv) -> None:
  del argv
  device = jax.devices()[0]
  print(f"{jax.device_count()} x {device.device_kind}, jax {jax.__version__}, medians")
  replicas, reference = Bench(changed()), Bench(changed(algorithm="data_parallel"))
  ours, theirs = in_turn(replicas.inner, reference.inner)
  m = replicas.c.replicas
  print(f"inner step, M={m}           {1e3 * ours:9.1f} ms")
  print(f"inner step, data-parallel {1e3 * theirs:9.1f} ms   ratio {ours / theirs:.3f}")
  few, many = (Bench(changed(**{"model.num_layers": n})) for n in (6, 48))
  for name, b in (("6 layers", few), ("48 layers", many)):
    step = in_turn(b.inner)[0]
    print(f"{name:<9} step {1e3 * step:9.1f} ms   compile {b.compile_s:6.2f} s")
  print(f"compile time, 48 to 6 layers: {many.compile_s / few.compile_s:.2f}")
  times = outer_times(replicas)
  for name, ms in times.items():
    print(f"outer step, {name:<7} {ms:9.2f} ms")
  total = sum(ms for name, ms in times.items() if name != "copy")
  print(f"outer step of a fragment over its copy: {total / times['copy']:.1f}")


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  command_line.run(main)
