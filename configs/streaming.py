"""The models of Streaming DiLoCo (arXiv 2501.18512), 35M to 4B, on C4 or Dolma.

  python -m diloco.main --config=configs/streaming.py:1B --workdir=...
  python -m diloco.main --config=configs/streaming.py:1B,data=dolma,tokens=100e9 ...
  python -m diloco list_configs configs/streaming.py

The argument is the scale, then any of M, H, algorithm, data (c4 or dolma) and tokens.
`RUNS` lists the runs of Tables 5 to 7; `ITEMS` lists the runs of each table and figure.

Shapes and token budgets are those of Table 2, whose column "hidden" is the feed-forward
width. On Dolma, sequences have 2,048 tokens (section 3.2.2) and the batch grows with M
(Table 7). The paper states neither the inner learning rate nor the batch: rate and
batch come from the power laws of Scaling Laws (arXiv 2503.09799) for M = 2. Each line
below has a field, its value, and the source of this value:

  replicas = 2                   section 3.2
  sync_every = 100               section 3.2.1, which also has 30
  fragments.size = 3             section 3.3.1
  fragments.pattern = strided    section 3.3.1
  overlap.tau = 1                section 3.3.2
  overlap.alpha = 0.0            ours; section 3.3.2 has 0 and 0.5 and names no choice
  wire.format = e3m0             section 2.4
  wire.block_size = 128          ours
  outer.learning_rate = 0.4      section 3.2
  outer.optimizer = sgd(momentum=0.9, nesterov=True)  section 2.1; 0.9 is ours
  inner.optimizer = adamw(b1=0.9, b2=0.99, eps=1e-8)  section 4; the numbers are ours
  inner.warmup_steps = 1000      ours
  inner.final_fraction = 0.05    ours
  inner.clip_norm = 1.0          ours
  inner.gradient_dtype = bfloat16  ours
  train.accumulate = 1           ours; it grows with the scale
  model.vocab_size = 32000       table 2
  model.seq_len = 1024           section 3.2
  model.qk_norm = True           section 3.2
  model.z_loss = 0.0001          section 3.2
  model.param_dtype = float32    ours
  model.remat = full             ours
  model.loss_chunk = 256         ours
  data.source = tfds:c4/en:3.1.0  section 3.2; the version is ours
  eval.every = 1000              ours
  eval.tokens = 4194304          ours

The tasks are those of Table 5 if their package is installed (docs/evaluation.md), else
none. The table below has the cost of a run (6 N FLOPs per token; hours of a v5e at 40%
of its peak), and the paper's losses on C4 (Table 5) of data-parallel, DiLoCo with
H = 30, streaming with H = 30, and streaming with H = 100 (4B: only the first and last):

  size  tokens  FLOPs   chip hours  loss
  35M   0.7B    1.5e17  0.52        3.51 3.54 3.53 3.56
  100M  1.5B    7.9e17  2.8         3.19 3.21 3.21 3.22
  200M  3.5B    3.9e18  14          2.97 2.98 2.98 3.00
  300M  6.0B    1.2e19  43          2.80 2.81 2.81 2.83
  500M  11B     3.7e19  130         2.67 2.68 2.67 2.69
  1B    25B     1.9e20  670         2.49 2.49 2.48 2.50
  4B    83B     2.1e21  7300        2.25 2.26
"""

import math

from diloco.config import ALGORITHMS, default_config
from diloco.errors import ConfigError
from diloco.evaluate import tasks
from diloco.spec.shapes import matrix_params
from diloco.util.command import parse_options

# {scale: (layers, attention heads of size 64, billions of training tokens, number of
# microbatches with which the run fits the two slices of docs/aot.md)}.
SCALES = {
  "35M": (6, 8, 0.7, 1),
  "100M": (9, 12, 1.5, 1),
  "200M": (12, 16, 3.5, 2),
  "300M": (15, 20, 6, 16),
  "500M": (18, 24, 11, 2),
  "1B": (24, 32, 25, 4),
  "4B": (36, 48, 83, 16),
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
  layers, heads, billions, accumulate = SCALES[scale]
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
  c.train.accumulate = accumulate

  c.data.tokenizer = "c4_32k.model"
  if data == "c4":
    c.data.source = "tfds:c4/en:3.1.0"
  else:
    c.data.source = "tfds:dolma:1.0.0"
    c.data.train_split, c.data.eval_split = "train[:99%]", "train[99%:]"
  c.eval.every, c.eval.tokens, c.eval.tasks = 1000, 2**22, tasks.of_the_papers()
  return c
