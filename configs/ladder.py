"""A ladder of tiny models on State of the Union texts, for two CPU cores.

  python -m diloco.sweep --sweep=configs/ladder.py --results=/tmp/ladder --parallel=2

Repeats the procedure of Scaling Laws for DiLoCo (arXiv 2503.09799) with seven tiny
sizes, data-parallel and DiLoCo with M = 1, 2, 4. At two sizes the learning rate, batch
and outer learning rate are tuned until the best point is not on the edge of the grid;
at three more sizes the learning rate is tuned, and at 382k also the outer one of M = 2
and 4. The two largest sizes take the best point of 382k. Other runs vary H, seed and
budget. D = 6 N tokens (paper: 20 N), H = 10 (paper: 30). Results: docs/ladder.md.
"""

from diloco.config import default_config
from diloco.model.shapes import matrix_params
from diloco.sweep.grid import Axis, Grid, Point, Sweep, power

# Layers, heads and width. The names of the two largest leave out positions and norms.
SIZES = {
  "105k": (3, 2, 32),
  "142k": (3, 2, 40),
  "185k": (3, 3, 48),
  "269k": (4, 4, 56),
  "382k": (5, 4, 64),
  "625k": (6, 5, 80),
  "1081k": (8, 6, 96),
}
TOKENS_PER_PARAMETER = 6
LENGTH, VOCABULARY = 64, 2048
ROOT2 = 2**0.5


def get_config(point: Point):
  """Makes the config of a point.

  A point has size, algorithm, replicas, lr and batch. It may also have outer_lr,
  sync_every, overtrain and seed.
  """
  layers, heads, width = SIZES[point["size"]]
  c = default_config()
  c.algorithm, c.replicas = point["algorithm"], point["replicas"]
  c.sync_every = point.get("sync_every", 10)
  c.seed = point.get("seed", 0)
  # The papers use momentum 0.9; runs with few rounds need less.
  c.outer.optimizer = "sgd(momentum=0.5, nesterov=True)"
  c.outer.learning_rate = point.get("outer_lr", 0.6)
  c.model.num_layers, c.model.num_heads, c.model.dim = layers, heads, width
  c.model.vocab_size, c.model.seq_len = VOCABULARY, LENGTH
  c.model.dtype, c.model.remat = "float32", "full"

  params = matrix_params(c.model)
  budget = TOKENS_PER_PARAMETER * params * point.get("overtrain", 1)
  c.train.batch_size = point["batch"]
  # A multiple of every H below, so the last sync follows the last inner step.
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
  data_parallel = {"algorithm": "data_parallel", "replicas": 1}
  diloco = [{"algorithm": "diloco", "replicas": m} for m in (1, 2, 4)]
  everyone = [data_parallel, *diloco]

  def cells(size: str, some, **more) -> list[Point]:
    return [{"size": size, **a, **more} for a in some]

  def from_size(size: str):
    return lambda cell: {**cell, "size": size}

  def without(name: str):
    return lambda cell: {k: v for k, v in cell.items() if k != name}

  def everything(size: str) -> list[Grid]:
    """Tunes all axes at a size, starting from the best point of 105k."""
    return [
      Grid(
        f"all {size} M={cell['replicas']} {cell['algorithm']}",
        cells(size, [cell]),
        # A batch has at least one sequence per replica.
        (
          lr,
          Axis("batch", (4,), ratio=2, low=cell["replicas"]),
          *([outer] if cell in diloco else []),
        ),
        from_size("105k"),
      )
      for cell in everyone
    ]

  def rates(size: str) -> Grid:
    """Tunes the learning rate at a size, starting from the best point of 185k."""
    return Grid(f"lr {size}", cells(size, everyone), (lr,), from_size("185k"))

  def cadences(size: str) -> Grid:
    some = [c for h in (1, 30) for c in cells(size, diloco, sync_every=h)]
    return Grid(f"cadence {size}", some, (outer,), without("sync_every"))

  def overtrained(size: str) -> Grid:
    some = cells(size, everyone, overtrain=4)
    return Grid(f"overtrain {size}", some, (), without("overtrain"))

  seeds = [c for s in (1, 2) for c in cells("105k", everyone, seed=s)]

  return Sweep(
    config=get_config,
    environment={"XLA_FLAGS": "--xla_backend_optimization_level=1"},
    grids=[
      Grid("smallest", cells("105k", everyone), (lr, at_4)),
      *everything("105k"),
      *everything("185k"),
      rates("382k"),
      rates("269k"),
      rates("142k"),
      Grid("1081k", cells("1081k", everyone), (), from_size("382k")),
      Grid("625k", cells("625k", everyone), (), from_size("382k")),
      cadences("105k"),
      Grid("outer 382k", cells("382k", diloco[1:]), (outer,), lambda cell: cell),
      cadences("185k"),
      Grid("seeds", seeds, (), without("seed")),
      overtrained("105k"),
      overtrained("185k"),
    ],
  )
