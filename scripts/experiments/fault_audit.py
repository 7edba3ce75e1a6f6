"""Audits a run of several sites: checks that no round is lost and all sites agree.

Reads the closed rounds of the group, the metrics.jsonl of every site, and the last
checkpoints of all sites. A stopped run has no last checkpoints; the audit repeats its
outer steps instead.
"""

import argparse
import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sites_run
from sites_run import GROUP, ROOT

from diloco.config import Config
from diloco.config.command_line import load_config
from diloco.contrib.sites import replay
from diloco.contrib.sites.calendar import Calendar, as_all
from diloco.contrib.sites.group.journal import Journal, history
from diloco.util.storage import open_storage

# The audit reads the files of a group whose names begin with one of these.
FILES = ("config.json", "journal/", "sites/", "snapshots/")
# Metrics of a merge that must be equal on all sites, as all use the same payloads.
_SHARED = ("fragment", "sites", "outer_update_norm")


def config(path: str, fields: Sequence[str]) -> Config:
  """Resolves the config of a run.

  Args:
    path: path of the config's file, relative to the repository.
    fields: flags --config.NAME=VALUE.
  """
  return load_config(str(ROOT / path), fields)


def lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Reads JSON lines; skips lines that a kill cut short."""
  if path.exists():
    for line in path.read_text(errors="replace").splitlines():
      with contextlib.suppress(ValueError):
        yield json.loads(line)


def closed_rounds(group: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the headers of all closed rounds, from the files of the group."""
  storage = open_storage(str(group), "--out", writes=False)
  journal, headers = Journal(storage), history(storage)
  journal.closed = max(headers, default=-1) + 1
  journal.advance()
  headers |= journal.headers
  return [headers[r] for r in sorted(headers)]


def audit(
  folder: pathlib.Path,
  path: str,
  fields: Sequence[str],
  of_site: Mapping[int, Sequence[str]],
  measured: slice,
  stopped: bool = False,
) -> dict[str, Any]:
  """Audits the run in `folder`.

  Args:
    folder: has the workdirs of the sites, and the files of the group in GROUP.
    path, fields: see `config`.
    of_site: {site: further fields of this site}.
    measured: the rounds whose tokens count.
    stopped: whether the run was stopped before its last round.

  Returns:
    The results:
      problems: sentences; empty if all logs agree.
      the sums that `count` returns, over all rounds.
      tokens: tokens of the measured contributions, mean over the fragments.
      merges: how many rounds each site merged, by its metrics.
  """
  calendar = Calendar(config(path, fields))
  rounds = closed_rounds(folder / GROUP)
  # A stop, like a kill, may cut off the newest send from a log, but nothing else.
  end = [{"kind": "arrival", "step": calendar.config.train.steps}] if stopped else []
  by_site = {
    k: [*lines(folder / sites_run.name(k) / "metrics.jsonl"), *end]
    for k in range(calendar.sites)
  }
  problems, merges = check_rounds(rounds, calendar, stopped), list[int]()
  for k, records in by_site.items():
    problems += check_site(k, records, rounds, calendar)
    own = Calendar(as_all(config(path, [*fields, *of_site.get(k, [])])))
    problems += check_tokens(k, rounds, own)
    merges.append(len({r["round"] for r in records if r["kind"] == "receive"}))
  problems += check_merges(by_site)
  if not stopped:
    problems += check_states(folder, [*map(sites_run.name, by_site)])
  elif replay.replay(argparse.Namespace(group=str(folder / GROUP))):
    problems.append("the rounds give other bits than the sites have noted")
  tokens = sum(sum(r["tokens"].values()) for r in rounds[measured])
  return {
    "problems": problems,
    **count(rounds, calendar.sites),
    "tokens": tokens / calendar.fragments,
    "merges": merges,
  }


def count(rounds: list[dict], sites: int) -> dict[str, float]:
  """Computes sums over the closed rounds.

  Returns:
    rounds, full, fewer: closed rounds, rounds with all sites, rounds with fewer sites.
    lost: payloads that are missing in the closed rounds.
    late: payloads that came too late, or for which a round waited in vain.
    longest_wait_s: the longest that a round waited after its quorum.
  """
  members = [len(r["tokens"]) for r in rounds]
  return {
    "rounds": len(rounds),
    "full": sum(n == sites for n in members),
    "fewer": sum(n < sites for n in members),
    "lost": sum(sites - n for n in members),
    "late": sum(len(r["late"]) for r in rounds),
    "longest_wait_s": max((r["waited_s"] for r in rounds), default=0.0),
  }


def check_rounds(
  rounds: list[dict], calendar: Calendar, stopped: bool = False
) -> list[str]:
  """Checks that every round of the calendar closed once, in order."""
  numbers = [r["round"] for r in rounds]
  wanted = [*range(len(rounds) if stopped else len(calendar.rounds))]
  problems = []
  if numbers != wanted:
    missing, twice = sorted({*wanted} - {*numbers}), len(numbers) - len({*numbers})
    problems.append(
      f"the group has {len(numbers)} rounds, not {len(wanted)} in order: missing"
      f" {missing[:5]}, {twice} twice"
    )
  for r in rounds:
    pair = (r["step"], r["fragment"])
    if r["round"] < len(wanted) and pair != calendar.rounds[r["round"]]:
      problems.append(f"round {r['round']} is (step, fragment) {pair}")
    came = r["tokens"] or r.get("refused")
    if r["tokens"].keys() != r["payloads"].keys() or not came:
      problems.append(
        f"round {r['round']} has tokens of {[*r['tokens']]}, but payloads"
        f" of {[*r['payloads']]}"
      )
  return problems


def check_site(
  k: int, records: list[dict], rounds: list[dict], calendar: Calendar
) -> list[str]:
  """Checks the metrics of a site against the closed rounds."""
  by_number = {r["round"]: r for r in rounds}
  merged = [r for r in records if r["kind"] == "receive"]
  problems = []
  for record in merged:
    closed = by_number.get(int(record["round"]))
    own = (record["fragment"], record["sites"])
    if closed is None:
      problems.append(f"site {k} merged round {record['round']:g}, which never closed")
    elif own != (closed["fragment"], len(closed["tokens"])):
      problems.append(f"site {k} merged round {record['round']:g} as {own}")
  sent = {(r["step"], r["fragment"]) for r in records if r["kind"] == "send"}
  steps = [r["step"] for r in records]
  # A site logs a send one launch after it. So a kill may cut off the newest send from
  # the log, but not earlier sends.
  cut, at = set[int](), 0
  for record in records:
    if record["kind"] == "arrival" and at:
      cut.add(calendar.first_after(at))
    if record["kind"] in ("arrival", "send"):
      at = record["step"]
  for r in rounds:
    is_logged = (r["step"], r["fragment"]) in sent or r["round"] in cut
    if str(k) in r["tokens"] and not is_logged:
      problems.append(f"round {r['round']} has a payload that site {k} never sent")
  if calendar.rounds and max(steps, default=0) < calendar.config.train.steps:
    problems.append(f"site {k} ended at step {max(steps, default=0)}")
  return problems


def check_tokens(k: int, rounds: list[dict], calendar: Calendar) -> list[str]:
  """Checks the token counts of a site's payloads, by the calendar of this site."""
  per_step = calendar.config.tokens_per_step // calendar.config.replicas
  problems = []
  for r in rounds:
    if tokens := r["tokens"].get(str(k)):
      steps = tokens / r["per_step"][str(k)]
      most = calendar.steps_behind(r["round"], 0)
      if r["per_step"][str(k)] != per_step or steps != round(steps) or steps > most:
        problems.append(
          f"round {r['round']} has {tokens} tokens of site {k}, not those of 1 to"
          f" {most} steps of {per_step}"
        )
  return problems


def check_merges(records: dict[int, list[dict]]) -> list[str]:
  """Checks that all sites computed the same numbers from the same round."""
  seen = dict[int, tuple[int, tuple]]()
  problems = []
  for k, of_site in records.items():
    for record in (r for r in of_site if r["kind"] == "receive"):
      number = int(record["round"])
      values = tuple(record.get(name) for name in _SHARED)
      other, expected = seen.setdefault(number, (k, values))
      if values != expected:
        problems.append(
          f"round {number} gave site {k} {values}, but site {other} {expected}"
        )
  return problems


def check_states(folder: pathlib.Path, names: Sequence[str]) -> list[str]:
  """Compares the outer parameters of the last checkpoints, bit for bit."""
  found = {name: outer_parameters(folder / name) for name in names}
  first = next(iter(found.values()))
  problems = []
  for name, arrays in found.items():
    if not arrays or arrays.keys() != first.keys():
      problems.append(f"{name} has no last checkpoint like that of {names[0]}")
      continue
    different = [n for n, x in arrays.items() if x.tobytes() != first[n].tobytes()]
    if different:
      problems.append(f"{name} ends with other values of {different[:3]}")
  return problems


def outer_parameters(workdir: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads the outer parameters and optimizer state of the newest checkpoint."""
  import jax
  import orbax.checkpoint as ocp

  from diloco.checkpoint.record import folder_of, steps_of

  for step in steps_of(workdir)[:1]:
    tree = ocp.StandardCheckpointer().restore(folder_of(workdir) / str(step) / "state")
    parts = {name: tree[name] for name in ("theta", "outer_opt_state") if name in tree}
    leaves = jax.tree_util.tree_flatten_with_path(parts)[0]
    return {f"{step}{jax.tree_util.keystr(p)}": np.asarray(x) for p, x in leaves}
  return {}
