"""Which settings close the gap of Streaming DiLoCo to data-parallel at 1M parameters.

  python scripts/collect_text.py --out=/tmp/text
  DILOCO_TEXT=/tmp/text python -m diloco.sweep --sweep=gap --results=/tmp/gap \
    --parallel=2 --cores=1

A case changes the sample run (configs/sample.py) in the fields that it names; all have
the same tokens, 1.64M, if their names do not say otherwise. Results: docs/gap.md.
"""

import os

from diloco.config.command_line import load_module
from diloco.sweep.grid import Grid, Point, Sweep

SEEDS = (0, 1, 2)


def outer(rate: float, momentum: float) -> Point:
  momentum_of = f"sgd(momentum={momentum}, nesterov=True)" if momentum else "sgd"
  return {"outer.learning_rate": rate, "outer.optimizer": momentum_of}


def every(h: int, **more) -> Point:
  return {"sync_every": h, "overlap.tau": min(h - 1, 1), **more}


def batch(sequences: int, **more) -> Point:
  steps = 400 * 32 // sequences
  parts = max(sequences // 16, 1)
  return {
    "train.batch_size": sequences,
    "train.steps": steps,
    "train.accumulate": parts,
    **more,
  }


def longer(times: int) -> Point:
  return {"train.steps": 400 * times}


def warm(steps: int, momentum: bool = True) -> Point:
  return {"outer.warm_start_steps": steps, "outer.warm_start_momentum": momentum}


def width(dim: int) -> Point:
  return {"model.dim": dim, "model.num_heads": max(dim // 64, 1)}


def muon(rate: float) -> Point:
  # Updates as large as AdamW's (arXiv 2502.16982, section 2.2).
  return {"inner.optimizer": "muon(consistent_rms=0.2)", "inner.learning_rate": rate}


PLAIN = outer(1.0, 0)  # The replicas' mean.
# The best setting of data-parallel with AdamW among the first ones that were tried.
SMALL = batch(8, **{"inner.warmup_steps": 400})
DATA_PARALLEL = {"algorithm": "data_parallel"}
DILOCO = {"algorithm": "diloco", **PLAIN}
MOMENTS = {"des_loc.first_every": 10, "des_loc.second_every": 10}
OUTER = ((0.7, 0.5), (0.3, 0.7), (0.2, 0.9), (0.4, 0.9))
RATES = (2e-3, 2.8e-3, 5.7e-3, 8e-3)

# Settings in which both algorithms were run: what decides, and what else was tried.
BOTH: dict[str, Point] = {
  "": {},
  "batch 16": batch(16),
  "batch 8": batch(8),
  "warm-up 100": {"inner.warmup_steps": 100},
  "batch 8, warm-up 100": batch(8, **{"inner.warmup_steps": 100}),
  "batch 8, warm-up 400": SMALL,
  "muon": muon(4e-3),
  "batch 8, muon": batch(8, **muon(4e-3)),
}
BOTH_TRIED: dict[str, Point] = {
  "batch 8, rate 0.0028": batch(8, **{"inner.learning_rate": 2.8e-3}),
  **{f"rate {r}": {"inner.learning_rate": r} for r in RATES},
  "batch 16, rate 0.0028": batch(16, **{"inner.learning_rate": 2.8e-3}),
  "batch 16, rate 0.0057": batch(16, **{"inner.learning_rate": 5.7e-3}),
  "batch 8, rate 0.0057": batch(8, **{"inner.learning_rate": 5.7e-3}),
  "batch 4": batch(4),
  "batch 64": batch(64),
  "batch 16, warm-up 100": batch(16, **{"inner.warmup_steps": 100}),
  "b2=0.95": {"inner.optimizer": "adamw(b1=0.9, b2=0.95, eps=1e-8)"},
  "muon, rate 0.008": muon(8e-3),
  "2 times the tokens": longer(2),
  "4 times the tokens": longer(4),
  "dim 64": width(64),
  "dim 256": width(256),
}
BOTH_SMALL: dict[str, Point] = {
  **{f"small, rate {r}": SMALL | {"inner.learning_rate": r} for r in (2.8e-3, 5.7e-3)},
  "small, warm-up 800": SMALL | {"inner.warmup_steps": 800},
  "batch 4, warm-up 800": batch(4, **{"inner.warmup_steps": 800}),
  "small, muon": SMALL | muon(4e-3),
}
# Settings of Streaming DiLoCo alone; "small" has batches of 8 and 400 steps of warm-up.
STREAMING: dict[str, Point] = {
  **{f"H={h}, the mean": every(h, **PLAIN) for h in (1, 5, 10, 20)},
  "H=40, batch 8": every(40, **batch(8)),
  "M=1": {"replicas": 1},
  "one replica alone": DATA_PARALLEL | {"train.batch_size": 16, "train.accumulate": 1},
  "outer rate 0.8, momentum 0.3": outer(0.8, 0.3),
  "fp32, tau=0": {"wire.format": "fp32", "overlap.tau": 0},
  "DiLoCo, the mean": DILOCO,
  "DiLoCo, the mean, of moments too": DILOCO | MOMENTS,
  "DiLoCo, the mean, of moments too, batch 8": DILOCO | MOMENTS | batch(8),
  "warm start 40": warm(40),
  "warm start 80": warm(80),
  "warm start 160, batch 8": warm(160) | batch(8),
}
STREAMING_SMALL: dict[str, Point] = {
  "small, the mean": SMALL | PLAIN,
  "small, outer rate 0.8, momentum 0.3": SMALL | outer(0.8, 0.3),
  "small, H=5": SMALL | every(5),
  "small, fp32, tau=0": SMALL | {"wire.format": "fp32", "overlap.tau": 0},
  "small, error feedback": SMALL | {"wire.error_feedback": 1.0},
  "small, M=1": SMALL | {"replicas": 1},
  "small, DiLoCo, the mean": SMALL | DILOCO,
  "small, DiLoCo, the mean, of moments too": SMALL | DILOCO | MOMENTS,
}
STREAMING_TRIED: dict[str, Point] = {
  **{f"outer rate {r}, momentum {m}": outer(r, m) for r, m in OUTER},
  **{f"H={h}, the mean": every(h, **PLAIN) for h in (2, 40)},
  "H=20, batch 16": every(20, **batch(16)),
  "tau=0": {"overlap.tau": 0},
  "alpha=0.5": {"overlap.alpha": 0.5},
  "last sync of all": {"outer.final_sync": True},
  "falling outer rate": {"outer.final_fraction": 0.1},
  "momentum restarts": {"outer.restart_every": 10},
  "warm start 80, momentum from zero": warm(80, momentum=False),
}


def cases(both: dict[str, Point], streaming: dict[str, Point]) -> dict[str, Point]:
  found = dict[str, Point]()
  for name, point in both.items():
    found[f"data-parallel, {name}".rstrip(", ")] = DATA_PARALLEL | point
    found[f"streaming, {name}".rstrip(", ")] = point
  return found | streaming


FIRST = cases(BOTH, STREAMING) | cases(BOTH_SMALL, STREAMING_SMALL)
CASES = FIRST | cases(BOTH_TRIED, STREAMING_TRIED)


def get_config(point: Point):
  c = load_module("sample", "get_config", "sample").get_config()
  if text := os.environ.get("DILOCO_TEXT"):
    c.data.source = f"arrays:{text}"
  c.update_from_flattened_dict(CASES[point["case"]])
  c.seed = point["seed"]
  c.eval.every, c.checkpoint.every, c.log.every = 0, 0, 10
  c.log.tensorboard, c.log.sample_tokens = False, 0
  return c


def get_sweep() -> Sweep:
  cells = [
    {"case": case, "seed": seed}
    for some in (FIRST, [case for case in CASES if case not in FIRST])
    for seed in SEEDS
    for case in some
  ]
  return Sweep(get_config, [Grid("gap", cells)])
