"""The sample run: a small model, Streaming DiLoCo with 4-bit outer gradients.

  python -m diloco.main --config=configs/sample.py --workdir=runs/sample

Trains 1.07M parameters on 1.64M tokens of State of the Union texts: two to five minutes
on two CPU cores, held-out loss 4.64 nats per token. --config.algorithm=diloco and
--config.algorithm=data_parallel train the baselines on the same tokens: 4.64 and 4.53.
"""

from diloco.config import default_config


def get_config():
  c = default_config()
  c.replicas = 2
  c.sync_every = 10
  c.fragments.size = 1
  c.overlap.tau = 1
  # The run has only 40 syncs per fragment. The papers' momentum of 0.9 averages
  # about ten syncs and overshoots in such a short run.
  c.outer.optimizer = "sgd(momentum=0.5, nesterov=True)"
  c.outer.learning_rate = 0.5

  c.model.num_layers = 4
  c.model.dim = 128
  c.model.num_heads = 2
  c.model.vocab_size = 0  # As many as the tokenizer has: 2048, or those of your data.
  c.model.seq_len = 128
  c.model.dtype = "float32"
  # On a CPU a step is fastest if its arrays stay in the caches: recomputed activations
  # and microbatches of 8 sequences.
  c.model.remat, c.train.accumulate = "full", 2

  c.inner.learning_rate = 4e-3
  c.inner.warmup_steps = 25
  c.train.batch_size = 32
  c.train.steps = 400

  # The documents are long: without shuffling, one document would fill a batch.
  c.data.shuffle_window = 1024

  c.eval.every = 100
  c.eval.tokens = 65_536
  c.checkpoint.every = 100
  return c
