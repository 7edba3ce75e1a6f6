"""Chinchilla-optimal runs of Scaling Laws for DiLoCo (arXiv 2503.09799).

  python -m diloco.main --config=configs/chinchilla.py:1.3B,M=2 --workdir=...
  python -m diloco.main --config=configs/chinchilla.py:550M,M=2,overtrain=16 ...
  python -m diloco list_configs configs/chinchilla.py

The argument is the size, then any of M (replicas), H, algorithm, method (joint or
independent), overtrain (multiplies the budget of 20 tokens per parameter) and data (c4
or dolma). `RUNS` lists the paper's runs; `ITEMS` lists the runs of each table and
figure.

The sizes 35M to 10B have the shapes and token budgets of Table 3. Any other size from
10M on takes the nearest shape of the same family: width 64 * heads, 3 layers for every
4 heads. Learning rates and batch come from `python -m diloco scaling_laws recommend`
for the argument's M and algorithm; flags for these two do not change the rates.
Runs with the option overtrain train on Dolma and are evaluated on C4 (section 5.2).

Without algorithm=, a run is Streaming DiLoCo with the rates and the batch of this
paper. The paper's own runs have algorithm=diloco. Each line below has a field, its
value, and the source of this value:

  algorithm = streaming          ours; section 3 has diloco
  sync_every = 30                section 3
  train.accumulate = 1           ours; it grows with the size, see below
  model.vocab_size = 32768       section 3
  model.seq_len = 2048           section 3
  model.qk_norm = True           section 3
  model.z_loss = 0.0001          ours; section 3 gives no weight
  model.param_dtype = float32    ours; section 3: --config.model.param_dtype=bfloat16
  model.remat = full             ours
  model.loss_chunk = 256         ours
  inner.optimizer = adamw(b1=0.9, b2=0.99, eps=1e-8)  section 3; eps is ours
  inner.gradient_dtype = bfloat16  section 3
  inner.warmup_steps = 1000      section 3
  inner.final_fraction = 0.05    section 3
  inner.clip_norm = 1.0          section 3
  outer.optimizer = sgd(momentum=0.9, nesterov=True)  section 3
  data.source = tfds:c4/en:3.1.0  section 3; the version is ours
  eval.every = 1000              ours
  eval.tokens = 4194304          ours

Weight decay is 1 / steps (section 3). The tasks are those of section 3 if their package
is installed (docs/evaluation.md), else none.

The table below has the cost of a run (6 N FLOPs per token; hours of a v5e at 40% of its
peak). "slices" has the grid of each of two v5e slices on which M = 2 fits, and the
train.accumulate that this needs (docs/aot.md). "loss" has the paper's losses (Tables 4
and 5) of data-parallel, and of DiLoCo with M = 1, 2, 4 and 8 (4B and 10B: up to 4):

  size  tokens  FLOPs   chip hours  slices      loss
  35M   0.7B    1.5e17  0.53        1x1 1       3.485 3.482 3.508 3.554 3.621
  90M   1.8B    9.6e17  3.4         1x1 1       3.167 3.162 3.182 3.213 3.265
  180M  3.6B    4.0e18  14          1x1 2       2.950 2.943 2.957 2.981 3.019
  330M  6.6B    1.3e19  47          1x1 8       2.784 2.777 2.788 2.808 2.841
  550M  11B     3.7e19  130         2x2 2       2.653 2.645 2.657 2.673 2.698
  1.3B  26B     2.0e20  700         2x2 4       2.460 2.451 2.464 2.472 2.493
  2.4B  48B     7.0e20  2500        2x4 4       2.326 2.317 2.323 2.332 2.351
  4B    80B     2.0e21  7100        2x4 16      2.224 2.219 2.220 2.230
  10B   200B    1.2e22  41000       4x8 4       2.090 2.086 2.086 2.096
"""

import math

from diloco.config import ALGORITHMS, default_config
from diloco.errors import ConfigError
from diloco.evaluate import tasks
from diloco.scaling_laws import paper, predict
from diloco.scaling_laws.recommend import recommend
from diloco.util.command import parse_count, parse_options

# {size: (layers, attention heads of size 64, training tokens)}.
SCALES = {
  row["scale"]: (
    int(row["layers"]),
    int(row["heads"]),
    int(row["token_budget_tokens_corrected"]),
  )
  for row in paper.read("table3_models")
}
# {heads: microbatches with which models up to so many heads fit the two slices of
# docs/aot.md}.
ACCUMULATE = {12: 1, 16: 2, 20: 8, 24: 2, 40: 4, 48: 16, 64: 4}
OPTIONS = {
  "M": int,
  "H": int,
  "algorithm": ALGORITHMS,
  "method": predict.METHODS,
  "overtrain": float,
  "data": ("c4", "dolma"),
}

# The paper's runs: the grid of Table 4, the extrapolations of Tables 5 and 12, and the
# overtrained runs of section 5.2. Section 5.2 does not name its sizes; here they are
# all sizes except 4B and 10B.
_ALGORITHMS = (
  "algorithm=data_parallel",
  *(f"algorithm=diloco,M={m}" for m in (1, 2, 4, 8)),
)
_LARGE = ("4B", "10B")
_TUNED = tuple(s for s in SCALES if s not in _LARGE)
PAPER = "2503.09799"
ITEMS = {
  "table 3": tuple(SCALES),
  "table 4": tuple(f"{s},{a}" for s in _TUNED for a in _ALGORITHMS),
  "table 5": tuple(f"{s},{a}" for s in _LARGE for a in _ALGORITHMS[:4]),
  "figure 11": tuple(
    f"{s},{a},overtrain={factor}"
    for s in _TUNED
    for a in _ALGORITHMS[:4]
    for factor in (1, 4, 16)
  ),
}
ITEMS["table 12"] = ITEMS["table 5"] + tuple(
  f"{s},{a},method=independent" for s in _LARGE for a in _ALGORITHMS[1:4]
)
ITEMS["figure 2"] = ITEMS["table 4"]
ITEMS["figure 13"] = ITEMS["table 4"] + ITEMS["table 5"]
ITEMS["figure 12"] = ITEMS["figure 11"]
RUNS = ITEMS["table 4"] + ITEMS["table 12"] + ITEMS["figure 11"]


def get_config(arg: str = "35M"):
  size, _, rest = arg.partition(",")
  options = parse_options(rest, OPTIONS)
  data = options.get("data", "dolma" if "overtrain" in options else "c4")
  layers, heads, tokens = SCALES[size] if size in SCALES else shape(size)
  c = default_config()
  c.algorithm = options.get("algorithm", "streaming")
  c.replicas = options.get("M", 2)
  c.sync_every = options.get("H", 30)
  c.model.num_layers, c.model.num_heads, c.model.dim = layers, heads, 64 * heads
  c.model.vocab_size, c.model.seq_len = 32_768, paper.SEQ_LEN
  c.model.remat, c.model.loss_chunk = "full", 256

  hyper = recommend(
    paper.num_params(layers, c.model.dim),
    c.replicas,
    options.get("method", "joint"),
    c.algorithm,
    options.get("overtrain", 1),
    tokens=tokens,
  )
  c.inner.learning_rate = hyper.learning_rate
  c.inner.gradient_dtype = "bfloat16"
  c.train.batch_size, c.train.tokens = hyper.batch_sequences, hyper.tokens
  c.train.accumulate = next((n for most, n in ACCUMULATE.items() if heads <= most), 16)
  if c.algorithm != "data_parallel":
    c.outer.learning_rate = hyper.outer_learning_rate

  c.data.source, c.data.tokenizer = "tfds:c4/en:3.1.0", "c4_32k.model"
  if data == "dolma":
    c.data.source = "tfds:dolma:1.0.0"
    c.data.eval_source = "tfds:c4/en:3.1.0"
  c.eval.every, c.eval.tokens, c.eval.tasks = 1000, 2**22, tasks.of_the_papers()
  return c


def shape(size: str) -> tuple[int, int, int]:
  """Returns layers, heads and tokens of a size that is not in Table 3.

  Raises:
    ConfigError: the size is not a number, is below 10M, or differs from every shape by
      over 20%.
  """
  unknown = ConfigError(
    f"the size is {size!r}; write one of {', '.join(SCALES)}, or any other from 10M on."
  )
  try:
    params = parse_count(size)
  except ValueError:
    raise unknown from None

  def distance(heads: int) -> float:
    return abs(math.log(paper.num_params(depth(heads), 64 * heads) / params))

  heads = min(range(4, 257), key=distance)
  if params < 10e6 or distance(heads) > math.log(1.2):
    raise unknown
  n = paper.num_params(depth(heads), 64 * heads)
  return depth(heads), heads, int(paper.CHINCHILLA * n)


def depth(heads: int) -> int:
  """Returns the number of layers: 3 for every 4 heads, as in Table 3."""
  return round(3 * heads / 4)
