"""The run of scripts/experiments/wan_bench.py, which measures links (docs/links.md).

The model has 2.2M parameters: four blocks, and an embedding about as large as a block.
A step has few tokens, so that a step on CPU cores takes about as long as an exchange.
"""

from diloco.config import default_config


def get_config():
  c = default_config()
  c.replicas = 2
  c.sync_every = 100
  c.fragments.size = 1
  c.overlap.tau = 5
  c.overlap.transport = "host"

  c.model.num_layers = 4
  c.model.dim = 192
  c.model.num_heads = 3
  c.model.vocab_size = 2048
  c.model.seq_len = 64
  c.model.dtype = "float32"

  c.inner.warmup_steps = 50
  c.train.batch_size = 4
  c.train.steps = 1000

  # Only training may use the links while they are measured. Metrics at every step would
  # add 1% to the bytes of FP4.
  c.eval.tokens = 1024
  c.eval.batch_size = 4
  c.checkpoint.every = 0
  c.log.every = 5
  c.log.tensorboard = False
  c.log.sample_tokens = 0
  return c
