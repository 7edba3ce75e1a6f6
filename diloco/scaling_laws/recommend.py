"""Recommends the hyperparameters and the budget of a run, from scaling laws.

The laws are Tables 7 to 10 of Scaling Laws for DiLoCo (arXiv 2503.09799), or laws
fitted to your own runs. For the paper's laws, N is
12 * layers * width^2 + 32,000 * width.
Imports no JAX.
"""

import dataclasses
import math

from diloco.scaling_laws import paper, predict, results
from diloco.scaling_laws.fits import PowerLaw

# {M: outer learning rate}. Figure 7 of arXiv 2503.09799 draws the rates without
# numbers. The paper says that the rate lies on the grid 0.2, 0.4, ... 1.0, is constant
# in N from 335M on and rises with M. Other papers print 0.4 (Streaming DiLoCo, Section
# 3.2; main experiments with M = 2) and 0.7 for M = 8 (DiLoCo, arXiv 2311.08105). The
# values here lie on the grid, rise with M and are near 0.4 and 0.7. The values for
# M = 1 and 4 are our reading.
OUTER_RATES = {1: 0.4, 2: 0.4, 4: 0.6, 8: 0.8}
OUTER_SOURCE = (
  "0.4 at M=2 and 0.7 at M=8 are printed; figure 7: rises with M, not with N"
)

_H = 30  # H of the runs behind the paper's laws.
_SMALLEST = 34e6  # Slightly below the exact N of the model 35M.
# Runs with fewer rounds need less outer momentum, as 0.9 averages over ten rounds. With
# 160 rounds, momentum 0.5 ends 2% lower than momentum 0.9 (docs/gap.csv).
_FEW_ROUNDS = 300


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """The hyperparameters and the budget of a run.

  Attributes:
    params: N.
    replicas: M.
    algorithm: data_parallel, diloco or streaming.
    method: joint or independent.
    learning_rate: peak of the inner learning rate.
    batch_tokens: tokens per step over all replicas, from the law or as given.
    batch_sequences: the nearest number of sequences per step that fits the mesh.
    seq_len: tokens per sequence.
    outer_learning_rate: 0 for data_parallel, which has none.
    outer_source: where the outer learning rate comes from.
    tokens_per_param: D / N of the runs that the law of the loss was fitted to.
    steps: T.
    tokens: tokens in T steps of the rounded batch.
    notes: sentences on the limits of the recommendation.
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
  seq_len: int | None = None,
  fsdp: int = 1,
  tokens: float = 0.0,
  batch_tokens: float = 0.0,
  laws: dict[str, results.Laws] | None = None,
) -> Recommendation:
  """Recommends the hyperparameters of one run.

  Args:
    params: N.
    replicas: M.
    method: joint uses laws in N and M; independent uses laws in N alone, fitted at
      this M. data_parallel always uses laws in N alone.
    algorithm: data_parallel, diloco or streaming. The paper's laws of DiLoCo also serve
      streaming.
    overtrain: multiplies the budget.
    seq_len: tokens per sequence; None: that of your own runs if `laws` has it, else
      the paper's 2,048.
    fsdp: devices inside a replica; they must divide the sequences of the replica.
    tokens: budget; 0: N times the tokens per parameter of your own runs if `laws` has
      them, else 20 N.
    batch_tokens: tokens per step; 0: by the law of the batch.
    laws: laws of your own runs; None: the paper's laws.

  Raises:
    ValueError: a number is not positive, or there is no law for this M.
  """
  plain = algorithm == "data_parallel"
  name, source, own = predict.law_name(algorithm, replicas, method), "diloco", None
  if laws is not None:
    source, own = predict.own_laws(laws, name, algorithm)
  of_runs = own.seq_len if own else paper.SEQ_LEN
  seq_len = (of_runs or paper.SEQ_LEN) if seq_len is None else seq_len
  given = {"params": params, "replicas": replicas, "overtrain": overtrain}
  for field, value in (given | {"seq_len": seq_len, "fsdp": fsdp}).items():
    if not 0 < value <= 1e30:
      raise ValueError(f"{field} is {value}; give a positive number up to 1e30.")
  rate = _law_of("learning_rate", "inner_lr", name, own)
  if batch_tokens and own and not own.batch:
    by_law = own.one_batch or batch_tokens
  else:
    by_law = _law_of("batch", "batch_size", name, own)(params, replicas)
  batch_tokens = batch_tokens or by_law
  # Geometric mean of the least and the greatest D / N of your runs, or the paper's 20.
  known = own.tokens_per_param if own else None
  per_param = math.sqrt(math.prod(known)) if known else float(paper.CHINCHILLA)
  budget = (tokens or per_param * params) * overtrain
  sequences = round_batch(batch_tokens / seq_len, replicas * fsdp)
  steps = int(budget // (sequences * seq_len))
  if steps < 1:
    raise ValueError(
      f"params is {params:g}: its budget of {budget:g} tokens is less than one batch of"
      f" {sequences} sequences of {seq_len}; shorten seq_len or raise overtrain."
    )
  outer, outer_source = (0.0, "") if plain else _outer(replicas, own)
  notes = _notes(params, 1 if plain else replicas, own)
  if not plain and not source.startswith(algorithm):
    notes.insert(0, f"the laws are of {source}, as {algorithm} has no such law.")
  if of_runs and seq_len != of_runs:
    notes.append(
      f"the laws are of runs with sequences of {of_runs:,} tokens, and loss and rate"
      f" may differ for {seq_len:,}: sweep them."
    )
  rounds = steps // _H
  if own is None and not plain and params < _SMALLEST and rounds < _FEW_ROUNDS:
    notes.append(
      f"this run has {rounds} rounds of H = {_H}: small runs with so few end best with"
      " outer momentum 0.5 to 0.8 and an outer rate of about 2 (1 - momentum)"
      " (docs/settings.md)."
    )
  if not 0.6 < batch_tokens / by_law < 1.7:
    notes.append(
      f"rate and loss are those of the {'law' if not own or own.batch else 'run'}s'"
      f" batch, {by_law:,.0f} tokens, and do not hold for {batch_tokens:,.0f}."
    )
  ratio = sequences * seq_len / batch_tokens
  if not 0.6 < ratio < 1.7:
    notes.append(
      f"the rounded batch is {ratio:.1f} times the law's: fewer replicas, a shorter"
      " seq_len or a smaller fsdp would allow a nearer one."
    )
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
    notes=tuple(notes),
  )


def _notes(params: float, replicas: int, own: results.Laws | None) -> list[str]:
  """Writes a sentence for each of N, M and budget that is outside the fitted runs."""
  if own is None:
    # 10.1e9 lies slightly above the exact N of the model 10B.
    stretched = {
      f"N = {params:g} is beyond what the laws were fitted to, 35M to 2.4B, and tried"
      " at, 4B and 10B: sweep nearby.": not _SMALLEST < params < 10.1e9,
      f"M = {replicas} is beyond the 8 replicas that the laws were fitted to; the outer"
      " rate is that of 8: sweep it.": replicas > 8,
    }
    return [note for note, holds in stretched.items() if holds]
  n, m = own.sizes, own.replicas
  stretched = {
    f"N = {params:g} is beyond the runs' sizes, {n[0]:g} to {n[-1]:g}: sweep"
    " nearby.": not 0.99 * n[0] < params < 1.01 * n[-1],
    f"M = {replicas} is beyond the runs' replicas, {m[0]} to {m[-1]}: sweep"
    " it.": own.loss.law.beta != 0 and not m[0] <= replicas <= m[-1],
    "the results do not say how many tokens the runs had (no column tokens): the"
    f" budget is {paper.CHINCHILLA} tokens per parameter, the loss is for"
    " theirs.": own.tokens_per_param is None,
  }
  notes = [note for note, holds in stretched.items() if holds]
  return [*notes, *own.problems, *own.notes]


def _outer(replicas: int, own: results.Laws | None) -> tuple[float, str]:
  """Returns the outer learning rate and its source."""
  if own is None:
    return outer_rate(replicas), OUTER_SOURCE
  if not own.outer_rates:
    return outer_rate(replicas), f"the paper's, your runs name none; {OUTER_SOURCE}"
  below = [m for m in own.outer_rates if m <= replicas]
  m = max(below) if below else min(own.outer_rates)
  return own.outer_rates[m], f"the best of your runs at M={m}"


def outer_rate(replicas: int) -> float:
  """Returns the outer learning rate of the largest M <= `replicas` in OUTER_RATES."""
  return OUTER_RATES[max(m for m in OUTER_RATES if m <= replicas)]


def round_batch(sequences: float, unit: int) -> int:
  """Returns the unit * 2^k, k >= 0, whose ratio to `sequences` is nearest to 1.

  The paper sweeps powers of two. `unit` is M times the devices inside a replica, and
  the batch must be a multiple of `unit`. If `unit` is a power of two, so is the result.
  """
  return unit * 2 ** max(round(math.log2(sequences / unit)), 0)


def _law_of(quantity: str, table: str, name: str, own: results.Laws | None) -> PowerLaw:
  """Returns the law of the learning rate or of the batch in tokens."""
  if own is None:
    return paper.law(table, name)
  if (law := getattr(own, quantity)) is None:
    given = ", or give --batch_tokens" if quantity == "batch" else ""
    raise ValueError(
      f"the results have no law of the {quantity} for {name}: sweep three values of"
      f" {quantity} or more at two sizes or more, until the best is interior{given}."
    )
  return law.law
