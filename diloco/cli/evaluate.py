"""Evaluates a trained model: zero-shot tasks and held-out loss.

  python -m diloco evaluate runs/sample --tasks=hellaswag,piqa,arc_easy

The command reads the outer parameters of the newest checkpoint, or of an export. It
prints a line for each task and writes evaluation_<step>.json into the workdir. If the
workdir is read-only, the command prints this content instead. --details=FILE also
writes the log-likelihood of every choice. --heldout adds the held-out loss and needs
the data.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import jax

from diloco.config import Config, changed
from diloco.config.comparable import HELD_OUT, basis, differing
from diloco.errors import ConfigError
from diloco.evaluate import tasks
from diloco.evaluate.evaluation import Evaluation
from diloco.interop.load import load
from diloco.log.workdir import read_contents
from diloco.mesh.modes import plain_modes
from diloco.util import command, files, remote
from diloco.util.types import Json


@plain_modes()
def run(args: argparse.Namespace) -> None:
  """Evaluates a model, prints the results and writes the files."""
  has_tasks = bool(args.tasks.strip(" ,"))
  if not has_tasks and not args.heldout:
    raise ConfigError(
      f"--tasks is empty; name some of {', '.join(tasks.TASKS)}, or add --heldout."
    )
  if (args.details or args.items) and not has_tasks:
    raise ConfigError("--details and --items need --tasks, which is empty.")
  if args.details:
    command.make_parent(args.details, "--details")
  workdir = remote.local_copy(args.workdir, "WORKDIR")
  model = load(workdir, args.step)
  fields = {
    "eval.tasks": args.tasks,
    "eval.task_items": args.items,
    "data.data_dir": args.data_dir or model.config.data.data_dir,
  }
  said: Json = {"step": model.step}
  details: list[Json] = []
  with jax.set_mesh(model.mesh):
    evaluation = Evaluation(changed(model.config, fields), model.mesh, args.heldout)
    results = evaluation.tasks(model.params, details, show=bool(args.tasks))
    of_tasks = {name: dataclasses.asdict(r) for name, r in results.items()}
    for name, values in of_tasks.items():
      print(tasks.line(name, values))
    if args.heldout:
      r = evaluation.loss(model.params)
      note = _note(workdir, model.config, evaluation)
      said |= dataclasses.asdict(r) | {"note": note}
      print(f"held-out {r.loss:.4f} nats/token, {r.bits_per_byte:.4f} bits/byte{note}")
  path = workdir / f"evaluation_{model.step}.json"
  before = files.read_json(path) or {}  # The results of earlier calls.
  said = before | said | {"tasks": before.get("tasks", {}) | of_tasks}
  try:
    files.write_json(path, said)
    remote.put_back(path)
  except OSError as error:  # The run may belong to another user.
    print(f"{path} cannot be written ({error.strerror}); it would have:")
    print(json.dumps(said))
  if args.details:
    args.details.write_text("".join(json.dumps(d) + "\n" for d in details))


def _note(workdir: pathlib.Path, c: Config, evaluation: Evaluation) -> str:
  """Returns a warning if the run itself was evaluated on another text; else ""."""
  now = basis(c.to_dict(), {HELD_OUT: evaluation.held_out})
  then = basis(c.to_dict(), read_contents(workdir))
  return "".join(
    f"; {what} is {new} and was {old} when the run was evaluated, so this loss cannot"
    " be compared with those of the run"
    for what, (new, old) in differing(now, then).items()
  )


def main(argv: list[str] | None = None) -> int:
  parser = command.model_parser("evaluate", __doc__)
  add, path = parser.add_argument, command.as_path
  add("--tasks", default="", help=f"some of {','.join(tasks.TASKS)}, or .jsonl files")
  add("--items", type=command.in_range(0), default=0, help="of a task; 0: all")
  add("--heldout", action="store_true", help="add the held-out loss")
  add("--data_dir", help="root of TFDS data sets; default: the run's")
  add("--details", type=path, help="one JSON line per item")
  return command.guarded(run, parser.parse_args(argv), mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
