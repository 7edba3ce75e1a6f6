"""A ladder of tiny models on the embedded text, for two CPU cores.

  python -m diloco.sweep --sweep=configs/ladder.py --results=/tmp/ladder --parallel=2

The procedure of Scaling Laws for DiLoCo (arXiv 2503.09799) in miniature: six sizes,
data-parallel and DiLoCo with M = 1, 2, 4, every cell tuned until its best point is
interior, then ablations of H, of the outer rate and of overtraining. The budget is
D = 2 N tokens where the paper has 20 N, H is 10 where it has 30, and each larger size
starts from the best point of the one before. docs/ladder.md has the results.
"""

from diloco.config import default_config
from diloco.sweep.grid import Axis, Grid, Point, Sweep, power

# Layers, heads and width of each size, named by its parameters.
SIZES = {
  "105k": (3, 2, 32),
  "142k": (3, 2, 40),
  "185k": (3, 3, 48),
  "269k": (4, 4, 56),
  "382k": (5, 4, 64),
  "554k": (5, 5, 80),
}
TOKENS_PER_PARAMETER = 2
LENGTH, VOCABULARY = 64, 2048
ROOT2 = 2**0.5


def get_config(point: Point):
  """The config of a point: size, algorithm, replicas, lr, batch and, of DiLoCo,
  outer_lr; sync_every, overtrain and seed where they are varied."""
  layers, heads, width = SIZES[point["size"]]
  c = default_config()
  c.algorithm, c.replicas = point["algorithm"], point["replicas"]
  c.sync_every = point.get("sync_every", 10)
  c.seed = point.get("seed", 0)
  # Rounds are few, so the outer momentum has to be shorter than the papers' 0.9.
  c.outer.learning_rate, c.outer.momentum = point.get("outer_lr", 0.6), 0.5
  c.model.num_layers, c.model.num_heads, c.model.dim = layers, heads, width
  c.model.vocab_size, c.model.seq_len = VOCABULARY, LENGTH
  c.model.dtype, c.model.remat = "float32", True

  params = 12 * layers * width**2 + VOCABULARY * width
  budget = TOKENS_PER_PARAMETER * params * point.get("overtrain", 1)
  c.train.batch_size = point["batch"]
  c.train.steps = round(budget / (point["batch"] * LENGTH))
  c.inner.learning_rate = point["lr"]
  c.inner.warmup_steps = c.train.steps // 10

  c.data.shuffle_window = 256
  c.eval.tokens, c.eval.batch_size = 32_768, 64
  c.checkpoint.every, c.checkpoint.keep = 400, 1
  c.log.every, c.log.tensorboard, c.log.sample_tokens = 10, False, 0
  return c


def get_sweep() -> Sweep:
  lr = Axis("lr", (power(ROOT2, -13),), ratio=ROOT2)
  batch = Axis("batch", (8,), ratio=2, low=4)
  outer = Axis("outer_lr", (0.2, 0.4, 0.6, 0.8, 1.0), first=(0.6,))
  algorithms = [{"algorithm": "data_parallel", "replicas": 1}]
  diloco = [{"algorithm": "diloco", "replicas": m} for m in (1, 2, 4)]

  def cells(size: str, some, **more) -> list[Point]:
    return [{"size": size, **a, **more} for a in some]

  def from_size(size: str):
    return lambda cell: {**cell, "size": size}

  def without(name: str):
    return lambda cell: {k: v for k, v in cell.items() if k != name}

  everyone = algorithms + diloco

  def cadences(size: str, *every: int) -> list[Point]:
    return [c for h in every for c in cells(size, diloco, sync_every=h)]

  def longer(size: str, multiple: int) -> list[Point]:
    return cells(size, everyone, overtrain=multiple)

  larger = ("142k", "185k", "269k")
  some = [algorithms[0], diloco[1]]
  seeds = [c for s in (1, 2) for c in cells("105k", some, seed=s)]
  return Sweep(
    config=get_config,
    environment={"XLA_FLAGS": "--xla_backend_optimization_level=1"},
    grids=[
      # Every size first, then what explains, then more tuning: whenever the sweep is
      # stopped, what is there can be read. Up to `cadence` all is at B = 8.
      Grid("smallest lr", cells("105k", everyone), (lr, Axis("batch", (8,)))),
      Grid(
        "sizes",
        [c for size in larger for c in cells(size, everyone)],
        (),
        from_size("105k"),
      ),
      Grid("overtrain", longer("105k", 4), (), without("overtrain")),
      Grid("seeds", seeds, (), without("seed")),
      Grid("382k", cells("382k", everyone), (), from_size("105k")),
      Grid("cadence", cadences("105k", 1, 30), (outer,), without("sync_every")),
      Grid("batch dp", cells("105k", algorithms), (lr, batch)),
      Grid("batch", cells("105k", diloco), (batch, outer), from_size("105k")),
      Grid("lr 185k", cells("185k", everyone), (lr,), from_size("185k")),
      Grid("lr 269k", cells("269k", everyone), (lr,), from_size("185k")),
      Grid("lr 382k", cells("382k", everyone), (lr,), from_size("269k")),
      Grid("lr 142k", cells("142k", everyone), (lr,), from_size("185k")),
      Grid("554k", cells("554k", everyone), (), from_size("382k")),
      Grid("all 105k", cells("105k", diloco), (lr, batch, outer), from_size("105k")),
      Grid("overtrain 185k", longer("185k", 4), (), without("overtrain")),
      Grid("cadence 5", cadences("105k", 5), (outer,), without("sync_every")),
      Grid("overtrain 16", longer("105k", 16), (), without("overtrain")),
      Grid("cadence 185k", cadences("185k", 1, 30), (outer,), without("sync_every")),
      Grid("batch dp 185k", cells("185k", algorithms), (lr, batch)),
      Grid("batch 185k", cells("185k", diloco), (lr, batch, outer), from_size("185k")),
    ],
  )
