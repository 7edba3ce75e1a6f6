"""Which settings close the gap of Streaming DiLoCo to data-parallel at 1M parameters.

  python scripts/collect_text.py --out=/tmp/text
  DILOCO_TEXT=/tmp/text python -m diloco.sweep --sweep=gap --results=/tmp/gap \
    --parallel=2 --cores=1

A case changes the sample run (configs/sample.py) in the fields that it names; all have
the same tokens, 1.64M. Every case has three seeds. Results: docs/gap.md.
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


def batch(sequences: int) -> Point:
  steps = 400 * 32 // sequences
  parts = max(sequences // 16, 1)
  return {
    "train.batch_size": sequences,
    "train.steps": steps,
    "train.accumulate": parts,
  }


DATA_PARALLEL = {"algorithm": "data_parallel"}
OUTER = ((1.0, 0), (0.8, 0.3), (0.7, 0.5), (0.3, 0.7), (0.2, 0.9), (0.4, 0.9))
BOTH = {
  **{f"rate {r}": {"inner.learning_rate": r} for r in (2e-3, 2.8e-3, 5.7e-3, 8e-3)},
  **{f"batch {b}": batch(b) for b in (16, 64)},
  "b2=0.95": {"inner.optimizer": "adamw(b1=0.9, b2=0.95, eps=1e-8)"},
  "warm-up 100": {"inner.warmup_steps": 100},
}
CASES: dict[str, Point] = {
  "data-parallel": DATA_PARALLEL,
  "streaming": {},
  **{f"data-parallel, {name}": DATA_PARALLEL | x for name, x in BOTH.items()},
  **{f"streaming, {name}": x for name, x in BOTH.items()},
  **{f"outer rate {r}, momentum {m}": outer(r, m) for r, m in OUTER},
  **{f"H={h}, outer rate 1": every(h, **outer(1.0, 0)) for h in (1, 2, 5, 20, 40)},
  "M=1": {"replicas": 1},
  "fp32, tau=0": {"wire.format": "fp32", "overlap.tau": 0},
  "tau=0": {"overlap.tau": 0},
  "alpha=0.5": {"overlap.alpha": 0.5},
  "last sync of all": {"outer.final_sync": True},
  "falling outer rate": {"outer.final_fraction": 0.1},
  "momentum restarts": {"outer.restart_every": 10},
}


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
  cells = [{"case": case, "seed": seed} for seed in SEEDS for case in CASES]
  return Sweep(get_config, [Grid("gap", cells)])
