"""Repeats the outer steps of a group of sites from its journal, without training.

python -m diloco replay runs/group
python -m diloco replay runs/group --config.outer.learning_rate=0.7
python -m diloco replay runs/group --config.wire.format=e2m1 --weights=equal

WORKDIR is that of the coordinator. Every outer step from the oldest checkpoint on is
repeated, and its bits are compared with those that the coordinator had. With fields of
`outer` or `wire`, or with --weights, each update is also computed with these, one round
ahead: from the outer parameters and the momentum that the group had. Another format
codes the values of the payloads once more: what the first coding lost stays lost.
"""

import argparse
import ast
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from diloco.config import complete
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator import journal
from diloco.errors import ConfigError
from diloco.log.workdir import read_config
from diloco.util.command import Parser, as_path, guarded

_PREFIXES = ("--config.outer.", "--config.wire.")


def fields_of(flags: Sequence[str]) -> dict[str, Any]:
  """Returns the fields of `outer` and `wire` that flags change.

  Raises:
    ConfigError: a flag is no field of these with a value.
  """
  found = dict[str, Any]()
  for flag in flags:
    name, equals, text = flag.partition("=")
    if not (name.startswith(_PREFIXES) and equals):
      known = " or ".join(f"{prefix}FIELD=VALUE" for prefix in _PREFIXES)
      raise ConfigError(f"{flag} is no flag of replay; give {known}.")
    try:
      found[name.removeprefix("--config.")] = ast.literal_eval(text)
    except (SyntaxError, ValueError):
      found[name.removeprefix("--config.")] = text
  return found


def as_weights(text: str) -> dict[int, int]:
  """Reads SITE:WEIGHT,...; `equal` is none of them."""
  pairs = () if text == "equal" else text.split(",")
  if not all(re.fullmatch(r"\d+:\d+", pair) for pair in pairs):
    raise argparse.ArgumentTypeError(
      f"{text!r}; give equal or SITE:WEIGHT,... in whole numbers"
    )
  return {int(k): int(n) for k, n in (pair.split(":") for pair in pairs)}


def replay(
  workdir: pathlib.Path,
  fields: Mapping[str, Any],
  weights: Mapping[int, int] | None = None,
) -> int:
  """Repeats the rounds that are kept; returns 1 if a bit differs.

  Args:
    workdir: of the coordinator.
    fields: of `outer` and `wire`, for the other update.
    weights: {site: its weight in the other update, otherwise 1}; None: the tokens.

  Raises:
    ConfigError: the folder has no journal, lacks a round or a checkpoint, or has a
      damaged one; or the fields cannot work, or need another optimizer state.
  """
  os.environ["JAX_PLATFORMS"] = "cpu"
  kept = journal.kept(workdir)
  if not kept:
    raise ConfigError(
      f"WORKDIR is {str(workdir)!r}, which has no rounds in journal/; give the"
      " --workdir of a coordinator."
    )
  from diloco.checkpoint.record import steps_of
  from diloco.contrib.sites import outer_state
  from diloco.contrib.sites.coordinator import group
  from diloco.contrib.sites.coordinator.other_update import OtherUpdate

  c = complete(read_config(workdir))
  calendar = Calendar(c)
  method, state = group.first_state(calendar, workdir)
  plan, other = method.plan, None
  if fields or weights is not None:
    other = OtherUpdate(workdir, calendar, plan, state, fields, weights)
    print("round  step  fragment    update     other  cosine")
  # {number of applied rounds: step of the checkpoint that contains them}
  saved = {calendar.first_after(step): step for step in steps_of(workdir)}
  applied = 0
  if kept[0]:
    applied = min((r for r in saved if r >= kept[0]), default=-1)
    if applied < 0:
      raise ConfigError(
        f"WORKDIR is {str(workdir)!r}, where no checkpoint comes before the rounds in"
        f" journal/, which begin with {kept[0]}; restore checkpoints/ from a copy."
      )
    _, state = group.saved_state(calendar, workdir, [saved[applied]], state)
  begun, recorded = applied, journal.digests(workdir)
  for number in [r for r in kept if r >= begun]:
    entry = journal.read(workdir, number)
    closed = group.round_of(workdir, calendar, entry, applied)
    p = closed.fragment
    before = state.theta[p], state.opt_state[p]
    theta, opt_state, _ = outer_state.apply(plan, calendar, closed, *before)
    state, applied = state.after_update(p, theta, opt_state), applied + 1
    digest = outer_state.digest(theta, opt_state)
    if recorded.get(number, digest) != digest:
      print(
        f"Round {number} (step {entry.step}, fragment {p}, sites"
        f" {', '.join(map(str, entry.tokens))}): the outer state after it is not the"
        " one that the coordinator had."
      )
      return 1
    if other:
      end = other.theta(closed, *before)
      own, others, cosine = _compare(before[0], theta, end)
      row = f"{number:5}  {entry.step:4}  {p:8}"
      print(f"{row}  {own:8.2e}  {others:8.2e}  {cosine:6.3f}")
    if applied in saved:
      step = saved[applied]
      _, found = group.saved_state(calendar, workdir, [step], state)
      if outer_state.digests(found) != outer_state.digests(state):
        print(f"The checkpoint of step {step} is not what the rounds before it give.")
        return 1
  known = sum(begun <= number < applied for number in recorded)
  print(
    f"Rounds {begun} to {applied - 1} repeated: {known} compared with what the"
    f" coordinator noted, {sum(r > begun for r in saved)} checkpoints compared; no bit"
    " differs."
  )
  return 0


def _compare(before: Any, one: Any, other: Any) -> tuple[float, float, float]:
  """Returns the norms of two updates, and their cosine."""
  import jax
  import numpy as np

  flat = lambda tree: np.concatenate(
    [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
  )
  u, v = flat(one) - flat(before), flat(other) - flat(before)
  norms = float(np.linalg.norm(u)), float(np.linalg.norm(v))
  return *norms, float(u @ v) / max(norms[0] * norms[1], 1e-300)


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
  return replay(args.workdir, fields_of(flags), args.weights)


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco replay", description=__doc__)
  parser.add_argument("workdir", metavar="WORKDIR", type=as_path)
  text = (
    "weights of the sites in the other update, instead of their tokens: equal, or"
    " SITE:WEIGHT,... with 1 for the others; 1:0 leaves site 1 out"
  )
  parser.add_argument("--weights", metavar="WEIGHTS", type=as_weights, help=text)
  return guarded(run, *parser.parse_known_args(argv), mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
