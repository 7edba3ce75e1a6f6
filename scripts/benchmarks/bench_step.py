"""Times the compiled programs of training and prints a table.

  python scripts/benchmarks/bench_step.py --config=configs/batch_32.py

For the inner step, it compares M replicas with data-parallel at the same global batch,
and then 48 layers with 6, with their compile times. For the outer step, it compares
send, update and merge of one fragment with a plain copy of the fragment's float32
values. --outer times only the outer step.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags
from timing import in_turn, print_devices, timed

from diloco.algorithm import optimizers, slices
from diloco.algorithm.inner import inner_step
from diloco.algorithm.method import Method
from diloco.algorithm.outer import merge
from diloco.algorithm.streaming import make_streaming
from diloco.config import Config, changed, command_line, resolve
from diloco.mesh import sharding
from diloco.mesh.devices import make_mesh


class Bench:
  """Compiles the inner step of a config, and keeps a state to run it on."""

  def __init__(self, c: Config):
    self.c, self.mesh = c, make_mesh(c)
    with jax.set_mesh(self.mesh):
      self.sync = make_streaming(c, self.mesh)
      self.state = Method(c, self.sync).init()
      shape = (c.models, c.train.batch_size // c.models, c.model.seq_len)
      tokens = np.random.default_rng(0).integers(0, c.model.vocab_size, shape)
      place = sharding.batch_sharding(self.mesh, c.one_model)
      tokens = jax.device_put(tokens.astype(np.int32), place)
      self.rest = (tokens, optimizers.tuned(c))
      start = time.perf_counter()
      self.step = inner_step.lower(
        self.state.params, self.state.opt_state, *self.rest, c=c
      ).compile()
      self.compile_s = time.perf_counter() - start
    self.params, self.opt_state = self.state.params, self.state.opt_state

  def inner(self) -> float:
    """Runs one inner step; returns its seconds."""

    def step():
      self.params, self.opt_state, metrics = self.step(
        self.params, self.opt_state, *self.rest
      )
      return metrics

    return timed(step)


def outer_times(bench: Bench) -> dict[str, float]:
  """Times the parts of fragment 0's outer step, and a copy of fragment 0, in ms."""
  c, sync, mesh = bench.c, bench.sync, bench.mesh
  copy = jax.jit(lambda tree: jax.tree.map(lambda x: x + 0, tree))
  fresh = lambda tree: jax.block_until_ready(jax.tree.map(jnp.copy, tree))
  with jax.set_mesh(mesh):
    params, layers, state = bench.params, sync.layers[0], bench.state.outer
    theta, opt_state = state.theta[0], state.opt_state[0]
    key, everyone = jax.random.key(0), np.ones(c.replicas, bool)
    part = jax.jit(lambda *args: slices.take(*args))(params, theta, layers)

    def sent():
      codec_state = fresh(state.codec_state[0])
      args = (params, theta, codec_state, layers, key)
      return timed(sync.lines_7_8, *args, wire=c.wire, mesh=mesh)

    start = fresh(state.codec_state[0])
    args = (params, theta, start, layers, key)
    payload, *_ = sync.lines_7_8(*args, wire=c.wire, mesh=mesh)
    payload = sync.transport.carry(payload)

    def updated():
      parts = (*fresh((theta, opt_state)), payload, sync.tuned)
      return timed(sync.lines_10_11, *parts, wire=c.wire, outer=c.outer, mesh=mesh)

    merged = lambda: timed(
      merge, fresh(params), theta, layers, everyone, alpha=sync.alpha
    )
    names = ("copy", "send", "update", "merge")
    times = in_turn(lambda: timed(copy, part), sent, updated, merged)
  return {name: 1e3 * t for name, t in zip(names, times)}


def main(argv) -> None:
  del argv
  c = resolve(flags.FLAGS.config)
  print_devices(c.mesh.cpu_devices)
  replicas = Bench(c)
  if not flags.FLAGS.outer:
    print_inner_steps(c, replicas)
  times = outer_times(replicas)
  for name, ms in times.items():
    print(f"outer step, {name:<7} {ms:9.2f} ms")
  total = sum(ms for name, ms in times.items() if name != "copy")
  print(f"outer step of a fragment over its copy: {total / times['copy']:.1f}")


def print_inner_steps(c: Config, replicas: Bench) -> None:
  """Times inner steps against data-parallel, and with 6 and 48 layers."""
  reference = Bench(changed(c, {"algorithm": "data_parallel"}))
  ours, theirs = in_turn(replicas.inner, reference.inner)
  m = replicas.c.replicas
  print(f"inner step, M={m}           {1e3 * ours:9.1f} ms")
  print(f"inner step, data-parallel {1e3 * theirs:9.1f} ms   ratio {ours / theirs:.3f}")
  few, many = (Bench(changed(c, {"model.num_layers": n})) for n in (6, 48))
  for name, b in (("6 layers", few), ("48 layers", many)):
    step = in_turn(b.inner)[0]
    print(f"{name:<9} step {1e3 * step:9.1f} ms   compile {b.compile_s:6.2f} s")
  print(f"compile time, 48 to 6 layers: {many.compile_s / few.compile_s:.2f}")


if __name__ == "__main__":
  # Defined only here, because programs that import this file must not have these flags.
  flags.DEFINE_bool("outer", False, "Time only the outer step.")
  config_flags.DEFINE_config_file("config", None, "The config to time.")
  flags.mark_flag_as_required("config")
  command_line.run(main)
