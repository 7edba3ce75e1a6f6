"""The command `recommend`: hyperparameters, budget and expected loss of a run."""

import argparse
import dataclasses
from typing import Any

from diloco.scaling_laws import paper, predict, results, runs
from diloco.scaling_laws.recommend import recommend
from diloco.util.command import parse_count, parse_options

NOTES = 5  # The text shows so many notes.
ROWS = {
  "algorithm": "{algorithm}, M = {replicas}, {method} laws",
  "learning rate": "{learning_rate:.4g}",
  "outer learning rate": "{outer_learning_rate:g}  ({outer_source})",
  "batch": "{batch_tokens:,.0f} tokens; rounded {rounded:,} tokens ="
  " {batch_sequences} x {seq_len}",
  "steps": "{steps:,}",
  "tokens": "{tokens:,} = {ratio:.3g} N",
}


def add_options(parser: argparse.ArgumentParser) -> None:
  """Adds the options of the command, except --json."""
  add = parser.add_argument
  add("--params", required=True, help="parameters N, such as 4e9, 4B or 700M")
  add("--replicas", type=int, default=2, help="replicas M")
  add("--method", choices=predict.METHODS, default="joint")
  add("--algorithm", choices=("data_parallel", "diloco", "streaming"), default="diloco")
  add("--overtrain", type=float, default=1.0, help="multiplies the token budget")
  add("--seq_len", type=int, default=paper.SEQ_LEN, help="tokens per sequence")
  add("--fsdp", type=int, default=1, help="devices in one replica")
  add("--results", help="CSV of your own runs instead of the paper's laws")
  add("--where", default="", help="filters --results, such as sync_every=30,seed=0")
  add("--any", action="store_true", help="accept gaps and edge optima in --results")


def ask(args: argparse.Namespace) -> dict[str, Any]:
  """Computes the recommendation and the expected losses, as plain data.

  Returns:
    The fields of Recommendation, `loss` of the run and `dp_loss` of data-parallel. Keys
    with `_floor` are losses by the paper's law with a constant, keys with `_measured`
    are losses that the paper measured. None: no law or no run gives this loss. `notes`
    come last.

  Raises:
    ValueError: the arguments or the results of runs cannot work.
  """
  laws = None
  if (args.where or args.any) and not args.results:
    raise ValueError("--where and --any need --results, which is not given.")
  if args.results:
    table = runs.read(args.results, parse_options(args.where, place="--where"))
    laws, _ = results.fit_runs(table, strict=not args.any)
  n, m, method = parse_count(args.params, "--params"), args.replicas, args.method
  settings = (args.algorithm, args.overtrain, args.seq_len, args.fsdp)
  answer = dataclasses.asdict(recommend(n, m, method, *settings, laws=laws))
  for key, algorithm in (("loss", args.algorithm), ("dp_loss", "data_parallel")):
    run = (n, m, method, algorithm)
    # Laws of the loss hold only for the tokens per parameter of the fitted runs.
    known = args.overtrain == 1 and (not laws or key == "loss" or algorithm in laws)
    printed = known and not laws
    answer[key] = predict.predict(*run, laws) if known else None
    answer[f"{key}_floor"] = predict.predict(*run, floor=True) if printed else None
    answer[f"{key}_measured"] = predict.measured(*run) if printed else None
  notes = answer.pop("notes")
  if laws and answer["dp_loss"]:
    notes += laws["data_parallel"].problems
  return answer | {"notes": tuple(dict.fromkeys(notes))}


def show(answer: dict[str, Any]) -> str:
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
  lines = [*rows.items(), *(("note", note) for note in answer["notes"][:NOTES])]
  if (more := len(answer["notes"]) - NOTES) > 0:
    lines.append(("note", f"{more} more: see --json."))
  return "\n".join(f"{name:<22}{text}" for name, text in lines)


def _loss(answer: dict[str, Any], key: str) -> str:
  if answer[key] is None:
    return (
      f"no law: laws hold only for {answer['tokens_per_param']:.3g} tokens per"
      " parameter and for the fitted algorithms"
    )
  texts = ("{}", "with a floor {}", "the paper measured {:.3f}")
  values = (answer[key], answer[f"{key}_floor"], answer[f"{key}_measured"])
  return "; ".join(text.format(value) for text, value in zip(texts, values) if value)
