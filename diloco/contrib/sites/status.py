"""Shows how the rounds of several sites go on, from the files of their group."""

import collections
import contextlib
import pathlib

from diloco.config import complete
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.group.journal import FOLDER, LINES, headers_in
from diloco.errors import ConfigError
from diloco.log import status
from diloco.log.status import Status
from diloco.log.workdir import backwards, read_config

_ROUND_S = 30  # Assumed seconds of a round: lines of rounds have no times.


def of_group(folder: pathlib.Path, now: float) -> Status:
  """Reads how the rounds of a group go on."""
  config, by_number = read_config(folder), headers_in(backwards(folder / LINES))
  newest = folder / LINES
  for path in sorted((folder / FOLDER).glob("*.round")):  # rounds.jsonl comes later.
    with contextlib.suppress(OSError), path.open("rb") as file:
      by_number |= headers_in([file.readline()])
      newest = path
  rounds = [by_number[r] for r in sorted(by_number, reverse=True)]
  if not rounds:
    return Status(status.heading(config), {"round": "none closed yet"}, {})
  last, total, sites = rounds[0], None, None
  with contextlib.suppress(ConfigError):
    calendar = Calendar(complete(config))
    total, sites = len(calendar.rounds), calendar.sites
  sent = dict[str, int]()
  for r in rounds:
    for site in r["tokens"]:
      sent.setdefault(site, r["step"])
  refused = collections.Counter(site for r in rounds for site in r.get("refused", ()))
  inside = sorted(last["tokens"], key=int)
  news = {
    "round": f"{status.progress(last['round'] + 1, total)}, step {last['step']:,}",
    "sites": f"{status.progress(len(inside), sites)} in the last round:"
    f" {', '.join(inside)}",
  }
  if away := sorted(sent.keys() - inside, key=int):
    news["away"] = ", ".join(f"{k} since step {sent[k]:,}" for k in away)
  if never := {str(k) for k in range(sites or 0)} - sent.keys():
    news["never sent"] = ", ".join(sorted(never, key=int))
  if refused:
    news["refused"] = ", ".join(f"{n} of site {k}" for k, n in sorted(refused.items()))
  news |= status.last_line(newest, now, _ROUND_S, last["round"] + 1 == total)
  return Status(status.heading(config), news, {})


status.READERS[LINES] = of_group
status.READERS[FOLDER] = of_group  # Before there are lines.
