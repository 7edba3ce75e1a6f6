"""Measures the training pipeline: tokens per second and per CPU second.

taskset -c 0 python scripts/benchmarks/bench_data.py --config=configs/batch_32.py
"""

import time

from absl import flags
from ml_collections import config_flags

from diloco.config import changed, command_line, resolve
from diloco.data import TrainIterator

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config of the data to read.")
_BATCHES = flags.DEFINE_integer("batches", 1000, "Number of batches per measurement.")


def main(argv) -> None:
  del argv
  print(f"{'prefetch':>8} {'tokens':>12} {'tokens/s':>12} {'tokens/CPU s':>12}")
  for prefetch in (0, 2):
    c = changed(resolve(_CONFIG.value), {"data.prefetch": prefetch})
    iterator = TrainIterator(c)
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
