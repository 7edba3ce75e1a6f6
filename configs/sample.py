"""The sample run: a small model, Streaming DiLoCo with 4-bit outer gradients.

  python -m diloco.main --config=configs/sample.py --workdir=runs/sample

Trains 1.07M parameters on 1.64M tokens of State of the Union texts. The baselines on
the same tokens are --config.algorithm=diloco and --config.algorithm=data_parallel;
docs/benchmarks.md has the losses and times.
"""

from diloco.config import default_config


def get_config():
  c = default_config()
  c.replicas = 2
  c.sync_every = 10
  c.fragments.size = 1
  c.overlap.tau = 1
  # Change momentum, rates and batch only together: docs/settings.md.
  c.outer.optimizer = "sgd(momentum=0.8, nesterov=True)"
  c.outer.learning_rate = 0.35

  c.model.num_layers = 4
  c.model.dim = 128
  c.model.num_heads = 2
  c.model.vocab_size = 0  # 0: the size of the tokenizer, such as 2048.
  c.model.seq_len = 128
  c.model.dtype = "float32"
  c.model.remat = "dots"  # Fastest on a CPU, by `python -m diloco tune`.

  c.mesh.cpu_devices = 2  # Each replica has a core of its own.

  # Two sequences for each replica: with so few tokens, many small steps learn more.
  c.train.batch_size = 4
  c.train.steps = 3200
  c.inner.learning_rate = 4e-3
  c.inner.warmup_steps = 2400

  # The documents are long: without shuffling, one document would fill a batch.
  c.data.shuffle_window = -1

  c.eval.tokens = 131_072
  c.checkpoint.every = 800
  c.log.every = 10
  return c
