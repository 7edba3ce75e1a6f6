"""A sweep over a ladder of tiny models, for two CPU cores: does the gap shrink with N?

  python -m diloco sweep --sweep=ladder:text=arrays:/tmp/text/tokens \
    --results=/tmp/ladder --parallel=2 --cores=1
  python -m diloco sweep --sweep=ladder:size=35M --dry_run

With a size of the paper (35M to 2.4B), or with size=all, this is the paper's own sweep
(section 3.1) of data-parallel and DiLoCo with M = 1, 2, 4, 8. Inner rates are powers of
sqrt 2, batches are powers of 2, and outer rates are the paper's grid. Outer rates below
0.2 and above 1.0 are ours. Each search starts at the values of the paper's laws for its
size and M, and ends when its best point is interior. To fit the laws of section 4 to
the results: `sweep --export=runs.csv --results=...`, then `scaling_laws fit runs.csv`.

Without a size, the sweep repeats the paper's procedure (arXiv 2503.09799) with six tiny
sizes, for data-parallel and DiLoCo with M = 1, 2, 4. At the two smallest sizes, inner
rate, batch and outer rate are tuned until the best point is not on the edge of the
grid. At larger sizes, only the inner rate is tuned; at 382k, also the outer rate of
M = 2 and 4. Seed 0 chooses the settings; three more seeds repeat every best point, and
the report has only these three. Runs have D = 6 N tokens (paper: 20 N) and H = 10
(paper: 30). docs/ladder.md has the results and names the text. Without text=, runs read
the shipped text, and the two largest sizes read parts of it twice.

With momentum=tuned, the sweep has only data-parallel and M = 4 at three sizes, and
tunes inner rate, batch, outer rate and outer momentum at each size.
"""

import dataclasses
import functools
from collections.abc import Sequence

from ml_collections import ConfigDict

from diloco.config import default_config
from diloco.errors import ConfigError
from diloco.spec.shapes import matrix_params
from diloco.sweep.chart import LOSS, PLAIN, Chart
from diloco.sweep.grid import Axis, Grid, Point, Sweep, exponent, power
from diloco.util.command import load_module, parse_options

# {size in thousands of parameters: (layers, heads, width)}. The two largest sizes do
# not count positions and norms.
SIZES = {
  105: (3, 2, 32),
  185: (3, 3, 48),
  269: (4, 4, 56),
  382: (5, 4, 64),
  625: (6, 5, 80),
  1081: (8, 6, 96),
}
TOKENS_PER_PARAMETER = 6
LENGTH, VOCABULARY = 64, 2048
ROOT2 = 2**0.5
# The sizes that the paper tuned. The outer rates: the paper's 0.2 to 1.0 (section 3.1),
# and our smaller and larger rates.
PAPER = load_module("chinchilla", "get_config", "configs/chinchilla.py")
PAPER_SIZES = ("35M", "90M", "180M", "330M", "550M", "1.3B", "2.4B")
OUTER_RATES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
# With momentum=tuned, {size: values to try first: (inner rate as power of ROOT2, batch)
# of data-parallel; (inner rate, batch, momentum, outer_step) of M = 4}.
FIRST = {
  105: ((-13, 8), (-13, 8, 0.5, 1.6)),
  185: ((-12, 4), (-11, 8, 0.5, 1.6)),
  382: ((-15, 8), (-15, 8, 0.7, 2.0)),
}
# outer_step is the outer rate over (1 - momentum): the length of an outer step if the
# outer gradient stays the same. Its best value depends little on the momentum, and the
# best outer rate much.
OUTER_AXES = {
  "momentum": (0.0, 0.3, 0.5, 0.7, 0.9),
  "outer_step": (0.8, 1.2, 1.6, 2.0, 2.4, 2.8, 3.4, 4.0, 4.8),
}
CHART = Chart(
  "A ladder of tiny models (2503.09799, figure 2)",
  "size",
  ("algorithm", "replicas"),
  "thousands of parameters",
  log=True,
  y=(("loss", LOSS), ("more", "above data-parallel (%)")),
  against=PLAIN,
)
PAPER_CHART = dataclasses.replace(
  CHART,
  title="Scaling Laws for DiLoCo (2503.09799, figure 2, table 4)",
  xlabel="size",
  log=False,
)


def get_config(point: Point, text: str = "sotu"):
  """Makes the config of a point; the run trains on `text`, a data.source.

  A point has size, algorithm, replicas, lr and batch. It may have seed, and outer_lr or
  both momentum and outer_step.
  """
  layers, heads, width = SIZES[point["size"]]
  c = default_config()
  c.algorithm, c.replicas = point["algorithm"], point["replicas"]
  c.sync_every = 10
  c.seed = point.get("seed", 0)
  # The papers use momentum 0.9; runs with few rounds need less momentum.
  momentum = point.get("momentum", 0.5)
  c.outer.optimizer = f"sgd(momentum={momentum}, nesterov=True)"
  c.outer.learning_rate = point.get("outer_lr", 0.6)
  if "outer_step" in point:
    c.outer.learning_rate = point["outer_step"] * (1 - momentum)
  c.model.num_layers, c.model.num_heads, c.model.dim = layers, heads, width
  c.model.vocab_size, c.model.seq_len = VOCABULARY, LENGTH
  c.model.dtype, c.model.remat = "float32", "full"

  params = matrix_params(c.model)
  batch, h = point["batch"], c.sync_every
  c.train.batch_size = batch
  # A multiple of H, so the last sync follows the last inner step.
  c.train.steps = h * round(TOKENS_PER_PARAMETER * params / (batch * LENGTH * h))
  c.inner.learning_rate = point["lr"]
  c.inner.warmup_steps = c.train.steps // 10

  # -1 shuffles all sequences. With windows of 1,024, each replica would see few
  # documents for hundreds of steps.
  c.data.source, c.data.shuffle_window = text, -1
  # With this number of shards, runs with equal batch but different M see the same
  # sequences in every step.
  c.data.shards = min(4, batch)
  # The first held-out tokens choose the settings; the next tokens are reported.
  c.eval.tokens, c.eval.test_tokens, c.eval.batch_size = 65_536, 65_536, 64
  c.checkpoint.every, c.checkpoint.keep = 400, 1
  c.log.every, c.log.tensorboard, c.log.sample_tokens = 10, False, 0
  return c


def get_sweep(argument: str = "") -> Sweep:
  """Makes the sweep.

  The argument has either size=SIZE alone (a size of the paper, or all), or any of
  text=SOURCE (a data.source), seeds=N and momentum=tuned.
  """
  sizes = (*PAPER_SIZES, "all")
  known = {"size": sizes, "text": str, "seeds": int, "momentum": ("tuned",)}
  options = parse_options(argument, known)
  if "size" in options:
    if len(options) > 1:
      raise ConfigError(
        f"the sweep's argument is {argument!r}; give size alone, and the text as"
        " --config.data.source=..."
      )
    asked = options["size"]
    return paper_sweep(PAPER_SIZES if asked == "all" else (asked,))
  text, seeds = options.get("text", "sotu"), options.get("seeds", 3)
  if seeds < 1:
    raise ConfigError(f"the sweep's argument has seeds={seeds}; write 1 or more.")
  lr = Axis("lr", (power(ROOT2, -13),), ratio=ROOT2)
  outer = Axis("outer_lr", (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4), first=(0.6,))
  data_parallel = {"algorithm": "data_parallel", "replicas": 1}
  diloco = [{"algorithm": "diloco", "replicas": m} for m in (1, 2, 4)]
  everyone = [data_parallel, *diloco]

  def cells(size: int, some, **more) -> list[Point]:
    return [{"size": size, **a, **more} for a in some]

  def from_size(size: int):
    return lambda cell: {**cell, "size": size}

  def everything(size: int) -> list[Grid]:
    """Tunes all axes at a size, starting from the best point of 105k."""
    return [
      Grid(
        f"all {size}k M={cell['replicas']} {cell['algorithm']}",
        cells(size, [cell]),
        # A batch has at least one sequence per replica.
        (
          lr,
          Axis("batch", (4,), ratio=2, low=cell["replicas"]),
          *([outer] if cell in diloco else []),
        ),
        from_size(105),
      )
      for cell in everyone
    ]

  def rates(size: int, smaller: int) -> Grid:
    """Tunes the inner rate at a size, starting from the best point of a smaller size.

    The best rate falls as the size grows. A search with one seed that starts far from
    the best rate may end at a rate whose neighbours are worse by chance.
    """
    return Grid(f"lr {size}k", cells(size, everyone), (lr,), from_size(smaller))

  def repeats(size: int, some: Sequence[Point] = everyone) -> Grid:
    """Repeats the best point of every cell of a size."""
    seeded = [c for seed in range(1, seeds + 1) for c in cells(size, some, seed=seed)]
    first = lambda cell: {k: v for k, v in cell.items() if k != "seed"}
    return Grid(f"seeds {size}k", seeded, (), first)

  def momenta(size: int) -> list[Grid]:
    """Tunes all axes and the outer momentum of data-parallel and M = 4 at a size."""
    pair, grids = [data_parallel, diloco[-1]], list[Grid]()
    for cell, (k, batch, *values) in zip(pair, FIRST[size]):
      axes = [Axis("lr", (power(ROOT2, k),), ratio=ROOT2)]
      axes.append(Axis("batch", (batch,), ratio=2, low=cell["replicas"]))
      axes += [
        Axis(name, OUTER_AXES[name], first=(value,))
        for name, value in zip(OUTER_AXES, values)
      ]
      grids.append(Grid(f"{size}k M={cell['replicas']}", cells(size, [cell]), axes))
    return [*grids, repeats(size, pair)]

  grids = [
    Grid("ladder", cells(105, everyone), (lr, Axis("batch", (4,)))),
    *everything(105),
    *everything(185),
    rates(269, 185),
    rates(382, 269),
    Grid("outer 382k", cells(382, diloco[1:]), (outer,), lambda cell: cell),
    # Smaller sizes end first, because the two largest take most of the time.
    *(repeats(size) for size in SIZES if size < 625),
    rates(625, 382),
    repeats(625),
    rates(1081, 625),
    repeats(1081),
  ]
  if "momentum" in options:
    grids = [grid for size in FIRST for grid in momenta(size)]
  return Sweep(
    config=functools.partial(get_config, text=text),
    chart=CHART,
    environment={"XLA_FLAGS": "--xla_backend_optimization_level=1"},
    grids=grids,
  )


def paper_config(point: Point) -> ConfigDict:
  """Makes the config of a point of the paper's sweep.

  If the point lacks a rate or the batch, its value comes from the paper's laws.
  """
  c = PAPER.get_config(
    f"{point['size']},algorithm={point['algorithm']},M={point['replicas']}"
  )
  c.inner.learning_rate = point.get("lr", c.inner.learning_rate)
  c.outer.learning_rate = point.get("outer_lr", c.outer.learning_rate)
  c.train.batch_size = point.get("batch", c.train.batch_size)
  c.eval.test_tokens = c.eval.tokens  # So that no rate is chosen by the reported loss.
  return c


def paper_sweep(sizes: Sequence[str]) -> Sweep:
  """Makes the sweep of the paper's section 3.1 for some of its sizes."""
  grids = []
  for size in sizes:
    for m in (0, 1, 2, 4, 8):
      kind = {"algorithm": "diloco" if m else "data_parallel", "replicas": max(m, 1)}
      cell = {"size": size, **kind}
      c = paper_config(cell)
      near = exponent(ROOT2, c.inner.learning_rate)
      axes = [
        Axis("lr", (power(ROOT2, near),), ratio=ROOT2),
        # A batch has at least one sequence per replica.
        Axis("batch", (c.train.batch_size,), ratio=2, low=kind["replicas"]),
      ]
      if m:
        axes.append(Axis("outer_lr", OUTER_RATES, first=(c.outer.learning_rate,)))
      grids.append(Grid(f"{size} M={m or 1} {kind['algorithm']}", [cell], axes))
  return Sweep(paper_config, grids, chart=PAPER_CHART)
