"""Tokens per second and per CPU second of the training pipeline.

taskset -c 0 python scripts/bench_data.py --config=configs/sample.py
"""

import time

import ml_collections
from absl import flags
from ml_collections import config_flags

from diloco.config import command_line, resolve
from diloco.data import make_train_iterator

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to read and how.")
_BATCHES = flags.DEFINE_integer("batches", 1000, "Batches per measurement.")


def main(argv) -> None:
  del argv
  print(f"{'prefetch':>8} {'tokens':>12} {'tokens/s':>12} {'tokens/CPU s':>12}")
  for prefetch in (0, 2):
    c = ml_collections.ConfigDict(_CONFIG.value.to_dict())
    c.data.prefetch = prefetch
    iterator = make_train_iterator(resolve(c))
    next(iterator)
    start, cpu_start, tokens = time.perf_counter(), time.process_time(), 0
    for _ in range(_BATCHES.value):
      tokens += next(iterator).size
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    iterator.close()
    print(
      f"{prefetch:>8} {tokens:>12,} {tokens / seconds:>12,.0f} {tokens / cpu:>12,.0f}"
    )


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  command_line.run(main)
