"""Hyperparameters, budget and expected loss of a run, from the scaling laws.

Laws: Tables 7 to 10 of Scaling Laws for DiLoCo (arXiv 2503.09799), or those fitted to
one's own runs. N is 12 layers width^2 + 32,000 width. Imports no JAX.
"""

import dataclasses
import math

from diloco.scaling_laws import paper, predict, results
from diloco.scaling_laws.fits import PowerLaw

# The outer learning rate by M. Figure 7 of arXiv 2503.09799 draws it, prints no
# numbers, and says: on the grid 0.2, 0.4, ... 1.0, constant in N from 335M on, larger
# for larger M. Printed elsewhere are 0.4 (Streaming DiLoCo, Section 3.2, whose main
# experiments have M = 2) and 0.7 for M = 8 (DiLoCo, arXiv 2311.08105). The values here
# lie on the grid, rise with M and are near those two; M = 1 and 4 are our reading.
OUTER_RATES = {1: 0.4, 2: 0.4, 4: 0.6, 8: 0.8}
OUTER_SOURCE = (
  "0.4 at M=2 and 0.7 at M=8 are printed; figure 7: rises with M, not with N"
)


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """What to train with.

  Attributes:
    params: N.
    replicas: M.
    algorithm: data_parallel, diloco or streaming.
    method: joint or independent.
    learning_rate: peak of the inner learning rate.
    batch_tokens: tokens per step over all replicas, as the law has it.
    batch_sequences: sequences per step that the mesh can do, nearest to it.
    seq_len: tokens per sequence.
    outer_learning_rate: 0 for data_parallel, which has none.
    outer_source: where it comes from.
    tokens_per_param: D / N that the law of the loss is for.
    steps: T.
    tokens: T steps of the rounded batch.
    notes: sentences on where the laws are stretched.
  """

  params: float
  replicas: int
  algorithm: str
  method: str
  learning_rate: float
  batch_tokens: float
  batch_sequences: int
  seq_len: int
  outer_learning_rate: float
  outer_source: str
  tokens_per_param: float
  steps: int
  tokens: int
  notes: tuple[str, ...] = ()


def recommend(
  params: float,
  replicas: int = 2,
  method: str = "joint",
  algorithm: str = "diloco",
  overtrain: float = 1.0,
  seq_len: int = paper.SEQ_LEN,
  fsdp: int = 1,
  tokens: float = 0.0,
  laws: dict[str, results.Laws] | None = None,
) -> Recommendation:
  """Hyperparameters of one run.

  Args:
    params: N.
    replicas: M.
    method: joint takes the laws in N and M; independent those in N of this M alone.
      data_parallel has only the latter.
    algorithm: data_parallel, diloco or streaming, which takes DiLoCo's laws.
    overtrain: multiplies the budget.
    seq_len: tokens per sequence.
    fsdp: devices inside a replica, which must divide its sequences.
    tokens: budget; 0 takes 20 N, or the tokens per parameter of one's own runs.
    laws: of one's own runs; None takes the paper's.

  Raises:
    ValueError: a number is not positive, or there is no law for this M.
  """
  given = {"params": params, "replicas": replicas, "overtrain": overtrain}
  for name, value in (given | {"seq_len": seq_len, "fsdp": fsdp}).items():
    if not 0 < value < math.inf:
      raise ValueError(f"{name} is {value}; give a positive number.")
  plain = algorithm == "data_parallel"
  name = predict.law_name(algorithm, replicas, method)
  source, own = "diloco", None
  if laws is not None:
    source, own = predict.own_laws(laws, name, algorithm)
  rate, batch = _laws_of(name, own)
  batch_tokens = batch(params, replicas)
  per_param = _tokens_per_param(own)
  budget = (tokens or per_param * params) * overtrain
  sequences = round_batch(batch_tokens / seq_len, replicas * fsdp)
  steps = int(budget // (sequences * seq_len))
  if steps < 1:
    raise ValueError(
      f"params is {params:g}: its budget of {budget:g} tokens is less than one batch of"
      f" {sequences} sequences of {seq_len}; shorten seq_len or raise overtrain."
    )
  outer, outer_source = (0.0, "") if plain else _outer(replicas, own)
  notes = _notes(params, replicas, batch_tokens, sequences * seq_len, own)
  if not plain and not source.startswith(algorithm):
    notes = (f"no run of {algorithm} was fitted: the laws are of {source}.", *notes)
  return Recommendation(
    params=params,
    replicas=replicas,
    algorithm=algorithm,
    method="independent" if plain else method,
    learning_rate=rate(params, replicas),
    batch_tokens=batch_tokens,
    batch_sequences=sequences,
    seq_len=seq_len,
    outer_learning_rate=outer,
    outer_source=outer_source,
    tokens_per_param=per_param,
    steps=steps,
    tokens=steps * sequences * seq_len,
    notes=notes,
  )


def _notes(
  params: float, replicas: int, batch: float, rounded: int, own: results.Laws | None
) -> tuple[str, ...]:
  found = []
  # A hair beyond the exact sizes of 35M and 10B.
  if own is None and not 34e6 < params < 10.1e9:
    found.append(
      f"N = {params:g} is beyond what the laws were fitted to, 35M to 2.4B, and tried"
      " at, 4B and 10B: sweep nearby."
    )
  if own is None and replicas > 8:
    found.append(
      f"M = {replicas} is beyond the 8 replicas that the laws were fitted to; the outer"
      " rate is that of 8: sweep it."
    )
  if own is not None:
    found += _notes_on_runs(params, replicas, own)
  if not 0.6 < rounded / batch < 1.7:
    found.append(
      f"the rounded batch is {rounded / batch:.1f} times the law's: fewer replicas, a"
      " shorter seq_len or a smaller fsdp would allow a nearer one."
    )
  return tuple(found)


def _notes_on_runs(params: float, replicas: int, own: results.Laws) -> list[str]:
  found = []
  n, m = own.sizes, own.replicas
  if not 0.99 * n[0] < params < 1.01 * n[-1]:
    found.append(
      f"N = {params:g} is beyond the runs' sizes, {n[0]:g} to {n[-1]:g}: sweep nearby."
    )
  if own.loss.law.beta and not m[0] <= replicas <= m[-1]:
    found.append(
      f"M = {replicas} is beyond the runs' replicas, {m[0]} to {m[-1]}: sweep it."
    )
  if own.tokens_per_param is None:
    found.append(
      "the results do not say how many tokens the runs had (no column tokens): the"
      f" budget is {paper.CHINCHILLA} tokens per parameter, the loss is for theirs."
    )
  else:
    least, most = own.tokens_per_param
    if most > 1.1 * least:
      found.append(
        f"the runs had {least:.3g} to {most:.3g} tokens per parameter, which the law of"
        " the loss mixes: choose rows of one budget by --where."
      )
  return found + list(own.problems)


def _tokens_per_param(own: results.Laws | None) -> float:
  """D / N of the budget: the runs' (their geometric middle), or the paper's."""
  if own is None or own.tokens_per_param is None:
    return float(paper.CHINCHILLA)
  return math.sqrt(math.prod(own.tokens_per_param))


def _outer(replicas: int, own: results.Laws | None) -> tuple[float, str]:
  """The outer learning rate and where it comes from."""
  if own is None:
    return outer_rate(replicas), OUTER_SOURCE
  if not own.outer_rates:
    return outer_rate(replicas), f"the paper's, your runs name none; {OUTER_SOURCE}"
  below = [m for m in own.outer_rates if m <= replicas]
  m = max(below) if below else min(own.outer_rates)
  return own.outer_rates[m], f"the best of your runs at M={m}"


def outer_rate(replicas: int) -> float:
  """Outer learning rate for M replicas: that of the nearest tabulated M below."""
  return OUTER_RATES[max(m for m in OUTER_RATES if m <= replicas)]


def round_batch(sequences: float, unit: int) -> int:
  """The nearest unit * 2^k, k >= 0, by ratio.

  The paper sweeps powers of two; `unit` = M * devices inside a replica is what has to
  divide the batch. With unit a power of two the result is one.
  """
  return unit * 2 ** max(round(math.log2(sequences / unit)), 0)


def _laws_of(name: str, own: results.Laws | None) -> tuple[PowerLaw, PowerLaw]:
  """(inner learning rate, batch in tokens)."""
  if own is None:
    return paper.law("inner_lr", name), paper.law("batch_size", name)
  if own.learning_rate is None or own.batch is None:
    which = "batch" if own.learning_rate else "learning_rate"
    raise ValueError(
      f"the results have no law of the {which} for {name}: it was swept at fewer than"
      " two sizes; sweep it, or choose another method or number of replicas."
    )
  return own.learning_rate.law, own.batch.law
