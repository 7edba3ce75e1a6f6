"""Draws the parts of a training step under the roofs of devices; prints a table.

  python scripts/benchmarks/draw_roofline.py --out=docs/figures/roofline.png

The step of --config is measured here, part by part. The step of --predict is only
counted; its times are those of the roofs, on a TPU v5e and an H100. FLOPs and bytes of
both are counted from shapes, not read from compiled programs: the matrix products, with
those that model.remat=full repeats, and every array that a part must read or write
once, as if XLA fused all element-wise work and kept nothing in a cache. Attention of
--predict is a kernel that keeps no scores. The outer step counts 1/H of a round.

Letters: T tokens of a step of all replicas, N layers, D width, F feed-forward width, V
vocabulary, L positions, M replicas, K microbatches of a replica.
"""

import functools
import math
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from bench_step import Bench, outer_bytes, outer_times
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from ml_collections import config_flags
from timing import in_turn, print_devices, timed

from diloco.algorithm import optimizers
from diloco.config import Config, command_line, resolve
from diloco.mesh import hardware
from diloco.model import attention, loss
from diloco.spec import shapes
from diloco.util import palette
from diloco.util.command import check_picture

ATTENTION, SCORES = "attention projections", "attention products and softmax"
FEED_FORWARD, LOSS, NORMS = "feed-forward", "loss", "norms and element-wise"
OPTIMIZER, OUTER = "optimizer", "outer step"
PARTS = (ATTENTION, SCORES, FEED_FORWARD, LOSS, NORMS, OPTIMIZER, OUTER)
COLORS = dict(zip(PARTS, palette.OTHERS))
# Bytes per second of device memory: Google Cloud's page on TPU v5e
# (docs.cloud.google.com/tpu/docs/v5e), NVIDIA's data sheet of the H100 SXM.
DEVICES = {
  "TPU v5e": ("TPU v5e", 819e9),
  "H100 SXM": ("NVIDIA H100 80GB HBM3", 3.35e12),
}


class Work(NamedTuple):
  """FLOPs and bytes of memory traffic of a part, per step of all replicas."""

  flops: float
  nbytes: float


class Roofs(NamedTuple):
  """FLOP/s of matrix products, bytes/s of a copy in memory and of one in the caches."""

  flops: float
  memory: float
  caches: float | None = None

  def seconds(self, work: Work) -> float:
    return max(work.flops / self.flops, work.nbytes / self.memory)


def count(c: Config, keeps_scores: bool) -> dict[str, Work]:
  """Counts FLOPs and bytes of the parts of a step from the shapes of a config.

  Args:
    keeps_scores: whether attention writes its scores to memory, as `xla` does.
  """
  m, tokens = c.model, c.tokens_per_step
  n, d, f, v, length = m.num_layers, m.dim, m.ff_dim, m.vocab_size, m.seq_len
  value, weight = jnp.dtype(m.dtype).itemsize, jnp.dtype(m.param_dtype).itemsize
  microbatches = c.models * c.train.accumulate
  # Blocks run forward twice if the backward pass computes their activations again.
  forward = 1 + (m.remat == "full")

  def product(rows: int, columns: int) -> Work:
    matrix = microbatches * weight * rows * columns
    one = Work(2 * tokens * rows * columns, tokens * value * (rows + columns) + matrix)
    # The backward pass has two products, each with as many operands and results.
    return times(forward + 2, one)

  projections = times(4 * n, product(d, d))
  feed_forward = times(n, plus(product(d, f), product(f, d)))
  # Forward reads q, k and v and writes the result; backward reads these and the
  # result's gradient and writes three gradients. Scores and their gradients are
  # float32, weights and what the products read are in m.dtype.
  scores = n * tokens * m.num_heads * length * keeps_scores
  attend = Work(
    n * 4 * tokens * length * d * (forward + 2),
    n * tokens * d * value * (4 * forward + 8)
    + scores * ((8 + 2 * value) * forward + (8 + 5 * value)),
  )
  # Logits: written, read for their sum, read for the gradient, which two products read.
  chunks = microbatches * (length // m.loss_chunk if m.loss_chunk else 1)
  head = Work(
    6 * tokens * d * v,
    tokens * v * (12 + 3 * value)
    + 3 * tokens * d * value
    + chunks * d * v * (2 * value + 8 * (chunks > microbatches)),
  )
  # A block has two norms (forward reads 1 and writes 1, backward 2 and 1) and two sums
  # (2 and 1 each way), with QK-LayerNorm two more norms; about 8 operations per value.
  norms = 2 + 2 * m.qk_norm
  element_wise = Work(
    n * tokens * d * 8 * norms * (forward + 2),
    n * tokens * d * value * ((2 * norms + 6) * forward + 3 * norms + 6),
  )
  counted = {
    ATTENTION: projections,
    SCORES: attend,
    FEED_FORWARD: feed_forward,
    LOSS: head,
    NORMS: element_wise,
    OPTIMIZER: optimizer_work(c),
    OUTER: outer_work(c),
  }
  return {name: work for name, work in counted.items() if work.nbytes}


def optimizer_work(c: Config) -> Work:
  """Counts AdamW: reads gradient, parameter and moments; writes the last three.

  The gradient is read once more for its norm, and once per microbatch for the sum of
  microbatches, which is read and written. About 15 operations per parameter.
  """
  n, parts = c.models * shapes.num_params(c.model), c.train.accumulate
  sums = parts if parts > 1 else 0
  return Work(n * (15 + sums), 4 * n * (8 + 3 * sums))


def outer_work(c: Config) -> Work:
  """Counts 1/H of the sends, updates and merges of all fragments."""
  if c.one_model:
    return Work(0, 0)
  parameters = shapes.parameters(c.model)
  moved = sum(outer_bytes(c, f.shapes(parameters)) for f in c.make_fragments())
  # About 6 operations per value of a replica, 6 of the outer optimizer.
  operations = 6 * (c.replicas + 1) * shapes.num_params(c.model)
  return times(1 / c.sync_every, Work(operations, moved))


def plus(a: Work, b: Work) -> Work:
  return Work(a.flops + b.flops, a.nbytes + b.nbytes)


def times(k: float, work: Work) -> Work:
  return Work(k * work.flops, k * work.nbytes)


def measure_roofs() -> Roofs:
  """Measures a float32 product of 2048 x 2048, and copies of 256 MiB and of 1 MiB.

  The fastest of ten counts, because a roof is what the device can do at most.
  """

  @jax.jit
  def add_ones(x, repeats):  # XLA does not know `repeats`, and cannot fuse the passes.
    return jax.lax.fori_loop(0, repeats, lambda _, x: x + 1, x)

  def fastest(f: Callable, *args) -> float:
    timed(f, *args)  # Compiles.
    return min(timed(f, *args) for _ in range(10))

  def bandwidth(mebibytes: int, passes: int) -> float:
    x = jnp.ones(mebibytes * 2**18, jnp.float32)
    return 2 * passes * x.nbytes / fastest(add_ones, x, passes)

  x = jax.random.normal(jax.random.key(0), (2048, 2048))
  product = fastest(jax.jit(jnp.matmul), x, x)
  return Roofs(2 * 2048**3 / product, bandwidth(256, 6), bandwidth(1, 1000))


def measure(c: Config) -> tuple[dict[str, float], float]:
  """Measures each part of a step in programs of its own, and the whole inner step.

  Returns:
    Seconds per step of each part of all replicas, and of one inner step.
  """
  bench = Bench(c)
  made = programs(c, bench)
  timers = [functools.partial(timed, f, *args) for _, f, args in made.values()]
  *seconds, step = in_turn(*timers, bench.inner)
  found = {name: part[0] * s for (name, part), s in zip(made.items(), seconds)}
  # The sum of microbatches belongs to the optimizer's work.
  found[OPTIMIZER] += found.pop("sum")
  if c.one_model:
    return found, step
  ms, theta = outer_times(bench), bench.state.outer.theta[0]
  outer = 1e-3 * (ms["send"] + ms["update"] + ms["merge"])
  share = sum(x.size for x in jax.tree.leaves(theta)) / shapes.num_params(c.model)
  return found | {OUTER: outer / share / c.sync_every}, step


def programs(c: Config, bench: Bench) -> dict[str, tuple[float, Callable, tuple]]:
  """Makes {part: (calls per step, compiled function, arguments)}.

  A function computes a part of one microbatch of one layer, forward and backward.
  """
  m, parts = c.model, c.models * c.train.accumulate
  rows = c.train.batch_size // parts
  rng, wide = np.random.default_rng(0), m.ff_dim
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), m.dtype) / shape[0] ** 0.5
  x_TxD = array(rows * m.seq_len, m.dim)
  heads = array(rows, m.seq_len, m.num_heads, m.dim // m.num_heads)
  layers = m.num_layers * parts
  found = {
    ATTENTION: (layers, project, (x_TxD, *[array(m.dim, m.dim) for _ in range(4)])),
    SCORES: (layers, lambda *qkv: attention.attend(m, *qkv, None), (heads,) * 3),
    FEED_FORWARD: (layers, feed, (x_TxD, array(m.dim, wide), array(wide, m.dim))),
    NORMS: (layers, functools.partial(element_wise, m.qk_norm), (x_TxD,) * 3),
  }
  made = {
    name: (calls, both_ways(f, m.remat == "full"), args)
    for name, (calls, f, args) in found.items()
  }

  def objective(x_BxLxD, head_VxD, targets_BxL):
    return loss.objective(x_BxLxD, head_VxD, targets_BxL, m.z_loss, m.loss_chunk)

  args = x_TxD.reshape(rows, m.seq_len, m.dim), array(m.vocab_size, m.dim)
  targets = jnp.asarray(rng.integers(0, m.vocab_size, (rows, m.seq_len)), jnp.int32)
  gradient = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))
  made[LOSS] = (parts, gradient, (*args, targets))

  def update(grads, opt_state, params):
    updates, opt_state = optimizers.make_inner(c).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, optax.tree.norm(grads)

  # The inner step donates its arguments, so these are copies.
  params, opt_state = jax.tree.map(jnp.copy, (bench.params, bench.opt_state))
  made[OPTIMIZER] = (1, jax.jit(jax.vmap(update)), (params, opt_state, params))
  add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
  sums = c.train.accumulate if c.train.accumulate > 1 else 0
  made["sum"] = (sums, add, (params, params))
  return made


def both_ways(f: Callable, recompute: bool) -> Callable:
  """Compiles a function with its gradients; `recompute` runs it forward twice."""
  again = jax.checkpoint(f) if recompute else f

  def run(*args):
    y, backward = jax.vjp(again, *args)
    return y, backward(y)

  return jax.jit(run)


def project(x_TxD, q_DxD, k_DxD, v_DxD, out_DxD):
  return x_TxD @ q_DxD, x_TxD @ k_DxD, x_TxD @ v_DxD, x_TxD @ out_DxD


def feed(x_TxD, up_DxF, down_FxD):
  return jax.nn.gelu(x_TxD @ up_DxF) @ down_FxD


def element_wise(qk_norm: bool, x_TxD, attended_TxD, fed_TxD):
  """Computes a block's norms and residual sums."""
  norm = functools.partial(jax.nn.standardize, axis=-1, epsilon=1e-6)
  x_TxD += norm(x_TxD) + attended_TxD
  more = norm(attended_TxD) + norm(fed_TxD) if qk_norm else 0
  return x_TxD + norm(x_TxD) + fed_TxD + more


def table(work: dict[str, Work], columns: dict[str, dict[str, float]]) -> list[str]:
  """Lists the parts with FLOPs and bytes, and of each column time and speed.

  Args:
    columns: {head: {part: seconds}}; all have the same parts.
  """
  head = f"{'':<32}{'GFLOP':>11}{'MB':>11}{'FLOP/byte':>11}"
  lines = [head + "".join(f"{f'{name}, GFLOP/s':>23}" for name in columns)]

  def line(name: str, w: Work, seconds: list[float]) -> str:
    cells = (f"{1e3 * s:>11.2f} ms{w.flops / s / 1e9:>9,.0f}" for s in seconds)
    counts = f"{w.flops / 1e9:>11,.2f}{w.nbytes / 1e6:>11,.1f}"
    return f"{name:<32}{counts}{w.flops / w.nbytes:>11.1f}" + "".join(cells)

  for name, w in work.items():
    lines.append(line(name, w, [column[name] for column in columns.values()]))
  totals = [sum(column.values()) for column in columns.values()]
  return [*lines, line("all parts", functools.reduce(plus, work.values()), totals)]


def mfu(c: Config, seconds: float, peak: float) -> float:
  """Returns the share of the peak FLOP/s that the products of training take."""
  return shapes.flops_per_token(c.model) * c.tokens_per_step / (seconds * peak)


def draw(
  axes: Axes, roofs: Roofs, work: dict[str, Work], seconds: dict[str, float]
) -> None:
  """Draws roofs, and the parts as disks whose area is their share of the time."""
  x = np.geomspace(0.1, 5000, 200)
  for bandwidth, style, name in (
    (roofs.memory, "-", "memory"),
    (roofs.caches, ":", "caches"),
  ):
    if bandwidth:
      y = np.minimum(roofs.flops, bandwidth * x)
      label = f"{name}: {bandwidth / 1e9:,.0f} GB/s"
      axes.plot(x, y / 1e9, style, color="black", label=label)
  axes.plot([], [], " ", label=f"products: {roofs.flops / 1e9:,.0f} GFLOP/s")
  all_seconds = sum(seconds.values())
  for name, w in work.items():
    area = 10 + 500 * seconds[name] / all_seconds
    speed, color = w.flops / seconds[name] / 1e9, COLORS[name]
    axes.scatter(w.flops / w.nbytes, speed, area, color=color, alpha=0.7, zorder=3)
  axes.set(xscale="log", yscale="log", xlim=(0.1, 5000))
  axes.set_ylim(top=2.5 * roofs.flops / 1e9)  # Circles at the roof are whole.
  axes.set(xlabel="FLOP per byte", ylabel="GFLOP/s")
  # Below the panel: a roof or a disk may lie anywhere in it.
  axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)


def whole_figure(
  panels: dict[str, tuple[Roofs, dict[str, Work], dict[str, float]]],
) -> Figure:
  """Draws a panel for each {title: the arguments of `draw`}."""
  title = "A step's parts under the roofs; area: share of the step's time"
  figure, all_axes = palette.panels(title, [*panels], 3.4)
  for axes, of_panel in zip(all_axes, panels.values()):
    draw(axes, *of_panel)
  marks = [
    Line2D([], [], marker="o", linestyle="", color=COLORS[name], label=name)
    for name in PARTS
  ]
  figure.legend(handles=marks, loc="outside lower center", ncols=4)
  return figure


def main(argv) -> None:
  del argv
  c, big = (resolve(f) for f in (flags.FLAGS.config, flags.FLAGS.predict))
  out = pathlib.Path(flags.FLAGS.out)
  check_picture(out, "roofline.png")
  kind = jax.devices()[0].device_kind
  roofs, work = measure_roofs(), count(c, keeps_scores=True)
  seconds, step = measure(c)
  print_devices()
  print(
    f"product {roofs.flops / 1e9:,.0f} GFLOP/s, copy {roofs.memory / 1e9:.1f} GB/s in"
    f" memory, {(roofs.caches or 0) / 1e9:.1f} GB/s in caches"
  )
  print(*table(work, {"measured": seconds}), sep="\n")
  inner = sum(s for name, s in seconds.items() if name != OUTER)
  print(
    f"inner step {1e3 * step:.2f} ms, its parts alone {1e3 * inner:.2f} ms; MFU"
    f" {mfu(c, step, roofs.flops):.0%} of the measured product"
  )
  predicted = count(big, keeps_scores=False)
  chips = {
    name: Roofs(hardware.peak_flops(kind) or math.nan, bandwidth)
    for name, (kind, bandwidth) in DEVICES.items()
  }
  times_of = {
    name: {part: chip.seconds(w) for part, w in predicted.items()}
    for name, chip in chips.items()
  }
  print(*table(predicted, times_of), sep="\n")
  for name, chip in chips.items():
    most = mfu(big, sum(times_of[name].values()), chip.flops)
    print(f"{name}: MFU {most:.0%} if every part is as fast as its roof allows")

  title = "{:,.3g}M parameters, {},\n{}"
  millions = [shapes.num_params(x.model) / 1e6 for x in (c, big)]
  panels = {title.format(millions[0], kind, "measured"): (roofs, work, seconds)}
  for name, chip in chips.items():
    text = title.format(millions[1], name, "predicted")
    panels[text] = (chip, predicted, times_of[name])
  palette.save(lambda: whole_figure(panels), out)
  print(f"wrote {out}")


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", "configs/batch_32.py", "Step to measure.")
  config_flags.DEFINE_config_file(
    "predict", "configs/chinchilla.py:335M,M=2", "Step to count."
  )
  flags.DEFINE_string("out", "roofline.png", "Picture to write.")
  command_line.run(main)
