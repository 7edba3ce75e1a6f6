"""The sample run: a small model on real text, fragments, overlap, 4-bit deltas."""

from diloco.config import default_config


def get_config():
  c = default_config()
  c.replicas = 2
  c.sync_every = 20
  c.fragments.size = 1
  c.overlap.tau = 1

  c.model.num_layers = 4
  c.model.dim = 128
  c.model.num_heads = 2
  c.model.vocab_size = 2048
  c.model.seq_len = 128
  c.model.dtype = "float32"
  c.model.remat = True  # On a CPU recomputing is faster than writing to memory.

  c.inner.learning_rate = 5e-3
  c.inner.warmup_steps = 50
  c.train.batch_size = 32
  c.train.steps = 700

  c.eval.every = 100
  c.eval.tokens = 65_536
  c.checkpoint.every = 100
  return c
