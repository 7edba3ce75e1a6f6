"""What scripts/wan_bench.py trains: small parameters, smaller steps, H = 100.

About 2.2M parameters in four blocks and an embedding of about a block's size. Few
tokens per step, so that compute and exchange meet at rates that CPU cores can serve.
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

  # Nothing but training crosses the links while it is measured, and metrics of every
  # step would: 1% of what FP4 sends.
  c.eval.tokens = 1024
  c.eval.batch_size = 4
  c.checkpoint.every = 0
  c.log.every = 5
  c.log.tensorboard = False
  c.log.sample_tokens = 0
  return c
