"""The run of fault_bench.py, which injects faults into four sites (docs/faults.md).

The model is so small that slow uploads of payloads determine the time of a step.
"""

from diloco.config import default_config


def get_config():
  c = default_config("sites")
  c.replicas = 4
  c.sync_every = 10
  c.fragments.size = 1
  c.overlap.tau = 2
  c.overlap.transport = "sites"
  c.sites.grace_s = 2.0
  c.wire.format = "fp32"
  # As in configs/sample.py, outer momentum is below the papers' 0.9.
  c.outer.optimizer = "sgd(momentum=0.5, nesterov=True)"
  c.outer.learning_rate = 0.5

  c.model.num_layers = 2
  c.model.dim = 32
  c.model.num_heads = 2
  c.model.vocab_size = 2048
  c.model.seq_len = 32
  c.model.dtype = "float32"

  c.inner.warmup_steps = 50
  c.train.batch_size = 8
  c.train.steps = 8000
  c.data.shuffle_window = 256

  c.eval.tokens = 32_768
  c.eval.batch_size = 32
  c.checkpoint.every = 100
  c.log.every = 10
  c.log.tensorboard = False
  c.log.sample_tokens = 0
  return c
