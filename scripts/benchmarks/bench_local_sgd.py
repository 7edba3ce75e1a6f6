"""Times local SGD of plain PyTorch beside our inner step, for the same model.

  pip install torch
  python scripts/benchmarks/bench_local_sgd.py --config=sample

PyTorch trains each replica in a process with one thread and averages the parameters
every H steps (torch.distributed's PeriodicModelAverager); its AdamW is fused. Ours
trains both in one process. The two take turns, so other work meets both. Batches are
random tokens in memory. The config's model must be the one of torch_model.py.
"""

import argparse
import multiprocessing
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import averagers
from torch_model import LENGTH, VOCABULARY, Decoder

from diloco.config import Config
from diloco.config.command_line import load_config
from diloco.contrib.simulate._probe import step_seconds
from diloco.util.command import free_port


def local_sgd(rank: int, c: Config, port: int, rounds: int, found) -> None:
  """Trains one replica; the first one sends the seconds of a step, for each turn."""
  os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
  torch.set_num_threads(1)
  dist.init_process_group("gloo", rank=rank, world_size=c.replicas)
  torch.manual_seed(0)
  model, rate = Decoder(), c.inner.learning_rate
  adamw = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.99), fused=True)
  average = averagers.PeriodicModelAverager(period=c.sync_every, warmup_steps=0)
  batch = torch.randint(VOCABULARY, (c.train.batch_size // c.replicas, LENGTH))
  while True:
    start, steps = time.perf_counter(), c.sync_every * rounds
    for _ in range(steps):
      model((batch,)).backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), c.inner.clip_norm)
      adamw.step()
      average.average_parameters(model.parameters())  # Of those with a gradient.
      adamw.zero_grad()
    if rank == 0:
      found.send((time.perf_counter() - start) / steps)
      try:
        found.recv()  # Until the next turn; the other replica waits in its average.
      except EOFError:
        return


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--config", default="sample")
  parser.add_argument("--turns", type=int, default=5)
  parser.add_argument("--rounds", type=int, default=10, help="Of H steps, in a turn.")
  args, flags = parser.parse_known_args()
  c = load_config(args.config, flags)
  ours, theirs = list[float](), list[float]()
  spawn = multiprocessing.get_context("spawn")
  here, there = spawn.Pipe()
  port = free_port()
  for rank in range(c.replicas):
    options = (rank, c, port, args.rounds, there)
    spawn.Process(target=local_sgd, args=options, daemon=True).start()
  there.close()  # If a process fails, its end closes too, and recv raises.
  here.recv()  # The first turn warms up.
  for _ in range(args.turns):
    ours.append(step_seconds(c))
    here.send(None)
    theirs.append(here.recv())
  rows = {"PyTorch, local SGD": theirs, "diloco, inner step": ours}
  print(f"{args.config}: M = {c.replicas}, {c.tokens_per_step} tokens per step")
  for name, seconds in rows.items():
    turns = ", ".join(f"{1e3 * x:.1f}" for x in seconds)
    print(f"{name}: {1e3 * statistics.median(seconds):.1f} ms (turns: {turns})")


if __name__ == "__main__":
  main()
