"""Shows how the rounds of several sites go on, from the coordinator's files."""

import contextlib
import json
import pathlib
from typing import Any

from diloco.config import complete
from diloco.contrib.sites.arrival import checked, text
from diloco.contrib.sites.calendar import Calendar
from diloco.contrib.sites.coordinator.journal import ARRIVALS
from diloco.errors import ConfigError
from diloco.log import metrics
from diloco.log.status import (
  MORE,
  READERS,
  Status,
  by_fragment,
  checkpoint,
  duration,
  heading,
  last_line,
  progress,
)
from diloco.log.workdir import backwards, read_config
from diloco.util import files

ROUNDS = "rounds.jsonl"
_ROUND_S = 30  # Assumed seconds of a round: lines of rounds have no times.


def of_coordinator(folder: pathlib.Path, now: float) -> Status:
  """Reads how the rounds of a run of several sites go on."""
  config, rounds = read_config(folder), list[dict[str, Any]]()
  for line in backwards(folder / ROUNDS):
    with contextlib.suppress(ValueError):  # The last line may be cut short.
      rounds.append(json.loads(line))
  if not rounds:
    return Status(heading(config), {"round": "none closed yet"}, {})
  last, total, sites = rounds[0], None, None
  with contextlib.suppress(ConfigError):
    calendar = Calendar(complete(config))
    total, sites = len(calendar.rounds), calendar.sites
  syncs, sent, refused = dict[int, int](), dict[str, int](), dict[int, list[int]]()
  for r in rounds:
    syncs.setdefault(r["fragment"], r["step"])
    for site in r["tokens"]:
      sent.setdefault(site, r["step"])
    for site in r.get("refused", ()):
      refused.setdefault(site, []).append(r["step"])
  inside = sorted(last["tokens"], key=int)
  news = {
    "round": f"{progress(last['round'] + 1, total)}, step {last['step']:,}",
    "sites": f"{progress(len(inside), sites)} in the last round: {', '.join(inside)}",
  }
  if away := sorted(sent.keys() - inside, key=int):
    news["away"] = ", ".join(f"{k} since step {sent[k]:,}" for k in away)
  if refused:
    news["refused"] = ", ".join(
      f"{len(steps)} of site {k}, the last of step {steps[0]:,}"
      for k, steps in sorted(refused.items())
    )
  ended = files.read_json(folder / "coordinator.json") is not None
  done = ended and last["round"] + 1 == total  # Else the run is extended.
  news |= last_line(folder / ROUNDS, now, _ROUND_S, done)
  details = {"last sync": by_fragment(syncs)} | checkpoint(folder)
  arrivals = files.read_json(folder / ARRIVALS) or {}
  for site, found in sorted(arrivals.items(), key=lambda item: int(item[0])):
    seen = f"{duration(now - found['time'])} ago, after {text(found['seconds'])}"
    details[f"site {site}"] = f"took part {seen}"
  return Status(heading(config), news, details)


def of_site(folder: pathlib.Path, found: metrics.Kinds, status: Status) -> None:
  """Adds what a site has besides other runs."""
  syncs = found["receive"]
  if syncs and "sites" in syncs[0]:
    status.news["sites"] = f"{syncs[0]['sites']:g} in the last round"
    lines = (x for x in backwards(folder / metrics.FILE) if b'"arrival"' in x)
    record = metrics.as_record(next(lines, b""))
    if seconds := checked({k.removesuffix("_s"): s for k, s in record.items()}):
      status.details["arrival"] = f"took part after {text(seconds)}"


MORE.append(of_site)
READERS[ROUNDS] = of_coordinator
READERS["journal"] = of_coordinator  # Before the first round closes.
