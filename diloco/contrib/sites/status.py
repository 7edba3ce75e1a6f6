"""Shows the progress of the rounds of several sites, from the files of their group."""

import collections
import contextlib
import json
import pathlib

from diloco.config import complete
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.group.journal import FOLDER, history
from diloco.errors import ConfigError
from diloco.log import status
from diloco.log.status import Status
from diloco.log.workdir import read_config
from diloco.util.storage import Folder
from diloco.util.types import Json

_ROUND_S = 30  # Assumed seconds of a round: headers of rounds have no times.


def of_group(folder: pathlib.Path, now: float) -> Status:
  """Reads the progress of the rounds of a group."""
  config, by_number = read_config(folder), history(Folder(folder))
  newest = folder / FOLDER
  for path in sorted(newest.glob("*.round")):  # Rounds that no snapshot has yet.
    if header := _header(path):
      by_number[header["round"]], newest = header, path
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


def _header(path: pathlib.Path) -> Json | None:
  """Reads a closed round without its payloads; None if it is damaged."""
  with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
    header = json.loads(file.readline())
    wanted = {"round", "fragment", "step", "tokens"}
    return header if isinstance(header, dict) and header.keys() >= wanted else None
  return None


status.READERS[FOLDER] = of_group
