"""The sample run: a small model on real text, fragments, overlap, 4-bit deltas.

  python -m diloco.main --config=configs/sample.py --workdir=/tmp/sample

About 1.07M parameters on 1.6M tokens of the embedded text; --config.algorithm=diloco
or data_parallel gives the baselines at equal tokens. README.md has the figures.
"""

from diloco.config import default_config


def get_config():
  c = default_config()
  c.replicas = 2
  c.sync_every = 10
  c.fragments.size = 1
  c.overlap.tau = 1
  # Each fragment is synchronised 40 times in all. The papers' momentum 0.9 remembers
  # ten rounds and overshoots in so short a run.
  c.outer.optimizer = "sgd(momentum=0.5, nesterov=True)"
  c.outer.learning_rate = 0.5

  c.model.num_layers = 4
  c.model.dim = 128
  c.model.num_heads = 2
  c.model.vocab_size = 2048
  c.model.seq_len = 128
  c.model.dtype = "float32"
  c.model.remat = True  # On a CPU recomputing is faster than writing to memory.

  c.inner.learning_rate = 4e-3
  c.inner.warmup_steps = 25
  c.train.batch_size = 32
  c.train.steps = 400

  # The addresses are long: without a window, a batch would come from one of them.
  c.data.shuffle_window = 1024

  c.eval.every = 100
  c.eval.tokens = 65_536
  c.checkpoint.every = 100
  return c
