"""What the coordinator reports: a progress line, and a summary of the sites."""

import pathlib
import time

import tqdm

from diloco.contrib.sites.coordinator.board import Board
from diloco.contrib.sites.coordinator.journal import ARRIVALS, Entry, Journal
from diloco.processes.peers import print_line
from diloco.util import files
from diloco.util.bar import make_bar


class Report:
  """Shows the rounds that close, and writes coordinator.json at the end.

  arrivals.json has the last arrival of each site.
  """

  def __init__(self, board: Board, workdir: pathlib.Path, journal: Journal):
    self._board, self._calendar = board, board.calendar
    self._workdir, self._journal = workdir, journal
    self._bar: tqdm.tqdm | None = None
    self._arrivals = files.read_json(workdir / ARRIVALS) or {}

  def arrived(self, site: int, seconds: dict[str, float]) -> None:
    """Notes where the time of a site went until it took part."""
    self._arrivals[str(site)] = {"time": time.time(), "seconds": seconds}
    files.write_json(self._workdir / ARRIVALS, self._arrivals)

  def closed(self, entry: Entry) -> None:
    """Shows a round that closed."""
    if self._bar is None:
      place = {"total": len(self._calendar.rounds), "initial": entry.round}
      self._bar = make_bar(**place, unit="round", desc="rounds")
    late = sum(m.late for m in self._board.rounds.members.values())
    self._bar.set_postfix_str(
      f"step {entry.step}, {self._board.inside()} of {self._calendar.sites} sites,"
      f" {len(entry.tokens)} sent, {late} late in all",
      refresh=False,
    )
    self._bar.update()

  def finish(self) -> None:
    """Writes and prints the summary."""
    self.close()
    lines, sites = self._journal.lines(), self._calendar.sites
    full = sum(len(line["tokens"]) == sites for line in lines)
    longest_s = max(line["waited_s"] for line in lines)
    late = {k: sum(k in line["late"] for line in lines) for k in range(sites)}
    refused = {
      k: sum(k in line.get("refused", ()) for line in lines) for k in range(sites)
    }
    summary = {
      "rounds": len(self._calendar.rounds),
      "rounds_with_all_sites": full,
      "rounds_with_fewer_sites": len(lines) - full,
      "longest_wait_s": longest_s,
      "sites": {k: {"late": late[k], "refused": refused[k]} for k in range(sites)},
    }
    files.write_json(self._workdir / "coordinator.json", summary)
    print_line(
      f"All {summary['rounds']} rounds are closed: {full} with all sites,"
      f" {len(lines) - full} with fewer; at most {longest_s:.1f} s of waiting;"
      f" {sum(refused.values())} payloads with bad numbers refused.\n"
      f"summary      {self._workdir / 'coordinator.json'}"
    )

  def close(self) -> None:
    if self._bar:
      self._bar.close()
      self._bar = None
