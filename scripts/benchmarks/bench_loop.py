"""Times a step of a whole run beside the inner step alone, and an evaluation.

  python scripts/benchmarks/bench_loop.py --config=sample --config.train.steps=400

A step of the run has its share of syncs, logs, TensorBoard and Python; the second half
of the steps is timed, which compiles nothing. Evaluations and checkpoints are left out.
The evaluation of 16,384 tokens is timed beside the time that its floating point
operations would take at the rate of one product of its size, [tokens of a batch, dim]
times [dim, 4 dim]: the limit of a forward pass.
"""

import tempfile

import jax
import jax.numpy as jnp
import pandas as pd
from absl import flags
from bench_step import Bench
from ml_collections import config_flags
from timing import in_turn, print_devices, timed

from diloco.algorithm.state import first_replica
from diloco.config import changed, command_line, resolve
from diloco.evaluate.evaluation import Evaluation
from diloco.spec.shapes import flops_per_token
from diloco.train import train

OFF = {"eval.every": 0, "eval.tokens": 1, "checkpoint.every": 0, "log.sample_tokens": 0}
TOKENS = 16_384


def main(argv) -> None:
  del argv
  print_devices()
  c = changed(resolve(flags.FLAGS.config), OFF)
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
  evaluate(bench)


def evaluate(bench: Bench) -> None:
  """Prints the time of an evaluation, over that of its products."""
  c = changed(bench.c, {"eval.tokens": TOKENS})
  rows, dim = c.eval.batch_size * c.model.seq_len, c.model.dim
  x_TxD, w_DxF = jnp.ones((rows, dim)), jnp.ones((dim, 4 * dim))
  product = jax.jit(jnp.matmul)
  with jax.set_mesh(bench.mesh):
    evaluation = Evaluation(c, bench.mesh)
    params = first_replica(bench.params, mesh=bench.mesh)
    whole, alone = in_turn(
      lambda: timed(lambda: evaluation.loss(params).loss),
      lambda: timed(product, x_TxD, w_DxF),
    )
  # A training step has three times the operations of a forward pass.
  limit = TOKENS * flops_per_token(c.model) / 3 * alone / (8 * rows * dim**2)
  print(
    f"evaluation       {1e3 * whole:8.2f} ms for {TOKENS:,} tokens; its operations"
    f" alone {1e3 * limit:.2f} ms: {whole / limit:.2f} times as long"
  )


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", None, "The config to time.")
  flags.mark_flag_as_required("config")
  command_line.run(main)
