"""Hyperparameters, budget and expected loss of a run, from the scaling laws.

python -m diloco.recommend --params=4e9 --replicas=2
python -m diloco.recommend --params=10B --replicas=4 --method=independent --json
python -m diloco.recommend --params=700M --replicas=2 --results=my_runs.csv
"""

import argparse
import dataclasses
import json
import sys

from diloco.config.command_line import parse_options
from diloco.scaling_laws import cells, paper, predict, results
from diloco.scaling_laws.recommend import recommend


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
