"""Hyperparameters, budget and expected loss of a run, from the scaling laws.

python -m diloco.recommend --params=4e9 --replicas=2
python -m diloco.recommend --params=10B --replicas=4 --method=independent --json
python -m diloco.recommend --params=700M --replicas=2 --results=my_runs.csv

Laws: Tables 7 to 10 of Scaling Laws for DiLoCo (arXiv 2503.09799), or those fitted to
one's own runs. N is 12 layers width^2 + 32,000 width. Imports no JAX.
"""

import argparse
import dataclasses
import json
import math
import sys

from diloco.config.command_line import parse_options
from diloco.scaling_laws import cells, paper, predict, results
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


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m diloco.recommend",
    description="Hyperparameters and expected loss from the scaling laws.",
  )
  add = parser.add_argument
  add("--params", required=True, help="N, such as 4e9, 4B or 700M")
  add("--replicas", type=int, default=2, help="M")
  add("--method", choices=predict.METHODS, default="joint")
  add("--algorithm", choices=("data_parallel", "diloco", "streaming"), default="diloco")
  add("--overtrain", type=float, default=1.0, help="multiplies the budget")
  add("--seq_len", type=int, default=paper.SEQ_LEN, help="tokens per sequence")
  add("--fsdp", type=int, default=1, help="devices inside a replica")
  add("--results", help="CSV of your own runs instead of the paper's laws")
  add("--where", default="", help="rows of --results, such as sync_every=30,seed=0")
  add("--any", action="store_true", help="fit --results despite edges and gaps")
  add("--json", action="store_true")
  return parser


def run(args: argparse.Namespace) -> dict:
  """The recommendation, both losses and what was measured, as plain data.

  Raises:
    ValueError: the arguments or the results cannot work.
  """
  laws = None
  if (args.where or args.any) and not args.results:
    raise ValueError("--where and --any are about --results, which is not given.")
  if args.results:
    runs = cells.read_csv(args.results, parse_options(args.where, place="--where"))
    laws, _ = results.fit_runs(runs, strict=not args.any)
  n = paper.number(args.params)
  found = recommend(
    n,
    args.replicas,
    args.method,
    args.algorithm,
    args.overtrain,
    args.seq_len,
    args.fsdp,
    laws=laws,
  )
  answer = dataclasses.asdict(found)
  # Laws of the loss are for the tokens per parameter of the runs they were fitted to.
  known = args.overtrain == 1
  for key, algorithm in (("loss", args.algorithm), ("dp_loss", "data_parallel")):
    there = known and (laws is None or key == "loss" or algorithm in laws)
    if laws and there and key == "dp_loss":
      more = [p for p in laws[algorithm].problems if p not in answer["notes"]]
      answer["notes"] = (*answer["notes"], *more)
    for floor in (False, True):
      expected = None
      if there and not (laws and floor):
        p = predict.predict(n, args.replicas, args.method, algorithm, laws, floor)
        expected = dataclasses.asdict(p)
      answer[f"{key}_floor" if floor else key] = expected
    theirs = predict.measured(n, algorithm, args.replicas, args.method)
    answer[f"{key}_measured"] = None if laws or args.overtrain != 1 else theirs
  return answer


def show(answer: dict) -> str:
  """The answer as text."""
  m, plain = answer["replicas"], answer["algorithm"] == "data_parallel"
  sequences, seq_len = answer["batch_sequences"], answer["seq_len"]
  rows = [
    ("algorithm", f"{answer['algorithm']}, M = {m}, {answer['method']} laws"),
    ("learning rate", f"{answer['learning_rate']:.4g}"),
    (
      "batch",
      f"{answer['batch_tokens']:,.0f} tokens; rounded {sequences * seq_len:,} tokens ="
      f" {sequences} x {seq_len}",
    ),
    ("steps", f"{answer['steps']:,}"),
    ("tokens", f"{answer['tokens']:,} = {answer['tokens'] / answer['params']:.3g} N"),
    ("loss", _loss(answer, "loss")),
  ]
  if not plain:
    outer = f"{answer['outer_learning_rate']:g}  ({answer['outer_source']})"
    rows.insert(2, ("outer learning rate", outer))
    rows.append(("data-parallel's loss", _loss(answer, "dp_loss")))
  rows += [("note", note) for note in answer["notes"]]
  return "\n".join(f"{name:<22}{value}" for name, value in rows)


def _loss(answer: dict, key: str) -> str:
  p, floor, theirs = (answer[key + suffix] for suffix in ("", "_floor", "_measured"))
  if p is None:
    return (
      f"no law: it holds for {answer['tokens_per_param']:.3g} tokens per parameter and"
      " the algorithms fitted"
    )
  parts = [_with_interval(p)]
  if floor:
    parts.append(f"with a floor {_with_interval(floor)}")
  if theirs:
    parts.append(f"the paper measured {theirs:.3f}")
  return "; ".join(parts)


def _with_interval(p: dict) -> str:
  span = "{:.3f}, {:.3f}".format(*p["interval"]) if p["interval"] else "-"
  return f"{p['loss']:.3f} [{span}]"


def main(argv: list[str] | None = None) -> int:
  """Prints a recommendation; returns the exit status."""
  args = make_parser().parse_args(argv)
  try:
    answer = run(args)
    print(json.dumps(answer, indent=2, allow_nan=False) if args.json else show(answer))
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
