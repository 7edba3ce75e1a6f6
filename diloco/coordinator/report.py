"""What the coordinator tells: a progress line, and a summary of who was in."""

import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import tqdm

from diloco.config import files
from diloco.coordinator.board import Board
from diloco.coordinator.calendar import Calendar
from diloco.coordinator.journal import Entry
from diloco.coordinator.server import Server


class Report:
  """Counts rounds, and writes coordinator.json at the end."""

  def __init__(
    self, calendar: Calendar, workdir: pathlib.Path, say: Callable[[str], None]
  ):
    self._calendar, self._workdir, self._say = calendar, workdir, say
    self._began = time.perf_counter()
    self._full = self._fewer = 0
    self._longest_s = 0.0
    self._bar: tqdm.tqdm | None = None

  def watch(self, board: Board, server: Server) -> None:
    """Names whose numbers are told."""
    self._board, self._server = board, server

  def closed(self, entry: Entry) -> None:
    """Counts a round that closed."""
    if len(entry.tokens) == self._calendar.sites:
      self._full += 1
    else:
      self._fewer += 1
    self._longest_s = max(self._longest_s, entry.waited_s)
    if self._bar is None:
      self._bar = tqdm.tqdm(
        total=len(self._calendar.rounds),
        initial=entry.round,
        unit="round",
        desc="rounds",
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 15,
      )
    late = sum(m.late for m in self._board.rounds.members.values())
    self._bar.set_postfix_str(
      f"step {entry.step}, {self._board.inside()} of {self._calendar.sites} sites,"
      f" {len(entry.tokens)} sent, {late} late in all",
      refresh=False,
    )
    self._bar.update()

  def finish(self) -> None:
    """Writes and tells the summary."""
    self.close()
    members = self._board.rounds.members
    summary: dict[str, Any] = {
      "rounds": len(self._calendar.rounds),
      "rounds_with_all_sites": self._full,
      "rounds_with_fewer_sites": self._fewer,
      "longest_wait_s": self._longest_s,
      "wall_s": time.perf_counter() - self._began,
      "bytes_received": self._server.received,
      "bytes_sent": self._server.sent,
      "sites": {
        k: {"joins": m.joins, "leaves": m.leaves, "late": m.late}
        for k, m in members.items()
      },
    }
    files.write_json(self._workdir / "coordinator.json", summary)
    self._say(
      f"All {summary['rounds']} rounds are closed: {self._full} with all sites,"
      f" {self._fewer} with fewer; at most {self._longest_s:.1f} s of waiting.\n"
      f"summary      {self._workdir / 'coordinator.json'}"
    )

  def close(self) -> None:
    if self._bar:
      self._bar.close()
      self._bar = None
