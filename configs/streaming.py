"""The models of Streaming DiLoCo (arXiv 2501.18512), 35M to 4B, on C4 or Dolma.

  python -m diloco.main --config=configs/streaming.py:1B --workdir=...
  python -m diloco.main --config=configs/streaming.py:1B,data=dolma,tokens=100e9 ...
  python -m diloco list_configs configs/streaming.py

The argument is the scale, and after it any of M, H, algorithm, data (c4 or dolma) and
tokens. `RUNS` lists the runs of Tables 5 to 7, `ITEMS` those of each table and figure.

From the paper: shapes and token budgets (Table 2; its "hidden" column is the
feed-forward width), M = 2, strided fragments of 3 layers, tau = 1, alpha = 0, E3M0,
outer Nesterov momentum at learning rate 0.4 (sections 3.2 and 3.3), and sequences of
1,024 tokens on C4 and 2,048 on Dolma. On Dolma the batch grows with M (Table 7).

The paper states neither the inner learning rate nor the batch. Both come from the power
laws of Scaling Laws (arXiv 2503.09799) for M = 2.
"""

import math

from diloco.config import ALGORITHMS, default_config
from diloco.errors import ConfigError
from diloco.spec.shapes import matrix_params
from diloco.util.command import parse_options

# Scale: layers, attention heads (of size 64), billions of training tokens.
SCALES = {
  "35M": (6, 8, 0.7),
  "100M": (9, 12, 1.5),
  "200M": (12, 16, 3.5),
  "300M": (15, 20, 6),
  "500M": (18, 24, 11),
  "1B": (24, 32, 25),
  "4B": (36, 48, 83),
}

OPTIONS = {
  "M": int,
  "H": int,
  "algorithm": ALGORITHMS,
  "data": ("c4", "dolma"),
  "tokens": float,
}
_METHODS = (
  "algorithm=data_parallel",
  "H=100",
  "algorithm=diloco,H=30",
  "H=30",
)
_DOLMA = tuple(
  f"1B,data=dolma,tokens={tokens},{m}"
  for m in ("algorithm=data_parallel", "M=2", "M=4")
  for tokens in ("25e9", "100e9", "250e9")
)
PAPER = "2501.18512"
ITEMS = {
  "table 5": tuple(
    f"{s},{m}" for s in SCALES for m in _METHODS[: 2 if s == "4B" else 4]
  ),
  "table 6": tuple(
    f"{s}{m},H={h}"
    for s in SCALES
    if s != "4B"
    for m in ("", ",M=4")
    for h in (30, 100)
  ),
  "table 7": _DOLMA,
  "table 1": _DOLMA[:6],
  "table 2": tuple(SCALES),
}
ITEMS |= dict.fromkeys(("figure 5", "figure 17", "figure 18"), ITEMS["table 5"])
RUNS = tuple(dict.fromkeys(ITEMS["table 5"] + ITEMS["table 6"] + ITEMS["table 7"]))


def get_config(arg: str = "35M"):
  scale, _, rest = arg.partition(",")
  if scale not in SCALES:
    raise ConfigError(f"the scale is {scale!r}; write one of {', '.join(SCALES)}.")
  options = parse_options(rest, OPTIONS)
  data = options.get("data", "c4")
  layers, heads, billions = SCALES[scale]
  c = default_config()
  c.algorithm = options.get("algorithm", "streaming")
  c.replicas = options.get("M", 2)
  c.sync_every = options.get("H", 100)
  c.model.num_layers, c.model.num_heads, c.model.dim = layers, heads, 64 * heads
  c.model.vocab_size = 32_000
  c.model.seq_len = 1024 if data == "c4" else 2048
  c.model.remat, c.model.loss_chunk = "full", 256

  n = matrix_params(c.model)
  c.inner.learning_rate = 3978.82 * n**-0.780
  c.inner.gradient_dtype = "bfloat16"
  sequences = 0.00769 * n**0.479 * 2048 / c.model.seq_len
  c.train.batch_size = max(2 ** round(math.log2(sequences)), c.replicas)
  if data == "dolma":
    c.train.batch_size = c.train.batch_size * c.replicas // 2
  c.train.tokens = int(options.get("tokens", billions * 1e9))

  c.data.tokenizer = "c4_32k.model"
  if data == "c4":
    c.data.source = "tfds:c4/en:3.1.0"
  else:
    c.data.source = "tfds:dolma:1.0.0"
    c.data.train_split, c.data.eval_split = "train[:99%]", "train[99%:]"
  c.eval.every, c.eval.tokens = 1000, 2**22
  return c
