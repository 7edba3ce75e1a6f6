"""A ladder of tiny models on the embedded text, for two CPU cores.

  python -m diloco.sweep --sweep=configs/ladder.py --results=/tmp/ladder --parallel=2

The procedure of Scaling Laws for DiLoCo (arXiv 2503.09799) in miniature: five sizes,
data-parallel and DiLoCo with M = 1, 2, 4, every cell tuned until its best point is
interior, then ablations of H, of the outer rate and of overtraining. The budget is
D = 2 N tokens where the paper has 20 N, H is 10 where it has 30, and each larger size
starts from the best point of the one before. docs/ladder.md has the results.
"""

from diloco.config import default_config
from diloco.sweep.grid import Axis, Grid, Point, Sweep, power

# Size: layers, heads, width; with a vocabulary of 2,048 N is 0.1M to 0.55M.
SIZES = {
  "s1": (3, 2, 32),
  "s2": (3, 3, 48),
  "s3": (4, 4, 56),
  "s4": (5, 4, 64),
  "s5": (5, 5, 80),
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
  cadences = [c for h in (1, 5, 30) for c in cells("s1", diloco, sync_every=h)]
  seeds = [c for s in (1, 2) for c in cells("s1", everyone, seed=s)]
  return Sweep(
    config=get_config,
    environment={"XLA_FLAGS": "--xla_backend_optimization_level=1"},
    grids=[
      # Every size first, then what explains, then more tuning: whenever the sweep is
      # stopped, what is there can be read.
      Grid("s1 lr", cells("s1", everyone), (lr, Axis("batch", (8,)))),
      Grid("s2", cells("s2", everyone), (), from_size("s1")),
      Grid("s3", cells("s3", everyone), (), from_size("s1")),
      Grid("s4", cells("s4", everyone), (), from_size("s1")),
      Grid("s1 dp", cells("s1", algorithms), (lr, batch)),
      Grid("s1", cells("s1", diloco), (lr, batch, outer)),
      Grid("s5", cells("s5", everyone), (), from_size("s1")),
      Grid("overtrain", cells("s1", everyone, overtrain=4), (), without("overtrain")),
      Grid("cadence", cadences, (outer,), without("sync_every")),
      Grid("seeds", seeds, (), without("seed")),
      Grid("s2 dp", cells("s2", algorithms), (lr, batch), from_size("s1")),
      Grid("s2 tuned", cells("s2", diloco), (lr, batch, outer), from_size("s1")),
      Grid(
        "overtrain s2", cells("s2", everyone, overtrain=4), (), without("overtrain")
      ),
      Grid(
        "cadence s2",
        [{**c, "size": "s2"} for c in cadences],
        (outer,),
        without("sync_every"),
      ),
      Grid(
        "overtrain 16", cells("s1", everyone, overtrain=16), (), without("overtrain")
      ),
      Grid("s3 tuned", cells("s3", everyone), (lr, batch), from_size("s2")),
      Grid("s4 tuned", cells("s4", everyone), (lr,), from_size("s3")),
      Grid("s5 tuned", cells("s5", everyone), (), from_size("s4")),
    ],
  )
