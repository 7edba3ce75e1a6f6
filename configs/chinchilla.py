"""Chinchilla-optimal runs of Scaling Laws for DiLoCo (arXiv 2503.09799), 35M to 10B.

  python -m diloco.main --config=configs/chinchilla.py:1.3B,M=2 --workdir=...

The argument names the scale, then any of M (replicas), H, algorithm and overtrain
(multiplies D = 20 N). Shapes are those of Table 3; inner learning rate and batch are
the power laws of Tables 8 and 9 for the algorithm and M, the batch rounded to a power
of two of sequences. Table 9 is in sequences of 2,048 tokens, although the paper's text
says tokens. The paper's H is 30. Its outer learning rate is read from no table: 0.4 is
Streaming DiLoCo's, figure 7 wants more for larger M.
"""

import math

from diloco.config import default_config

# Scale: layers, heads (of size 64), billions of training tokens.
SCALES = {
  "35M": (6, 8, 0.7),
  "90M": (9, 12, 1.8),
  "180M": (12, 16, 3.6),
  "330M": (15, 20, 6.6),
  "550M": (18, 24, 11),
  "1.3B": (24, 32, 26),
  "2.4B": (30, 40, 48),
  "4B": (36, 48, 80),
  "10B": (48, 64, 200),
}
# (A, alpha) of A N^alpha by algorithm and M: inner learning rate, batch in sequences.
RATE = {
  "data_parallel": (16319.2, -0.819),
  1: (74620.6, -0.945),
  2: (3978.82, -0.780),
  4: (4512.99, -0.789),
  8: (618986, -1.102),
}
BATCH = {
  "data_parallel": (0.22592, 0.281),
  1: (0.01361, 0.435),
  2: (0.00769, 0.479),
  4: (0.00535, 0.510),
  8: (0.01859, 0.455),
}


def get_config(arg: str = "35M"):
  scale, *rest = arg.split(",")
  options = dict(item.split("=") for item in rest)
  unknown = set(options) - {"M", "H", "algorithm", "overtrain"}
  if scale not in SCALES or unknown:
    raise ValueError(
      f"--config=configs/chinchilla.py:{arg} is not understood; write a scale of"
      f" {', '.join(SCALES)}, then M=, H=, algorithm= or overtrain=, by commas."
    )
  layers, heads, billions = SCALES[scale]
  c = default_config()
  c.algorithm = options.get("algorithm", "streaming")
  c.replicas = int(options.get("M", 2))
  c.sync_every = int(options.get("H", 30))
  c.model.num_layers, c.model.num_heads, c.model.dim = layers, heads, 64 * heads
  c.model.vocab_size, c.model.seq_len = 32_768, 2048
  c.model.remat, c.model.loss_chunk = True, 256

  n = 12 * layers * c.model.dim**2 + c.model.vocab_size * c.model.dim
  law = c.algorithm if c.algorithm == "data_parallel" else c.replicas
  if law not in RATE:
    raise ValueError(f"M is {law}; the paper has laws for M = 1, 2, 4 and 8.")
  c.inner.learning_rate = RATE[law][0] * n ** RATE[law][1]
  sequences = BATCH[law][0] * n ** BATCH[law][1]
  c.train.batch_size = max(2 ** round(math.log2(sequences)), c.replicas)
  c.train.tokens = int(billions * float(options.get("overtrain", 1)) * 1e9)

  c.data.source, c.data.tokenizer = "tfds:c4/en:3.1.0", "c4_32k.model"
  c.eval.every, c.eval.tokens = 1000, 2**22
  return c
