"""Times local SGD of plain PyTorch beside our inner step, for the same model.

  pip install torch
  python scripts/benchmarks/bench_local_sgd.py --config=sample

PyTorch trains each replica in a process with one thread and averages the parameters
every H steps (torch.distributed's PeriodicModelAverager); its AdamW is fused. Our
program trains all replicas in one process, without syncs. The two programs take turns
of H steps. Batches are random tokens in memory. The config's model must be the model of
torch_model.py.
"""

import multiprocessing
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from absl import flags
from bench_step import Bench
from ml_collections import config_flags
from timing import in_turn, print_devices
from torch.distributed.algorithms.model_averaging import averagers
from torch_model import LENGTH, VOCABULARY, Decoder

from diloco.config import Config, command_line, resolve
from diloco.util.command import free_port


def local_sgd(rank: int, c: Config, port: int, turns) -> None:
  """Trains one replica; replica 0 waits for each turn, and sends the turn's seconds."""
  os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
  torch.set_num_threads(1)
  dist.init_process_group("gloo", rank=rank, world_size=c.replicas)
  torch.manual_seed(0)
  model, rate = Decoder(), c.inner.learning_rate
  adamw = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.99), fused=True)
  average = averagers.PeriodicModelAverager(period=c.sync_every, warmup_steps=0)
  batch = torch.randint(VOCABULARY, (c.train.batch_size // c.replicas, LENGTH))
  while True:
    if rank == 0:
      turns.recv()
    dist.barrier()  # The other replicas wait, too.
    start = time.perf_counter()
    for _ in range(c.sync_every):
      model((batch,)).backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), c.inner.clip_norm)
      adamw.step()
      # The averager skips parameters without a gradient, so `zero_grad` comes later.
      average.average_parameters(model.parameters())
      adamw.zero_grad()
    if rank == 0:
      turns.send(time.perf_counter() - start)


def main(argv) -> None:
  del argv
  c = resolve(flags.FLAGS.config)
  print_devices(c.mesh.cpu_devices)
  bench, port = Bench(c), free_port()
  spawn = multiprocessing.get_context("spawn")
  here, there = spawn.Pipe()
  replicas = [
    spawn.Process(target=local_sgd, args=(rank, c, port, there), daemon=True)
    for rank in range(c.replicas)
  ]
  for replica in replicas:
    replica.start()
  there.close()  # So recv raises if a process fails and closes its end of the pipe.

  def theirs() -> float:
    here.send(None)
    return here.recv() / c.sync_every

  ours = lambda: float(np.mean([bench.inner() for _ in range(c.sync_every)]))
  times = in_turn(theirs, ours)
  for replica in replicas:
    replica.terminate()
  print(f"M = {c.replicas}, {c.tokens_per_step} tokens per step")
  for name, seconds in zip(("PyTorch, local SGD", "diloco, inner step"), times):
    print(f"{name} {1e3 * seconds:8.2f} ms")


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", None, "The config to time.")
  flags.mark_flag_as_required("config")
  command_line.run(main)
