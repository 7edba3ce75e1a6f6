r"""Trains the sample config's model with exo gym's DiLoCo; prints loss and tokens/s.

  git clone https://github.com/exo-explore/gym /tmp/exogym
  PYTHONPATH=/tmp/exogym OMP_NUM_THREADS=1 python scripts/bench_exo_gym.py \
    --tokens=/data/text/tokens

Needs torch, and of exo gym's requirements only tqdm and numpy; no JAX. Each replica is
a process of its own with one thread. The model, the number of tokens, the batch, AdamW
and the outer SGD are those of

  python -m diloco.main --config=configs/sample.py --config.algorithm=diloco \
    --config.inner.final_fraction=0.1 --config.data.source=arrays:/data/text/tokens

The sequences are others of the same text. docs/comparison.md has the results.
"""

import argparse
import csv
import os
import pathlib
import socket
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exogym import trainer
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.optim import OptimSpec
from torch import nn
from torch.utils.data import TensorDataset

LAYERS, HEADS, WIDTH, VOCABULARY, LENGTH = 4, 2, 128, 2048, 128
REPLICAS, PER_REPLICA, SYNC_EVERY = 2, 16, 10
PEAK, WARMUP, Z_LOSS, BOS = 4e-3, 25, 1e-4, 2
# Ours is 0.0025 times the schedule, torch's is multiplied by the learning rate.
WEIGHT_DECAY = 0.0025 / PEAK
RUN = "diloco"


def connect(backend: str, rank: int, world_size: int) -> None:
  """Replaces exo gym's function, which names the loopback interface of macOS."""
  os.environ["GLOO_SOCKET_IFNAME"] = "lo"
  dist.init_process_group(backend, rank=rank, world_size=world_size)


# Processes of replicas import this file too, so they get the replacement.
trainer.init_process_group_portsafe = connect


class Block(nn.Module):
  """A block of `diloco.model.decoder`."""

  def __init__(self) -> None:
    super().__init__()
    self.norms = nn.ModuleList(_norm(WIDTH) for _ in range(2))
    self.head_norms = nn.ModuleList(_norm(WIDTH // HEADS) for _ in range(2))
    self.qkv, self.out = _linear(WIDTH, 3 * WIDTH), _linear(WIDTH, WIDTH)
    self.up, self.down = _linear(WIDTH, 4 * WIDTH), _linear(4 * WIDTH, WIDTH)
    for matrix in self.qkv.weight.data.split(WIDTH):  # Three matrices of their own.
      nn.init.xavier_uniform_(matrix)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    split = (*x.shape[:-1], HEADS, WIDTH // HEADS)
    q, k, v = (
      part.reshape(split).transpose(1, 2)
      for part in self.qkv(self.norms[0](x)).split(WIDTH, -1)
    )
    y = F.scaled_dot_product_attention(
      self.head_norms[0](q), self.head_norms[1](k), v, is_causal=True
    )
    x = x + self.out(y.transpose(1, 2).reshape(x.shape))
    return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Decoder(nn.Module):
  """`diloco.model.decoder`; called with (ids,), returns the mean loss."""

  def __init__(self) -> None:
    super().__init__()
    self.tokens, self.positions = (
      nn.Parameter(torch.randn(rows, WIDTH) / WIDTH**0.5)
      for rows in (VOCABULARY, LENGTH)
    )
    self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
    self.norm = _norm(WIDTH)

  def forward(self, batch: tuple[torch.Tensor]) -> torch.Tensor:
    targets = batch[0].long()
    inputs = F.pad(targets[:, :-1], (1, 0), value=BOS)
    x = self.blocks(F.embedding(inputs, self.tokens) + self.positions)
    logits = (self.norm(x) @ self.tokens.T).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten())
    if self.training:
      loss = loss + Z_LOSS * logits.logsumexp(-1).square().mean()
    return loss


def _norm(width: int) -> nn.LayerNorm:
  return nn.LayerNorm(width, eps=1e-6, bias=False)


def _linear(inputs: int, outputs: int) -> nn.Linear:
  layer = nn.Linear(inputs, outputs, bias=False)
  nn.init.xavier_uniform_(layer.weight)
  return layer


class TimedDiLoCo(DiLoCoStrategy):
  """exo gym's DiLoCo; the first replica writes the seconds of each step."""

  def step(self) -> None:
    super().step()
    self.times = [*getattr(self, "times", []), time.perf_counter()]
    if self.rank == 0 and self.local_step == self.max_steps:
      np.save(f"logs/{RUN}/times.npy", np.diff(self.times))


def sequences(folder: pathlib.Path, count: int) -> TensorDataset:
  """Draws sequences of a split that prepare_data wrote, always the same."""
  shards = [np.load(f, mmap_mode="r") for f in sorted(folder.glob("*-of-*.npy"))]
  ids = np.concatenate(shards)
  rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
  chosen = np.random.default_rng(0).permutation(len(rows))[:count]
  return TensorDataset(torch.from_numpy(rows[chosen].astype(np.int32)))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--tokens", type=pathlib.Path, required=True)
  parser.add_argument("--steps", type=int, default=400)
  parser.add_argument("--minibatch", type=int, default=16, help="Sequences at once.")
  parser.add_argument("--eval_tokens", type=int, default=65_536)
  args = parser.parse_args()

  with socket.socket() as free:  # Other runs may have exo gym's port.
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  evaluated = args.eval_tokens // LENGTH
  torch.manual_seed(0)
  model = Decoder()
  print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
  strategy = TimedDiLoCo(
    optim_spec=OptimSpec(
      torch.optim.AdamW, lr=PEAK, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY
    ),
    outer_optim_spec=OptimSpec(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True),
    H=SYNC_EVERY,
    max_norm=1.0,
    lr_scheduler="lambda_cosine",
    lr_scheduler_kwargs={"warmup_steps": WARMUP, "cosine_anneal": True},
  )
  trainer.Trainer(
    model,
    sequences(args.tokens / "train", args.steps * REPLICAS * PER_REPLICA),
    sequences(args.tokens / "validation", evaluated),
    start_port=port,
    device="cpu",
  ).fit(
    num_epochs=1,
    max_steps=args.steps,
    strategy=strategy,
    num_nodes=REPLICAS,
    batch_size=PER_REPLICA,
    minibatch_size=args.minibatch,
    val_size=evaluated,
    val_interval=args.steps,
    run_name=RUN,
  )
  # A step of both replicas; the first ones start threads and allocate memory.
  seconds = statistics.median(np.load(f"logs/{RUN}/times.npy")[5:])
  print(f"{REPLICAS * PER_REPLICA * LENGTH / seconds:,.0f} tokens/s, median of steps")
  with open(f"logs/{RUN}/validation.csv") as file:
    rows = list(csv.DictReader(file))
  print(f"held-out loss of the mean of the replicas: {rows[-1]['global_loss']}")


if __name__ == "__main__":
  main()
