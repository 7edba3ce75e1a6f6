"""The closed rounds of a group in a store: one file per round, written once. No JAX.

The files are those of the coordinator's journal. A holder of the lease that finds a
round there adopts it, and never writes it again.
"""

import contextlib
import json
import re
from typing import Any

from diloco.contrib.sites.coordinator.journal import Entry, entry_of, header_of, line_of
from diloco.contrib.sites.folder.store import Store, pack

LINES = "rounds.jsonl"
_RECENT = 2  # Rounds in memory.


class Adopted(Exception):
  """Another holder of the lease has written this round before."""


class StoreJournal:
  """The closed rounds, as one site sees them; a `Board` takes it for a `Journal`.

  Attributes:
    run: of a `Journal`; nobody asks, because sites of a store compare configs.
    first: rounds below this number may be deleted.
    closed: rounds below this number are closed.
    data: {shard: [step, position in its text]} of these rounds.
  """

  run = ""

  def __init__(self, store: Store):
    self._store, self.first, self.closed = store, 0, 0
    self.data = dict[str, Any]()
    self._lines = dict[int, bytes]()  # Those that rounds.jsonl may not have yet.
    self._recent = dict[int, Entry]()

  @property
  def rounds(self) -> range:
    """The rounds that are kept."""
    return range(self.first, self.closed)

  def begin(self, closed: int, data: dict[str, Any]) -> None:
    """Begins with a snapshot of the rounds below `closed`, unless it has more."""
    if closed > self.closed:
      self.closed, self.data = closed, data

  def advance(self) -> None:
    """Finds the rounds that have closed since."""
    while entry := self.find(self.closed):
      self._note(entry)

  def find(self, number: int) -> Entry | None:
    """Returns a round; None if it is not there in whole."""
    if number in self._recent:
      return self._recent[number]
    found = self._store.read(_path(number))
    return entry_of(*found) if found else None

  def read(self, number: int) -> Entry:
    """Returns a round that `advance` has found.

    Raises:
      OSError: it is not there at the moment.
    """
    entry = self.find(number)
    if entry is None:
      raise OSError(f"{_path(number)} is missing or damaged")
    return entry

  def write(self, entry: Entry) -> None:
    """Closes a round.

    Raises:
      Adopted: the round is closed already, perhaps with other payloads.
    """
    data = pack(header_of(entry), *entry.payloads.values())
    if not self._store.create(_path(entry.round), data):
      raise Adopted
    self._note(entry)

  def lines(self) -> list[dict[str, Any]]:
    """Returns all closed rounds of the run, without data and payloads."""
    return [json.loads(line) for line in self._all_lines()]

  def write_lines(self) -> None:
    """Writes rounds.jsonl, so that people can check a run."""
    self._store.put(LINES, b"".join(self._all_lines()))

  def _all_lines(self) -> list[bytes]:
    found = dict[int, bytes]()
    for text in (self._store.get(LINES) or b"").splitlines(keepends=True):
      with contextlib.suppress(AttributeError, LookupError, ValueError):
        line = json.loads(text)
        if line.keys() >= {"fragment", "tokens"}:
          found[line["round"]] = text
    return [line for _, line in sorted((found | self._lines).items())]

  def forget(self, snapshot: int) -> None:
    """Drops the lines that rounds.jsonl has, because there is a snapshot of them."""
    for number in [r for r in list(self._lines) if r < snapshot]:  # A thread adds.
      del self._lines[number]

  def _note(self, entry: Entry) -> None:
    self._lines[entry.round] = line_of(entry)
    self._recent[entry.round] = entry
    self._recent.pop(entry.round - _RECENT, None)
    self.data |= entry.data
    self.closed = max(self.closed, entry.round + 1)


def number_of(name: str) -> int | None:
  """Returns the round in the name of a file; None for other files."""
  found = re.match(r"(\d{9})\.", name)
  return int(found[1]) if found else None


def _path(number: int) -> str:
  return f"journal/{number:09d}.round"
