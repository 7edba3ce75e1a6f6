"""Times a step of a whole run beside the inner step alone.

  python scripts/benchmarks/bench_loop.py --config=sample --config.train.steps=400

A step of the run includes its share of syncs, logs, TensorBoard and Python. Only the
second half of the steps is timed, in which nothing compiles. Before its end, the run
makes no evaluations and no checkpoints.
"""

import tempfile

import pandas as pd
from absl import flags
from bench_step import Bench
from ml_collections import config_flags
from timing import in_turn, print_devices

from diloco.config import changed, command_line, resolve
from diloco.train import train

OFF = {"eval.every": 0, "eval.tokens": 1, "checkpoint.every": 0, "log.sample_tokens": 0}


def main(argv) -> None:
  del argv
  c = changed(resolve(flags.FLAGS.config), OFF)
  print_devices(c.mesh.cpu_devices)
  bench = Bench(c)
  times = in_turn(bench.inner)
  with tempfile.TemporaryDirectory() as folder:
    train(c, folder)
    lines = pd.read_json(f"{folder}/metrics.jsonl", lines=True)
  times += in_turn(bench.inner)
  steps = lines[lines["kind"] == "step"]
  steps = steps[["step", "time"]]
  taken = steps.iloc[-1] - steps.iloc[len(steps) // 2]
  before, after = (1e3 * t for t in times)
  step = 1e3 * taken["time"] / taken["step"]
  print(f"inner step alone {before:8.2f} ms before the run, {after:.2f} ms after it")
  print(
    f"step of the run  {step:8.2f} ms, {2 * step / (before + after):.2f} times as long"
  )


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", None, "The config to time.")
  flags.mark_flag_as_required("config")
  command_line.run(main)
