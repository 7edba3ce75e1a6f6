"""Chinchilla-optimal runs of Scaling Laws for DiLoCo (arXiv 2503.09799).

  python -m diloco.main --config=configs/chinchilla.py:1.3B,M=2 --workdir=...
  python -m diloco.main --config=configs/chinchilla.py:550M,M=2,overtrain=16 ...
  python -m diloco list_configs configs/chinchilla.py

The argument is the size, and after it any of M (replicas), H, algorithm, method (joint
or independent), overtrain (multiplies the budget of 20 tokens per parameter) and data
(c4 or dolma). `RUNS` lists the paper's runs, `ITEMS` those of each table and figure.

The sizes of Table 3, 35M to 10B, have its shapes and token budgets. Any other size from
10M on takes the nearest shape of the same family: width 64 * heads, 3 layers for every
4 heads. Learning rates and batch are those of `python -m diloco scaling_laws
recommend`. H is 30, as in the paper. The default algorithm is streaming; the paper uses
diloco. Runs with overtrain train on Dolma and are evaluated on C4, as in section 5.2.
"""

import math

from diloco.config import ALGORITHMS, default_config
from diloco.errors import ConfigError
from diloco.scaling_laws import paper, predict
from diloco.scaling_laws.recommend import recommend
from diloco.util.command import parse_count, parse_options

# Size: layers, attention heads (of size 64), training tokens.
SCALES = {
  row["scale"]: (
    int(row["layers"]),
    int(row["heads"]),
    int(row["token_budget_tokens_corrected"]),
  )
  for row in paper.read("table3_models")
}
OPTIONS = {
  "M": int,
  "H": int,
  "algorithm": ALGORITHMS,
  "method": predict.METHODS,
  "overtrain": float,
  "data": ("c4", "dolma"),
}

# The paper's runs: the grid of Table 4, the extrapolations of Tables 5 and 12, and
# section 5.2, which does not say which sizes it overtrains: here all but the largest.
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
  if c.algorithm != "data_parallel":
    c.outer.learning_rate = hyper.outer_learning_rate

  c.data.source, c.data.tokenizer = "tfds:c4/en:3.1.0", "c4_32k.model"
  if data == "dolma":
    c.data.source = "tfds:dolma:1.0.0"
    c.data.eval_source = "tfds:c4/en:3.1.0"
  c.eval.every, c.eval.tokens = 1000, 2**22
  return c


def shape(size: str) -> tuple[int, int, int]:
  """Returns layers, heads and tokens of a size that is not in Table 3.

  Raises:
    ConfigError: the size is not a number, or is more than 20% from every shape.
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
  if distance(heads) > math.log(1.2):
    raise unknown
  n = paper.num_params(depth(heads), 64 * heads)
  return depth(heads), heads, int(paper.CHINCHILLA * n)


def depth(heads: int) -> int:
  """Returns the number of layers: 3 for every 4 heads, as in Table 3."""
  return round(3 * heads / 4)
