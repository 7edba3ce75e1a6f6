"""The claims of both papers about learning, and which small runs decide each.

`python -m diloco reproduce` compares them with runs of configs/ablations.py and
configs/ladder.py, whose points have the keys below (docs/ablations.md).
"""

from diloco.reproduce.claim import Claim

LADDER = "ladder"
STREAMING, SCALING = "2501.18512", "2503.09799"
# Per cent of the loss that Streaming DiLoCo calls negligible (section 3.3.2).
SMALL = 0.2


def _algorithm(name: str, replicas: int, **more) -> dict:
  return {"algorithm": name, "replicas": replicas, **more}


_PLAIN = _algorithm("data_parallel", 1)
_ONE, _TWO, _FOUR = (_algorithm("diloco", m) for m in (1, 2, 4))
_SMALLEST, _LARGEST = {"size": 105}, {"size": 1081}
_COARSE = {"compressor": "quantize", "bits": 4}
_STRIDED, _SEQUENTIAL = {"pattern": "strided"}, {"pattern": "sequential"}


def _gap(m: dict, at: dict) -> tuple[dict, dict]:
  """Returns the keys of DiLoCo and of data-parallel where both have the keys `at`."""
  return m | at, _PLAIN | at


CLAIMS = (
  Claim(
    "algorithms",
    "Streaming DiLoCo in 4 bits is within 1% of data-parallel",
    f"{STREAMING}, table 5, 35M",
    "+0.6% (3.53, 3.51); the margin is ours",
    {"name": "streaming, H=30"},
    {"name": "data-parallel"},
    high=1.0,
  ),
  Claim(
    "algorithms",
    "Streaming DiLoCo is no worse than DiLoCo",
    f"{STREAMING}, table 5, 35M",
    "-0.3% (3.53, 3.54)",
    {"name": "streaming, H=30"},
    {"name": "DiLoCo, H=30"},
    high=SMALL,
  ),
  Claim(
    "algorithms",
    "H=100 is worse than H=30",
    f"{STREAMING}, table 5, 35M",
    "+0.8% (3.56, 3.53)",
    {"name": "streaming, H=100"},
    {"name": "streaming, H=30"},
    low=0,
  ),
  Claim(
    "fragments",
    "The strided pattern is better than the sequential one",
    f"{STREAMING}, figure 6, section 3.3.1",
    "slightly lower, no number",
    {"fragment": 3} | _STRIDED,
    {"fragment": 3} | _SEQUENTIAL,
    high=0,
  ),
  Claim(
    "fragments",
    f"Fragments of one layer cost less than {SMALL}% against one of all layers",
    f"{STREAMING}, figure 6, section 3.3.1",
    "a trade-off with the peak of the bytes; the margin is ours",
    {"fragment": 1},
    {"fragment": 6},
    high=SMALL,
  ),
  Claim(
    "fedpart",
    "Freezing the other fragments is worse",
    f"{STREAMING}, section 3.3.1",
    "+20% (3.2145, 2.6749)",
    {"fedpart": True},
    {"fedpart": False},
    low=SMALL,
  ),
  *(
    Claim(
      "tau",
      f"With alpha = {alpha:g}, tau = {tau} costs less than {SMALL}% against tau = 1",
      f"{STREAMING}, figure 8",
      f"below {SMALL}% up to 10 steps",
      {"alpha": alpha, "tau": tau},
      {"alpha": alpha, "tau": 1},
      high=SMALL,
    )
    for alpha in (0.0, 0.5)
    for tau in (5, 10)
  ),
  Claim(
    "tau_2",
    f"A second replica with tau = 5 costs less than {SMALL}% against tau = 1",
    f"{STREAMING}, figure 10, section 3.3.2",
    "limited up to 5 steps; the margin is ours",
    {"tau_2": 5},
    {"tau_2": 1},
    high=SMALL,
  ),
  Claim(
    "compression",
    "4 bits are as good as 32",
    f"{STREAMING}, figure 11",
    "no difference; the margin is ours",
    _COARSE,
    {"compressor": "quantize", "bits": 32},
    high=SMALL,
  ),
  *(
    Claim(
      "compression",
      f"At the bytes of 4 bits, {name} is worse than E3M0",
      f"{STREAMING}, figure 11",
      "significantly worse, no number",
      {"compressor": method, "bits": 4},
      _COARSE,
      low=0,
    )
    for method, name in (("topk", "top-k"), ("random", "FedDropout"), ("dare", "DARE"))
  ),
  *(
    Claim(
      "compression",
      f"{name} is worse than top-k at the same bytes",
      f"{STREAMING}, figure 11",
      "particularly at random, no number",
      {"compressor": method, "bits": 4},
      {"compressor": "topk", "bits": 4},
      low=0,
    )
    for method, name in (("random", "FedDropout"), ("dare", "DARE"))
  ),
  *(
    Claim(
      "replicas",
      f"M=4 is worse than M=2 at a fixed {fixed} batch",
      f"{STREAMING}, figure 12, {where}",
      number,
      _algorithm("streaming", 4, fixed=fixed),
      _algorithm("streaming", 2, fixed=fixed),
      low=0,
    )
    for fixed, where, number in (
      ("global", "table 6, 35M, H=30 (which batch is not said)", "+2.0% (3.60, 3.53)"),
      ("local", "table 7, 1B, Dolma, 25B tokens, H=100", "+2.6% (2.73, 2.66)"),
    )
  ),
  Claim(
    "cadence",
    "From H=30 to H=5, Streaming DiLoCo gains more or loses less than DiLoCo",
    f"{STREAMING}, figure 13",
    "more robust to low H, no number",
    _algorithm("streaming", 2, sync_every=5),
    _algorithm("streaming", 2, sync_every=30),
    high=0,
    than=(
      _algorithm("diloco", 2, sync_every=5),
      _algorithm("diloco", 2, sync_every=30),
    ),
  ),
  Claim(
    "cadence",
    "DiLoCo gets worse from H=30 to H=5",
    f"{STREAMING}, figure 13",
    "no number",
    _algorithm("diloco", 2, sync_every=5),
    _algorithm("diloco", 2, sync_every=30),
    low=0,
  ),
  *(
    Claim(
      "cadence",
      f"{name} gets worse from H=30 to H=300",
      f"{STREAMING}, figure 13",
      "no number",
      _algorithm(algorithm, 2, sync_every=300),
      _algorithm(algorithm, 2, sync_every=30),
      low=0,
    )
    for algorithm, name in (("diloco", "DiLoCo"), ("streaming", "Streaming DiLoCo"))
  ),
  Claim(
    "evaluated",
    "Outer parameters are better than the mean of the replicas",
    f"{STREAMING}, table 3",
    "-0.4% (2.67, 2.68)",
    {"evaluated": "outer"},
    {"evaluated": "mean of replicas"},
    high=0,
  ),
  Claim(
    "evaluated",
    "Outer parameters are better than the first replica",
    f"{STREAMING}, table 3",
    "-3.6% (2.67, 2.77), in the text a small difference",
    {"evaluated": "outer"},
    {"evaluated": "first replica"},
    high=0,
  ),
  Claim(
    "batch",
    "DiLoCo with M=1 is better than data-parallel",
    f"{SCALING}, finding 2, table 4, 35M",
    "-0.1% (3.482, 3.485)",
    _ONE,
    _PLAIN,
    high=0,
  ),
  *(
    Claim(
      "batch",
      f"DiLoCo with M={m['replicas']} is worse than data-parallel at small N",
      f"{SCALING}, table 4, 35M",
      number,
      m,
      _PLAIN,
      low=0,
    )
    for m, number in ((_TWO, "+0.7% (3.508, 3.485)"), (_FOUR, "+2.0% (3.554, 3.485)"))
  ),
  Claim(
    "batch",
    "The gap of data-parallel to M=1 grows with the batch, from 8 to 32",
    f"{SCALING}, figure 3",
    "increases, no number",
    _PLAIN | {"batch": 32},
    _ONE | {"batch": 32},
    low=0,
    than=(_PLAIN | {"batch": 8}, _ONE | {"batch": 8}),
  ),
  *(
    Claim(
      "batch",
      f"At a large batch, M={m['replicas']} is better than data-parallel",
      f"{SCALING}, {where}",
      "lower, no number",
      *_gap(m, {"batch": 32}),
      high=0,
    )
    for m, where in (
      (_ONE, "figure 3"),
      (_TWO, "finding 3, figure 4"),
      (_FOUR, "finding 3, figure 4"),
    )
  ),
  Claim(
    "batch",
    "M=2 is worse than M=1",
    f"{SCALING}, table 4, 35M",
    "+0.7% (3.508, 3.482)",
    _TWO,
    _ONE,
    low=0,
  ),
  Claim(
    "batch",
    "The best batch of M=4 is larger than that of data-parallel",
    f"{SCALING}, finding 3, figure 4",
    "larger, no number",
    _FOUR,
    _PLAIN,
    low=0,
    column="batch",
  ),
  Claim(
    "batch",
    "The best batch of M=4 is larger than that of M=1",
    f"{SCALING}, finding 3, figure 4",
    "grows with M, no number",
    _FOUR,
    _ONE,
    low=0,
    column="batch",
  ),
  Claim(
    "outer_rate",
    "The best outer rate grows with M",
    f"{SCALING}, finding 4, figures 7, 8",
    "larger, no number",
    _FOUR | {"sync_every": 30},
    _ONE | {"sync_every": 30},
    low=0,
    column="outer_lr",
  ),
  *(
    Claim(
      "outer_rate",
      f"For M={m['replicas']}, the best outer rate grows from H=1 to H=100",
      f"{SCALING}, figure 8",
      "larger, no number",
      m | {"sync_every": 100},
      m | {"sync_every": 1},
      low=0,
      column="outer_lr",
    )
    for m in (_ONE, _TWO, _FOUR)
  ),
  *(
    Claim(
      "outer_rate",
      f"For M={m['replicas']}, H={h} is worse than H={other}",
      f"{SCALING}, figure 9",
      number,
      m | {"sync_every": h},
      m | {"sync_every": other},
      low=0,
    )
    for m in (_ONE, _TWO, _FOUR)
    for h, other, number in (
      (1, 10, "H=1 is the worst, no number"),
      (1, 100, "H=1 is the worst, no number"),
      (100, 10, "rises with H, no number"),
    )
  ),
  Claim(
    "outer_rate",
    "From H=10 to H=100, the loss of M=1 rises less than that of M=2",
    f"{SCALING}, figure 9",
    "less pronounced for M=1, no number",
    _ONE | {"sync_every": 100},
    _ONE | {"sync_every": 10},
    high=0,
    than=(_TWO | {"sync_every": 100}, _TWO | {"sync_every": 10}),
  ),
  *(
    Claim(
      "overtrain",
      f"With {factor}D tokens, M=1 is better than data-parallel",
      f"{SCALING}, figure 11",
      "slightly lower, no number",
      *_gap(_ONE, {"overtrain": factor}),
      high=0,
    )
    for factor in (1, 4, 16)
  ),
  Claim(
    "overtrain",
    "With 16D tokens, M=1 is better than M=2",
    f"{SCALING}, figure 11",
    "slightly lower, no number",
    _ONE | {"overtrain": 16},
    _TWO | {"overtrain": 16},
    high=0,
  ),
  Claim(
    "overtrain",
    "The gap of M=2 to data-parallel does not grow from D to 16D tokens",
    f"{SCALING}, figure 11",
    "parallel curves over N for each multiple; that the gap stays is our reading",
    *_gap(_TWO, {"overtrain": 16}),
    high=SMALL,
    than=_gap(_TWO, {"overtrain": 1}),
  ),
  Claim(
    LADDER,
    "DiLoCo with M=1 is better than data-parallel at the largest N",
    f"{SCALING}, finding 2, table 4, 2.4B",
    "-0.4% (2.317, 2.326)",
    *_gap(_ONE, _LARGEST),
    high=0,
  ),
  *(
    Claim(
      LADDER,
      f"M={m['replicas']} does better relative to data-parallel at the largest N",
      f"{SCALING}, finding 1, table 4, 35M to 2.4B",
      number,
      *_gap(m, _LARGEST),
      high=0,
      than=_gap(m, _SMALLEST),
    )
    for m, number in (
      (_ONE, "-0.3 points (-0.4%, -0.1%)"),
      (_TWO, "-0.8 points (-0.1%, 0.7%)"),
      (_FOUR, "-1.7 points (0.3%, 2.0%)"),
    )
  ),
  Claim(
    LADDER,
    "M=4 is worse than M=2 at the largest N",
    f"{SCALING}, table 4, 2.4B",
    "+0.4% (2.332, 2.323)",
    _FOUR | _LARGEST,
    _TWO | _LARGEST,
    low=0,
  ),
)
