"""Closed rounds on disk: one file per round, with its payloads. No JAX.

A round is on disk before any site hears that it is closed. So a coordinator that was
killed applies exactly the rounds that the sites may have applied. `rounds.jsonl` has
one line per closed round, without payloads, for people and audits.
"""

import contextlib
import json
import os
import pathlib
import zlib
from typing import Any, NamedTuple

from diloco.config import files


class Entry(NamedTuple):
  """A closed round.

  Attributes:
    round: its number.
    fragment: the fragment p.
    step: the inner step t after which the fragment was sent.
    tokens: {site: tokens behind each of its replicas' payloads}, ascending sites; its
      keys are the members.
    payloads: {site: bytes of uint8 [replicas of the site, fsdp, bytes]}.
    late: the sites that were expected and did not send.
    data: {replica: position in its text} that the members sent along.
    waited_s: seconds between the quorum and the closing.
  """

  round: int
  fragment: int
  step: int
  tokens: dict[int, int]
  payloads: dict[int, bytes]
  late: tuple[int, ...]
  data: dict[str, Any]
  waited_s: float


class Journal:
  """The closed rounds in a workdir."""

  def __init__(self, workdir: pathlib.Path):
    self._folder, self._lines = workdir / "journal", workdir / "rounds.jsonl"
    self._folder.mkdir(parents=True, exist_ok=True)
    for unfinished in self._folder.glob(".*.tmp"):
      unfinished.unlink()
    self.rounds = sorted(int(p.stem) for p in self._folder.glob("*.round"))
    for number in self.rounds[-1:]:
      # The coordinator may have been killed between the file and its line.
      if self._last_line() < number:
        self._write_line(self.read(number))

  def write(self, entry: Entry) -> None:
    """Puts a round on the disk; returns when the disk has it."""
    header = entry._asdict() | {
      "payloads": {site: len(data) for site, data in entry.payloads.items()},
      "crc32": [zlib.crc32(data) for data in entry.payloads.values()],
    }
    with files.replacing(self._path(entry.round)) as file:
      file.write(json.dumps(header).encode() + b"\n")
      for data in entry.payloads.values():
        file.write(data)
    with contextlib.closing(_Folder(self._folder)) as folder:
      os.fsync(folder.fd)
    self.rounds.append(entry.round)
    self._write_line(entry)

  def read(self, number: int) -> Entry:
    """Reads a round.

    Raises:
      ValueError: the file is damaged.
      OSError: the file is gone.
    """
    path = self._path(number)
    with path.open("rb") as file:
      try:
        header = json.loads(file.readline())
        payloads = {
          int(site): file.read(size) for site, size in header["payloads"].items()
        }
        sums = header.pop("crc32")
      except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if sums != [zlib.crc32(data) for data in payloads.values()]:
      raise ValueError(f"{path} is damaged: the payloads have other checksums")
    tokens = {int(site): n for site, n in header.pop("tokens").items()}
    late = tuple(header.pop("late"))
    return Entry(**header | {"tokens": tokens, "late": late, "payloads": payloads})

  def forget(self, before: int) -> None:
    """Deletes the payloads of the rounds below `before`; their lines stay."""
    for number in [r for r in self.rounds if r < before]:
      self._path(number).unlink(missing_ok=True)
      self.rounds.remove(number)

  def _path(self, number: int) -> pathlib.Path:
    return self._folder / f"{number:09d}.round"

  def _last_line(self) -> int:
    last = -1
    with contextlib.suppress(OSError):
      for line in self._lines.read_text().splitlines():
        with contextlib.suppress(ValueError):  # A line that was cut by a kill.
          last = max(last, json.loads(line)["round"])
    return last

  def _write_line(self, entry: Entry) -> None:
    line = entry._asdict() | {
      "payloads": {site: len(data) for site, data in entry.payloads.items()}
    }
    line.pop("data")
    with self._lines.open("a+b") as file:
      if file.tell() and not _ends_line(file):
        file.write(b"\n")
      file.write(json.dumps(line).encode() + b"\n")


class _Folder:
  """An open folder, so that its new names can be put on the disk."""

  def __init__(self, path: pathlib.Path):
    self.fd = os.open(path, os.O_RDONLY)

  def close(self) -> None:
    os.close(self.fd)


def _ends_line(file) -> bool:
  file.seek(-1, os.SEEK_END)
  return file.read(1) == b"\n"
