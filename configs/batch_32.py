"""The sample model with steps of 32 sequences: 400 steps for the same tokens.

  python -m diloco.main --config=batch_32 --workdir=runs/batch_32

docs/methods.md, docs/gap.md and several benchmarks have numbers of this run, whose
steps have 4,096 tokens. Per token, this run is faster than the sample run but learns
less: it ends at a held-out loss of 4.64 nats per token.
"""

from diloco.util.command import load_module


def get_config():
  c = load_module("sample", "get_config", "sample").get_config()
  # On a CPU a step of 32 sequences is fastest if its arrays stay in the caches. So
  # activations are recomputed, and each replica has microbatches of 8 sequences.
  c.model.remat, c.model.unroll = "full", 1
  c.mesh.cpu_devices = 1  # More devices compile longer than they save.
  c.train.batch_size, c.train.accumulate, c.train.steps = 32, 2, 400
  c.inner.learning_rate, c.inner.warmup_steps = 4e-3, 25
  c.outer.learning_rate, c.outer.optimizer = 0.5, "sgd(momentum=0.5, nesterov=True)"
  c.data.shuffle_window = 1024
  c.eval.every, c.checkpoint.every, c.log.every = 100, 100, 1
  c.eval.tokens = 65_536
  return c
