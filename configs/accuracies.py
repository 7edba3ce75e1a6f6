"""More small ablations of both papers, which can measure accuracy (docs/ablations.md).

  python -m diloco make_items --source=files:TEXT --output=/tmp/items
  python -m diloco sweep --results=runs/a --parallel=2 --cores=1 \
    --sweep=accuracies:bits,seeds=3,items=/tmp/items/word.jsonl

The argument is a name of ABLATIONS, then any of seeds, text (a data.source) and items
(a task for eval.tasks; without items, the runs measure no accuracy). Rates are those of
configs/ablations.py and configs/ladder.py. Seed 0 chose these rates, so seeds begin
with 1 here. The ablation two_texts reads the folder TEXT_of_two, whose training and
held-out splits are texts of different kinds.
"""

import functools
from collections.abc import Sequence

from diloco.config import add_plugins
from diloco.errors import ConfigError
from diloco.reproduce.comparison import curve_name
from diloco.sweep.chart import ACCURACY, EVALUATED, LOSS, PLAIN, Chart
from diloco.sweep.grid import Axis, Grid, Point, Sweep, power
from diloco.util.command import load_module, parse_options

SMALL = load_module("ablations", "get_config", "ablations")
LADDER = load_module("ladder", "get_config", "ladder")
ROOT2 = SMALL.ROOT2
# {size: best inner rates of data-parallel and of DiLoCo with M = 2, as powers of
# ROOT2}, from docs/ladder.md. Streaming takes the rate of DiLoCo.
OF_SIZE = {105: (-11, -10), 185: (-13, -13), 382: (-15, -15)}
# {M: best inner rate as a power of ROOT2, and batch}, for DiLoCo at size 105.
OF_105 = {1: (-12, 4), 2: (-10, 8), 4: (-12, 8)}
# {M, or 0 for data-parallel: (inner rate as a power, outer rate) for batches of 8, 16
# and 32}: the best rates of seed 0 in the ablation `batch` of configs/ablations.py.
OF_BATCH = {
  0: ((-10, 0.8), (-10, 0.8), (-11, 0.8)),
  1: ((-11, 0.6), (-11, 0.8), (-11, 0.6)),
  2: ((-12, 1.0), (-12, 1.0), (-11, 0.6)),
  4: ((-13, 1.2), (-12, 1.2), (-12, 0.8)),
}
# The outer rates that the ablation `rounds` tries: the paper's, and larger rates. The
# search begins at 0.6, or at FIRST = {(size, H): rates} if smaller sizes showed that
# larger rates are better.
RATES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
FIRST = {(382, 30): (0.8,), (382, 300): (1.0, 1.2)}
_M2 = SMALL.replicas(2) + SMALL.streaming([{}])  # Data-parallel, DiLoCo, streaming.
_BOTH = (("loss", LOSS), ("accuracy", ACCURACY))
_MORE = (("loss", LOSS), ("more", "above data-parallel (%)"), ("accuracy", ACCURACY))


def _sizes() -> list[Point]:
  points = [{"size": size, **cell, "outer_lr": 0.6} for size in OF_SIZE for cell in _M2]
  for p in points:
    p["lr"] = power(ROOT2, OF_SIZE[p["size"]][p["replicas"] - 1])
    p["batch"] = 4 if (p["size"], p["replicas"]) == (105, 1) else 8
  return points


def _large_batches() -> list[Point]:
  found = []
  for cell, rates in zip(SMALL.replicas(1, 2, 4), OF_BATCH.values()):
    for batch, (k, outer) in zip((8, 16, 32), rates):
      found.append(cell | {"batch": batch, "lr": power(ROOT2, k), "outer_lr": outer})
  return found


def _rounds() -> list[Point]:
  of_105 = [(105, m, k, batch) for m, (k, batch) in OF_105.items()]
  larger = [(size, 2, k, 8) for size, (_, k) in OF_SIZE.items() if size > 105]
  return [
    {"size": size, "algorithm": "diloco", "replicas": m, "batch": batch}
    | {"lr": power(ROOT2, k), "sync_every": h}
    for h in (5, 30, 300)
    for size, m, k, batch in (*of_105, *larger)
  ]


def _eight_seeds() -> list[Point]:
  """Lists the cells for claims that three seeds left open and that cost little."""
  tau_5, alpha, fragment = {"tau": 5}, {"alpha": 0.5}, {"fragment": 3}
  named = {
    "4 bits": {"compressor": "quantize", "bits": 4},
    "32 bits": {"compressor": "quantize", "bits": 32},
    "τ = 5": tau_5,
    "α = 0.5": alpha,
    "α = 0.5, τ = 5": alpha | tau_5,
    "α = 0.5, τ = 1 and 5": alpha | {"tau_2": 5},
    "3 layers, strided": fragment | {"pattern": "strided"},
    "3 layers, sequential": fragment | {"pattern": "sequential"},
    "6 layers": {"fragment": 6},
  }
  cells = SMALL.streaming([{"name": name, **some} for name, some in named.items()])
  cells.append({"name": "DiLoCo", "algorithm": "diloco", "replicas": 2})
  for cell in SMALL.replicas(1):
    cells.append({"name": curve_name(cell["algorithm"], cell["replicas"]), **cell})
  return cells


def _over_tokens(title: str) -> Chart:
  x = ("overtrain", SMALL.ALGORITHM, "multiple of the tokens")
  return Chart(title, *x, log=True, y=_MORE, against=PLAIN)


_OF_4_BITS = lambda cell: cell["compressor"] == "quantize" or cell["bits"] == 4
EIGHT = ("eight_seeds", "evaluated_by_eight")  # Ablations with 8 or more seeds.
# {name: (cells without seed, how to compare the cells)}. No size means a small run.
ABLATIONS: dict[str, tuple[Sequence[Point], Chart]] = {
  "sizes": (
    _sizes(),
    Chart(
      "Streaming over N (2501.18512, figure 5)",
      "size",
      SMALL.ALGORITHM,
      "thousands of parameters",
      log=True,
      y=_MORE,
      against=PLAIN,
    ),
  ),
  "large_batch": (
    _large_batches(),
    Chart(
      "Accuracy over the batch (2503.09799, figures 3, 5, 15 to 19)",
      "batch",
      SMALL.ALGORITHM,
      "sequences per step, at the best rates",
      log=True,
      y=_BOTH,
    ),
  ),
  "bits": (
    [
      *filter(_OF_4_BITS, SMALL.compressions()),
      *SMALL.streaming([{"compressor": "ties", "bits": 4}]),
    ],
    Chart(
      "Accuracy over bits (2501.18512, figure 11)",
      "bits",
      ("compressor",),
      "bits of a value, or the same bytes",
      log=True,
      y=_BOTH,
    ),
  ),
  "alpha": (
    SMALL.streaming(SMALL.cross(alpha=(0.0, 0.25, 0.5, 0.75, 1.0), tau=(5,))),
    Chart(
      "Mixing (2501.18512, section 2.3)",
      "alpha",
      xlabel="α, the replica's own share; τ = 5",
      y=_BOTH,
    ),
  ),
  "replicas_h": (
    SMALL.streaming(SMALL.cross(replicas=(2, 4), sync_every=(30, 100))),
    Chart(
      "Replicas and H (2501.18512, table 6)",
      "sync_every",
      SMALL.ALGORITHM,
      "inner steps between syncs H",
      log=True,
      y=_BOTH,
    ),
  ),
  "overtrain_streaming": (
    [cell | {"overtrain": times} for cell in _M2 for times in (1, 4)],
    _over_tokens("Overtraining of streaming (2501.18512, table 1)"),
  ),
  "weights": (
    [cell | {"weights": w} for cell in _M2 for w in ("float32", "bfloat16")],
    Chart(
      "Weights of 16 bits (2503.09799, section 3)",
      "weights",
      SMALL.ALGORITHM,
      y=_BOTH,
    ),
  ),
  "streaming_rate": (
    [c | {"outer_lr": r} for c in _M2[1:] for r in (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)],
    Chart(
      "Outer rate of streaming (2501.18512, section 3.2)",
      "outer_lr",
      SMALL.ALGORITHM,
      "outer rate",
      y=_BOTH,
    ),
  ),
  "rounds": (
    _rounds(),
    Chart(
      "Outer rates and H over N (2503.09799, figures 8, 9)",
      "sync_every",
      ("size", "replicas"),
      "inner steps between syncs H",
      log=True,
      y=(("outer_lr", "best outer rate"), ("loss", LOSS)),
      words={"size": {n: f"{n},000 parameters" for n in OF_SIZE}},
    ),
  ),
  "two_texts": (
    [cell | {"overtrain": x, "texts": 2} for cell in (_M2[0], _M2[2]) for x in (1, 4)],
    _over_tokens("Another text than that of training (2503.09799, figure 11)"),
  ),
  EIGHT[0]: (
    _eight_seeds(),
    Chart(
      "Claims that three seeds left open, with eight",
      "name",
      xlabel="streaming with 4 bits and τ = 1, if nothing else is said",
      y=_BOTH,
    ),
  ),
  EIGHT[1]: (
    _eight_seeds()[:1],
    Chart(
      "Evaluated parameters, eight seeds (2501.18512, table 3)",
      EVALUATED,
      xlabel="parameters",
    ),
  ),
}
OPTIONS = {"seeds": int, "text": str, "items": str}


def get_sweep(argument: str = "") -> Sweep:
  """Makes the sweep of an ablation.

  Raises:
    ConfigError: the name or an option is unknown.
  """
  name, _, rest = argument.partition(",")
  if name not in ABLATIONS:
    raise ConfigError(f"the ablation is {name!r}; write one of {', '.join(ABLATIONS)}.")
  (some, chart), options = ABLATIONS[name], parse_options(rest, OPTIONS)
  text, seeds = options.get("text", "sotu"), options.get("seeds", 1)
  if seeds < 1:
    raise ConfigError(f"the argument is {argument!r}; give at least one seed.")
  cells = [
    {"size": "small", **cell, "scored": True, "seed": seed}
    for cell in some
    for seed in range(1, max(seeds, 8 * (name in EIGHT)) + 1)
  ]
  grids = [Grid(name, cells, [])]
  if name == "rounds":
    first = [FIRST.get((cell["size"], cell["sync_every"]), (0.6,)) for cell in cells]
    grids = [
      Grid(
        name,
        [cell for cell, own in zip(cells, first) if own == rates],
        [Axis("outer_lr", RATES, first=rates)],
      )
      for rates in sorted({*first})
    ]
  return Sweep(
    functools.partial(get_config, text=text, items=options.get("items", "")),
    grids,
    {"XLA_FLAGS": "--xla_backend_optimization_level=1"},
    chart,
  )


def get_config(point: Point, text: str = "sotu", items: str = ""):
  """Makes the config of a point, from configs/ablations.py or configs/ladder.py."""
  ties = point.get("compressor") == "ties"
  if point["size"] == "small":
    sent = {"compressor": "topk"} if ties else {}
    c = SMALL.get_config(point | sent, text=text)
  else:
    c = LADDER.get_config(point, text)
    c.sync_every = point.get("sync_every", c.sync_every)
    # After the last inner step, every fragment is synced once more.
    c.outer.final_sync = c.algorithm == "streaming" or "sync_every" in point
    if c.algorithm == "streaming":
      c.fragments.size = 1
  if "texts" in point:
    c.data.source = f"{text}_of_two"
  if ties:
    add_plugins(c, "ties_merging")
    c.outer.average = "ties_merging"
  c.eval.tasks = items
  c.model.param_dtype = point.get("weights", "float32")
  return c
