"""A ladder of tiny models on the embedded text, for two CPU cores.

  python -m diloco.sweep --sweep=configs/ladder.py --results=/tmp/ladder --parallel=2

The procedure of Scaling Laws for DiLoCo (arXiv 2503.09799) in miniature: five sizes,
data-parallel and DiLoCo with M = 1, 2, 4, tuned until the best point is interior: in
rate, batch and outer rate at the smallest size, in the rate at larger ones, whose first
point is a smaller one's best. Then H, seeds and overtraining. The budget is D = 6 N
tokens where the paper has 20 N, H is 10 where it has 30; docs/ladder.md has results.
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
}
TOKENS_PER_PARAMETER = 6
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
  # A multiple of every H below: the last sync is after the last inner step.
  c.train.steps = 30 * round(budget / (point["batch"] * LENGTH * 30))
  c.inner.learning_rate = point["lr"]
  c.inner.warmup_steps = c.train.steps // 10

  c.data.shuffle_window = 256
  c.eval.tokens, c.eval.batch_size = 65_536, 64
  c.checkpoint.every, c.checkpoint.keep = 400, 1
  c.log.every, c.log.tensorboard, c.log.sample_tokens = 10, False, 0
  return c


def get_sweep() -> Sweep:
  lr = Axis("lr", (power(ROOT2, -13),), ratio=ROOT2)
  outer = Axis("outer_lr", (0.2, 0.4, 0.6, 0.8, 1.0), first=(0.6,))
  at_4 = Axis("batch", (4,))
  data_parallel = [{"algorithm": "data_parallel", "replicas": 1}]
  diloco = [{"algorithm": "diloco", "replicas": m} for m in (1, 2, 4)]
  everyone = data_parallel + diloco

  def cells(size: str, some, **more) -> list[Point]:
    return [{"size": size, **a, **more} for a in some]

  def from_size(size: str):
    return lambda cell: {**cell, "size": size}

  def without(name: str):
    return lambda cell: {k: v for k, v in cell.items() if k != name}

  def cadences(size: str, *every: int) -> list[Point]:
    return [c for h in every for c in cells(size, diloco, sync_every=h)]

  def seeds(size: str) -> list[Point]:
    return [c for s in (1, 2) for c in cells(size, everyone, seed=s)]

  # A batch has a sequence for every replica.
  batches = {m: Axis("batch", (4,), ratio=2, low=m) for m in (1, 2, 4)}
  same = from_size("105k")
  tuned = [
    Grid("all dp", cells("105k", data_parallel), (lr, batches[1]), same),
    *(
      Grid(f"all M={m}", cells("105k", [cell]), (lr, batches[m], outer), same)
      for m, cell in zip(batches, diloco)
    ),
  ]

  return Sweep(
    config=get_config,
    environment={"XLA_FLAGS": "--xla_backend_optimization_level=1"},
    grids=[
      # Every size first, then what explains, then more tuning: whenever the sweep is
      # stopped, what is there can be read.
      Grid("smallest", cells("105k", everyone), (lr, at_4)),
      Grid("142k", cells("142k", everyone), (), from_size("105k")),
      Grid("185k", cells("185k", everyone), (), from_size("105k")),
      Grid("269k", cells("269k", everyone), (), from_size("105k")),
      Grid("cadence", cadences("105k", 1, 30), (outer,), without("sync_every")),
      Grid("382k", cells("382k", everyone), (), from_size("185k")),
      Grid("seeds", seeds("105k"), (), without("seed")),
      *tuned,
      Grid("lr 185k", cells("185k", everyone), (lr,), from_size("185k")),
      # The smallest size's rates are too high for the largest with M = 2 and 4.
      Grid("lr 382k", cells("382k", diloco[1:]), (lr,), from_size("185k")),
      Grid("lr 269k", cells("269k", diloco[1:]), (lr,), from_size("185k")),
      Grid("overtrain", cells("105k", everyone, overtrain=4), (), without("overtrain")),
      Grid("lr 142k", cells("142k", diloco[1:]), (lr,), from_size("185k")),
    ],
  )
