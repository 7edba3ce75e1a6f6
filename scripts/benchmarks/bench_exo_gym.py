r"""Trains the model of batch_32 with exo gym's DiLoCo; prints loss and tokens/s.

  git clone https://github.com/exo-explore/gym /tmp/exogym
  git -C /tmp/exogym checkout 9fa323c26364f4437ffd23517da5d65946003963
  PYTHONPATH=/tmp/exogym OMP_NUM_THREADS=1 python scripts/benchmarks/bench_exo_gym.py \
    --tokens=/data/text/tokens

Needs diloco and torch in one environment; of exo gym's requirements, it needs only tqdm
and numpy. Each replica is its own process with one thread. The model, AdamW, the outer
SGD, each replica's sequences and their order, and the held-out sequences are those of

  python -m diloco.main --config=configs/batch_32.py --config.algorithm=diloco \
    --config.inner.final_fraction=0.1 --config.data.source=arrays:/data/text/tokens

docs/comparison.md has the results.
"""

import argparse
import csv
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from exogym import trainer
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.optim import OptimSpec
from torch.utils.data import TensorDataset
from torch_model import LENGTH, Decoder

from diloco.config import Config
from diloco.config.command_line import load_config
from diloco.data import TrainIterator, make_eval_set
from diloco.util.command import free_port

REPLICAS, PER_REPLICA, SYNC_EVERY = 2, 16, 10
PEAK, WARMUP = 4e-3, 25
# We multiply the weight decay, 0.0025, by the schedule, whose peak is 1. Torch
# multiplies it by the learning rate, whose peak is PEAK.
WEIGHT_DECAY = 0.0025 / PEAK
RUN = "diloco"


def connect(backend: str, rank: int, world_size: int) -> None:
  """Replaces exo gym's function, which names the loopback interface of macOS."""
  os.environ["GLOO_SOCKET_IFNAME"] = "lo"
  dist.init_process_group(backend, rank=rank, world_size=world_size)


# Processes of replicas import this file too, so they get the replacement.
trainer.init_process_group_portsafe = connect


class TimedDiLoCo(DiLoCoStrategy):
  """The DiLoCo of exo gym; the first replica saves when each step ended."""

  def step(self) -> None:
    super().step()
    self.times = [*getattr(self, "times", []), time.perf_counter()]
    if self.rank == 0 and self.local_step == self.max_steps:
      np.save(f"logs/{RUN}/times.npy", self.times)


def training_set(c: Config, steps: int) -> TensorDataset:
  """Reads our run's sequences; exo gym gives every M-th of them to a replica."""
  batches = TrainIterator(c)
  rows_SxMxBxL = np.stack([next(batches) for _ in range(steps)])
  batches.close()
  rows = rows_SxMxBxL.swapaxes(1, 2).reshape(-1, LENGTH)
  return TensorDataset(torch.from_numpy(rows))


def held_out_set(c: Config) -> TensorDataset:
  """Reads the sequences of our run's held-out loss."""
  held_out = make_eval_set(c)
  ids = held_out.tokens.reshape(-1)[: held_out.num_tokens]
  return TensorDataset(torch.from_numpy(ids.reshape(-1, LENGTH)))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--tokens", required=True, help="Of prepare_data.py.")
  parser.add_argument("--steps", type=int, default=400, help="20 or more.")
  parser.add_argument("--seed", type=int, default=0, help="Weights, order of data.")
  parser.add_argument("--minibatch", type=int, default=16, help="Sequences at once.")
  args = parser.parse_args()

  fields = ["algorithm=diloco", "inner.final_fraction=0.1", f"seed={args.seed}"]
  fields.append(f"data.source=arrays:{args.tokens}")
  c = load_config("configs/batch_32.py", [f"--config.{field}" for field in fields])
  held_out = held_out_set(c)
  torch.manual_seed(args.seed)
  model = Decoder()
  print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
  inner = {"lr": PEAK, "betas": (0.9, 0.99), "weight_decay": WEIGHT_DECAY}
  outer = {"lr": 0.5, "momentum": 0.5, "nesterov": True}
  schedule = {"warmup_steps": WARMUP, "cosine_anneal": True}
  strategy = TimedDiLoCo(
    optim_spec=OptimSpec(torch.optim.AdamW, **inner),
    outer_optim_spec=OptimSpec(torch.optim.SGD, **outer),
    H=SYNC_EVERY,
    max_norm=1.0,
    lr_scheduler="lambda_cosine",
    lr_scheduler_kwargs=schedule,
  )
  batches = {"batch_size": PER_REPLICA, "minibatch_size": args.minibatch}
  length = {"num_epochs": 1, "max_steps": args.steps, "val_interval": args.steps}
  run = {"num_nodes": REPLICAS, "shuffle": False, "run_name": RUN} | batches | length
  data = training_set(c, args.steps), held_out
  # Another run may already use exo gym's default port.
  fit = trainer.Trainer(model, *data, start_port=free_port(), device="cpu").fit
  fit(strategy=strategy, val_size=len(held_out), **run)
  # The first round has no sync; each other round has one, after its first step.
  ends = np.load(f"logs/{RUN}/times.npy")[SYNC_EVERY - 1 :: SYNC_EVERY]
  tokens = SYNC_EVERY * REPLICAS * PER_REPLICA * LENGTH
  print(f"{tokens / np.diff(ends).mean():,.0f} tokens/s, mean of rounds but the first")
  with open(f"logs/{RUN}/validation.csv") as file:
    rows = list(csv.DictReader(file))
  print(f"held-out loss of the mean of the replicas: {rows[-1]['global_loss']}")


if __name__ == "__main__":
  main()
