"""Repeats the outer steps of a group of sites from its files, without training.

python -m diloco replay runs/group

The argument GROUP is the --group of the sites, a folder or a bucket. From the oldest
snapshot on, every closed round is applied again. The checksums (CRC-32) of the outer
state are compared with those of the newer snapshots and with those that the sites have
noted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from diloco.errors import ConfigError
from diloco.util.command import Parser, guarded
from diloco.util.types import Json


def replay(args: argparse.Namespace) -> int:
  """Repeats the rounds that are kept; returns 1 if a bit differs.

  Raises:
    ConfigError: there is no group, or a file that a site needs is damaged.
  """
  os.environ["JAX_PLATFORMS"] = "cpu"
  import json

  from diloco.config import complete
  from diloco.contrib.sites import outer_state
  from diloco.contrib.sites.calendar import Calendar
  from diloco.contrib.sites.group import journal, records
  from diloco.contrib.sites.measure import method_on_cpu
  from diloco.log.metrics import CONFIG
  from diloco.util.storage import open_storage

  storage = open_storage(args.group, "GROUP", writes=False)

  def damaged(name: str) -> ConfigError:
    return ConfigError(
      f"GROUP is {args.group!r}, whose {name} is missing or damaged; give the --group"
      " of a run, or restore the file from a copy."
    )

  def whole(name: str) -> tuple[Json, memoryview]:
    """Reads a file of the group that a site may need."""
    if unpacked := records.read(storage, name):
      return unpacked
    raise damaged(name)

  known = sorted(storage.names("snapshots"))
  whole_files = lambda names, end: {
    number for x in names if x.endswith(end) and (number := journal.number_of(x)) >= 0
  }
  states = whole_files(known, ".state")
  kept = whole_files(storage.names(journal.FOLDER), ".round")
  config = storage.get(CONFIG)
  if config is None:
    raise ConfigError(
      f"GROUP is {args.group!r}, which has no {CONFIG}; give the --group of a run."
    )
  newest = whole("lease")[0].get("snapshot") or 0
  oldest, first_kept = min(states, default=0), min(kept, default=0)
  # A copy made while a site deleted old rounds may have older snapshots.
  if first_kept in states and first_kept <= newest:
    oldest = first_kept
  if newest != oldest:
    whole(journal.state_of(newest))  # A new site begins with this state.
  calendar = Calendar(complete(json.loads(config)))
  method = method_on_cpu(calendar)
  first = whole(journal.state_of(oldest))[1]
  state = outer_state.from_bytes(bytes(first), method.init().outer)
  # (number of applied rounds, who noted the digests, digests of the outer state)
  noted = list[tuple[int, str, list[int]]]()
  for name in known:
    if name.endswith(".head"):
      head, _ = whole(f"snapshots/{name}")
      noted.append((journal.number_of(name), name, head["digests"]))
  # The number of rounds that the files speak of, of which none may be missing.
  ends = [number + 1 for number in kept]
  last = max([oldest, *(number for number, *_ in noted), *ends])
  for site in range(calendar.sites):
    record = records.read_record(storage, calendar, site)
    digests = record["digests"] if record else {}
    noted += [(int(r), f"site {site}", x) for r, x in digests.items()]
  rounds, applied, compared = journal.Journal(storage), oldest, 0
  while True:
    for _, name, said in [x for x in noted if x[0] == applied]:
      if said != outer_state.digests(state):
        print(f"After {applied} rounds, {name} has other bits than the rounds give.")
        return 1
      compared += 1
    closed = rounds.find(applied)
    if closed is None:
      break
    p = closed.fragment
    theta, opt_state, _ = outer_state.apply(
      method.sync, calendar, closed, state.theta[p], state.opt_state[p]
    )
    state, applied = state.after_update(p, theta, opt_state), applied + 1
  if applied < last:
    raise damaged(journal.path_of(applied))
  print(
    f"Rounds {oldest} to {applied - 1} of {len(calendar.rounds)} repeated, {compared}"
    " notes of the outer state compared; no bit differs."
  )
  return 0


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco replay", description=__doc__)
  parser.add_argument("group", metavar="GROUP")
  return guarded(replay, parser.parse_args(argv), mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
