"""Fits scaling laws, and recommends hyperparameters from these laws.

python -m diloco scaling_laws tables
python -m diloco scaling_laws tables --sizes=nominal --json
python -m diloco scaling_laws figures --out=/tmp/figures
python -m diloco scaling_laws fit my_runs.csv --where=sync_every=30
python -m diloco scaling_laws recommend --params=4e9 --replicas=2
python -m diloco scaling_laws recommend --params=10B --method=independent --json
python -m diloco scaling_laws recommend --params=700M --results=my_runs.csv
"""

import argparse
import dataclasses
import json
import os
import sys

from diloco.util.types import Json

# OpenBLAS reads this variable when it is loaded. Other threads would spin while L-BFGS
# works on tiny matrices, and `tables` would take ten times the CPU time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from diloco.scaling_laws import paper, predict, results, runs
from diloco.scaling_laws import recommend as recommend_lib
from diloco.scaling_laws import tables as tables_lib
from diloco.scaling_laws.fits import leave_largest_out, show
from diloco.util.command import (
  Parser,
  as_path,
  guarded,
  in_range,
  make_folder,
  parse_count,
  parse_options,
)

ROWS = {
  "algorithm": "{algorithm}, M = {replicas}, {method} laws",
  "learning rate": "{learning_rate:.4g}",
  "outer learning rate": "{outer_learning_rate:g}  ({outer_source})",
  "batch": "{batch_tokens:,.0f} tokens; rounded {rounded:,} tokens ="
  " {batch_sequences} x {seq_len}",
  "steps": "{steps:,}",
  "tokens": "{tokens:,} = {ratio:.3g} N",
}


def make_parser() -> Parser:
  parser = Parser(prog="python -m diloco scaling_laws", description=__doc__)
  commands = parser.add_subparsers(required=True)
  p = commands.add_parser("tables", help="the paper's tables: ours / theirs")
  p.set_defaults(command=tables)
  p.add_argument("--sizes", choices=list(paper.SIZES), help="which N; see paper.py")
  p = commands.add_parser("figures", help="draw figures 2 and 13")
  p.set_defaults(command=figures)
  p.add_argument("--out", type=as_path, required=True, help="folder for the files")
  p = commands.add_parser("fit", help="fit laws to your own runs")
  p.set_defaults(command=fit)
  p.add_argument("csv", type=as_path, help="your runs, see docs/scaling_laws.md")
  p.add_argument("--where", default="", help="rows to take, such as seed=0,dim=64")
  p.add_argument("--any", action="store_true", help="fit despite problems of the grid")
  p = commands.add_parser("recommend", help="hyperparameters and loss of a run")
  p.set_defaults(command=recommend)
  add = p.add_argument
  add("--params", required=True, help="parameters N, such as 4e9, 4B or 700M")
  add("--replicas", type=int, default=2, help="replicas M")
  text = "default: joint, or independent if the results have one M"
  add("--method", choices=predict.METHODS, help=text)
  add("--algorithm", choices=("data_parallel", "diloco", "streaming"), default="diloco")
  add("--overtrain", type=float, default=1.0, help="multiplies the token budget")
  text = "tokens per sequence; default: that of the runs behind the laws"
  add("--seq_len", type=int, help=text)
  add("--fsdp", type=int, default=1, help="devices in one replica")
  text = "tokens per step; default: by the law of the batch"
  add("--batch_tokens", type=in_range(1.0), default=0.0, help=text)
  add("--results", type=as_path, help="CSV of your runs instead of the paper's laws")
  add("--where", default="", help="filters --results, such as sync_every=30,seed=0")
  add("--any", action="store_true", help="accept gaps and edge optima in --results")
  for p in commands.choices.values():
    p.add_argument("--json", action="store_true", help="print JSON")
  return parser


def tables(args: argparse.Namespace) -> list[dict]:
  """Computes the paper's tables, and prints each table as soon as it is computed."""
  _print(args, "ours [90% interval, Student's t] / paper")
  computed = []
  for table in tables_lib.all_tables(args.sizes):
    _print(args, f"\n{tables_lib.show(table)}")
    computed.append(dataclasses.asdict(table))
  return computed


def figures(args: argparse.Namespace) -> list[str]:
  """Draws the paper's figures; prints and returns their paths."""
  from diloco.scaling_laws import figures  # Matplotlib is slow to import.

  paths = figures.draw(make_folder(args.out, "--out"))
  _print(args, "\n".join(paths))
  return paths


def fit(args: argparse.Namespace) -> Json:
  """Fits the laws of a CSV file; prints them, and the runs' problems and notes.

  Returns:
    {law: {quantity: {parameter: {value, interval}}}, 'problems': [sentence]}. Each law
    also has {'left_out': {quantity: {M: residual}}}: the residuals at the largest N of
    a law that is fitted to the smaller N (Section 6.3), if there are enough sizes.

  Raises:
    ValueError: the runs cannot be fitted.
  """
  table = runs.read(args.csv, parse_options(args.where, place="--where"))
  laws, problems = results.fit_runs(table, strict=not args.any)
  problems += [note for law in laws.values() for note in law.notes]
  answer: dict[str, Json] = {}
  parameters = ["value [90% interval, Student's t]; batch in tokens"]
  missed = ["|log y - log y~| at the largest N of laws fitted to the others, by M"]
  for name, law in laws.items():
    answer[name], left_out = {}, {}
    for quantity in ("loss", "learning_rate", "batch"):
      label, one = f"{name:<18}{quantity:<15}", getattr(law, quantity)
      if one is None:
        answer[name][quantity] = None
        parameters.append(f"{label}-")
        continue
      answer[name][quantity] = {
        k: {"value": getattr(one.law, k), "interval": interval}
        for k, interval in one.interval().items()
      }
      shown = [f"{k} {show(**p)}" for k, p in answer[name][quantity].items()]
      parameters.append(label + "  ".join(shown))
      if residuals := leave_largest_out(one):
        if "beta" not in one.names:
          residuals = {law.replicas[0]: residuals[1]}
        left_out[quantity] = residuals
        missed.append(label + "  ".join(f"{m}: {r:.4f}" for m, r in residuals.items()))
    answer[name]["left_out"] = left_out
  _print(args, "\n".join([*parameters, *missed, *(f"note: {p}" for p in problems)]))
  return answer | {"problems": problems}


def recommend(args: argparse.Namespace) -> Json:
  """Computes and prints a recommendation and the expected losses.

  Returns:
    The fields of Recommendation, `loss` of the run and `dp_loss` of data-parallel. Keys
    that end in `_floor` are losses by the paper's law with a floor; keys that end in
    `_measured` are losses that the paper measured. A loss is None if no law or no run
    gives it. `notes` come last.

  Raises:
    ValueError: the arguments or the results of the runs cannot be used.
  """
  laws = None
  if (args.where or args.any) and not args.results:
    raise ValueError("--where and --any need --results, which is not given.")
  if args.results:
    table = runs.read(args.results, parse_options(args.where, place="--where"))
    laws, _ = results.fit_runs(table, strict=not args.any)
  n, m = parse_count(args.params, "--params"), args.replicas
  # Joint laws of another algorithm serve only if this algorithm has no law for M.
  names = [*(laws or ["joint"])]
  if f"{args.algorithm}_M{m}" in names:
    names = [name for name in names if name.startswith(args.algorithm)]
  joint = any(name.endswith("joint") for name in names)
  method = args.method or ("joint" if joint else "independent")
  recommended = recommend_lib.recommend(
    n,
    m,
    method,
    args.algorithm,
    overtrain=args.overtrain,
    seq_len=args.seq_len,
    fsdp=args.fsdp,
    batch_tokens=args.batch_tokens,
    laws=laws,
  )
  answer = dataclasses.asdict(recommended)
  for key, algorithm in (("loss", args.algorithm), ("dp_loss", "data_parallel")):
    run = (n, m, method, algorithm)
    # Laws of the loss hold only for the tokens per parameter of the fitted runs.
    known = args.overtrain == 1 and (not laws or key == "loss" or algorithm in laws)
    printed = known and not laws
    answer[key] = predict.predict(*run, laws) if known else None
    answer[f"{key}_floor"] = predict.predict(*run, floor=True) if printed else None
    answer[f"{key}_measured"] = predict.measured(*run) if printed else None
  notes = answer.pop("notes")
  answer["command"] = train_command(args.params, bool(laws), recommended)
  if laws and answer["dp_loss"]:
    notes += laws["data_parallel"].problems
  answer["notes"] = tuple(dict.fromkeys(notes))
  _print(args, show_answer(answer))
  return answer


def train_command(params: str, own: bool, r: recommend_lib.Recommendation) -> str:
  """Writes the command that trains the recommended run.

  Args:
    params: N as the user wrote it, such as 1.3B.
    own: whether the laws come from the user's runs, whose config is not known.
    r: the recommendation.
  """
  fields = {
    "inner.learning_rate": f"{r.learning_rate:.4g}",
    "train.batch_size": r.batch_sequences,
    "train.tokens": r.tokens,
    "model.seq_len": r.seq_len,
  }
  if r.outer_learning_rate:
    fields["outer.learning_rate"] = f"{r.outer_learning_rate:g}"
  name = f"chinchilla:{params},algorithm={r.algorithm},M={r.replicas}"
  if own or r.params < 10e6:
    name = f"YOUR_CONFIG_OF_{params}"
    fields = {"algorithm": r.algorithm, "replicas": r.replicas} | fields
  elif r.seq_len % 256:  # chinchilla computes the loss in chunks of 256 tokens.
    fields["model.loss_chunk"] = 0
  flags = [f"--config.{field}={value}" for field, value in fields.items()]
  flags = [f"--config={name}", *flags, f"--workdir=runs/{params}"]
  return " ".join(["python -m diloco train", *flags])


def show_answer(answer: Json) -> str:
  """Formats the answer as text."""
  rounded = answer["batch_sequences"] * answer["seq_len"]
  ratio = answer["tokens"] / answer["params"]
  rows = {
    name: text.format(**answer, rounded=rounded, ratio=ratio)
    for name, text in ROWS.items()
  }
  rows["loss"] = _loss(answer, "loss")
  if answer["algorithm"] == "data_parallel":
    del rows["outer learning rate"]
  else:
    rows["data-parallel's loss"] = _loss(answer, "dp_loss")
  if answer["loss_floor"]:
    rows["believe"] = "the loss with a floor; beyond 2.4B power laws end 3% too low"
  rows["command"] = answer["command"]
  lines = [*rows.items(), *(("note", note) for note in answer["notes"])]
  return "\n".join(f"{name:<22}{text}" for name, text in lines)


def _loss(answer: Json, key: str) -> str:
  if answer[key] is None:
    return (
      f"no law: laws hold only for {answer['tokens_per_param']:.3g} tokens per"
      " parameter and for the fitted algorithms"
    )
  texts = ("{}", "with a floor {}", "the paper measured {:.3f}")
  values = (answer[key], answer[f"{key}_floor"], answer[f"{key}_measured"])
  return "; ".join(text.format(value) for text, value in zip(texts, values) if value)


def run(args: argparse.Namespace) -> None:
  """Runs one command, which prints its answer as text; with --json, prints JSON."""
  data = args.command(args)
  if args.json:
    print(json.dumps(data, indent=2, allow_nan=False, default=dataclasses.asdict))


def _print(args: argparse.Namespace, text: str) -> None:
  if not args.json:
    print(text, flush=True)


def main(argv: list[str] | None = None) -> int:
  """Runs one command; returns the exit status."""
  return guarded(run, make_parser().parse_args(argv))


if __name__ == "__main__":
  sys.exit(main())
