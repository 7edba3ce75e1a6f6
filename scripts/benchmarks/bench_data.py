"""Measures the training pipeline: tokens per second, bytes per batch from the disk.

For a cold disk, drop the page cache first: echo 3 > /proc/sys/vm/drop_caches.

taskset -c 0 python scripts/benchmarks/bench_data.py --config=configs/batch_32.py
"""

import pathlib
import time

from absl import flags
from ml_collections import config_flags

from diloco.config import changed, command_line, resolve
from diloco.data import TrainIterator

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config of the data to read.")
_BATCHES = flags.DEFINE_integer("batches", 1000, "Number of batches per measurement.")


def main(argv) -> None:
  del argv
  columns = ("tokens", "tokens/s", "tokens/CPU s", "MB a batch")
  print(f"{'prefetch':>8}", *(f"{name:>12}" for name in columns))
  for prefetch in (0, 2):
    c = changed(resolve(_CONFIG.value), {"data.prefetch": prefetch})
    iterator = TrainIterator(c)
    next(iterator)
    start, cpu_start, tokens = time.perf_counter(), time.process_time(), 0
    read = from_disk()
    for _ in range(_BATCHES.value):
      tokens += next(iterator).size
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    read = (from_disk() - read) / _BATCHES.value / 1e6
    iterator.close()
    print(
      f"{prefetch:>8} {tokens:>12,} {tokens / seconds:>12,.0f} {tokens / cpu:>12,.0f}"
      f" {read:>12.2f}"
    )


def from_disk() -> int:
  """Returns the bytes that this process has read from disks (Linux)."""
  lines = pathlib.Path("/proc/self/io").read_text().splitlines()
  return int(dict(line.split(": ") for line in lines)["read_bytes"])


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  command_line.run(main)
