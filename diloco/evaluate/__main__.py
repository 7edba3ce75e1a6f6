"""Held-out loss, and zero-shot tasks, of one replica's parameters.

  python -m diloco.evaluate --workdir=/tmp/sample --tasks=hellaswag,piqa,arc_easy

The command evaluates the outer parameters of the newest checkpoint, or an export. It
prints a table and writes evaluation_<step>.json into the workdir; --details=FILE keeps
the log-likelihood of every choice, --heldout adds the held-out loss (needs the data).
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax

from diloco.config import ConfigError, changed, command_line
from diloco.evaluate import tasks
from diloco.evaluate.evaluation import Evaluation
from diloco.run.load import load


def table(results: dict[str, tasks.TaskResult]) -> str:
  """One line per task, in per cent."""
  lines = [f"{'task':<16}{'items':>8}{'accuracy':>17}{'length-normalised':>20}"]
  for name, r in results.items():
    cells = (
      f"{100 * value:.2f} +- {100 * error:.2f}"
      for value, error in ((r.accuracy, r.stderr), (r.accuracy_norm, r.stderr_norm))
    )
    lines.append(f"{name:<16}{r.items:>8,}" + "{:>17}{:>20}".format(*cells))
    if r.truncated:
      lines.append(f"  {r.truncated:,} choices did not fit into the model's seq_len")
  return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m diloco.evaluate", description="Evaluates a trained model."
  )
  parser.add_argument("--workdir", required=True, help="of a run, or an export")
  parser.add_argument("--step", type=int, help="default: the newest checkpoint")
  parser.add_argument("--tasks", default="", help=f"of {','.join(tasks.TASKS)}")
  parser.add_argument("--items", type=int, default=0, help="per task; 0: all")
  parser.add_argument("--heldout", action="store_true", help="also the held-out loss")
  parser.add_argument("--data_dir", help="of TFDS; default: that of the run")
  parser.add_argument("--details", type=pathlib.Path, help="JSON lines, one per item")
  return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
  """Evaluates and writes the files; returns what evaluation_<step>.json holds."""
  model = load(args.workdir, args.step)
  command_line.make_folder(args.workdir, "--workdir")
  if args.details:
    command_line.make_folder(args.details.parent, "--details")
  if not args.tasks and not args.heldout:
    raise ConfigError(
      f"--tasks is empty; name some of {', '.join(tasks.TASKS)}, or add --heldout."
    )
  fields = {"eval.tasks": args.tasks, "eval.task_items": args.items}
  if args.data_dir is not None:
    fields["data.data_dir"] = args.data_dir
  said: dict[str, Any] = {"step": model.step}
  details: list[dict[str, Any]] = []
  with jax.set_mesh(model.mesh):
    c = changed(model.config, fields)
    evaluation = Evaluation(c, model.mesh, held_out=args.heldout)
    results = evaluation.tasks(model.params, details)
    if args.heldout:
      said |= dataclasses.asdict(evaluation.loss(model.params))
  said["tasks"] = {name: dataclasses.asdict(r) for name, r in results.items()}
  print(table(results) if results else "")
  if args.heldout:
    print(
      f"held-out {said['loss']:.4f} nats/token, {said['bits_per_byte']:.4f} bits/byte"
    )
  path = pathlib.Path(args.workdir) / f"evaluation_{model.step}.json"
  path.write_text(json.dumps(said, indent=2) + "\n")
  if args.details:
    args.details.write_text("".join(json.dumps(d) + "\n" for d in details))
  return said


def main(argv: list[str] | None = None) -> int:
  try:
    run(make_parser().parse_args(argv))
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
