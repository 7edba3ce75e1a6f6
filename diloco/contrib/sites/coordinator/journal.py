"""Closed rounds on disk: one file per round, with its payloads. No JAX.

A round is on disk before it is announced to any site. So a coordinator that was
killed applies exactly the rounds that the sites may have applied. `rounds.jsonl` has
one line per closed round, without payloads, so that people can check a run.
`applied.jsonl` has the digest of the outer state after each round, for `replay`.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import secrets
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from diloco.contrib.sites.coordinator.rounds import Measured
from diloco.contrib.sites.link import Block
from diloco.errors import ConfigError
from diloco.util import files

FOLDER, APPLIED, ARRIVALS = "journal", "applied.jsonl", "arrivals.json"


class Entry(NamedTuple):
  """A closed round.

  Attributes:
    round: its number.
    fragment: the fragment p.
    step: the inner step t after which the fragment was sent.
    tokens: {site: tokens behind each of its replicas' payloads}, ascending sites; its
      keys are the members.
    payloads: {site: bytes of uint8 [replicas of the site, 1, bytes]}.
    late: the sites that were expected and did not send.
    data: {shard: [step, position in its text]} that the members sent along.
    waited_s: seconds between the quorum and the closing.
    measured: the numbers of all payloads that came in time, refused ones too.
    per_step: {site: tokens of one of its replicas' inner steps}; {}: all are equal.
    lent: {site that is away: a block of its text}.
    finished: the blocks that the members have finished, as [round, site].
  """

  round: int
  fragment: int
  step: int
  tokens: dict[int, int]
  payloads: dict[int, bytes]
  late: tuple[int, ...]
  data: dict[str, Any]
  waited_s: float
  measured: dict[int, Measured] = {}  # noqa: RUF012 Nobody changes it.
  per_step: dict[int, int] = {}  # noqa: RUF012
  lent: dict[int, Block] = {}  # noqa: RUF012
  finished: Sequence[Sequence[int]] = ()

  @property
  def refused(self) -> tuple[int, ...]:
    """The sites whose payloads came in time, but had bad numbers."""
    return tuple(sorted(self.measured.keys() - self.tokens.keys()))


class Journal:
  """The closed rounds in a workdir.

  Attributes:
    rounds: the rounds whose payloads are kept, ascending.
  """

  def __init__(self, workdir: pathlib.Path):
    """Opens the journal, and repairs its lines after a kill.

    Raises:
      ConfigError: a round without a line cannot be read.
    """
    self._workdir = workdir
    self._folder, self._lines = workdir / FOLDER, workdir / "rounds.jsonl"
    self._applied = workdir / APPLIED
    self._folder.mkdir(parents=True, exist_ok=True)
    for unfinished in self._folder.glob(".*.tmp"):
      unfinished.unlink()
    self.rounds = kept(workdir)
    # A kill leaves rounds without a line, or half a line.
    files.cut_half_line(self._lines)
    files.cut_half_line(self._applied)
    known = {line["round"] for line in self.lines()}
    for number in [r for r in self.rounds if r not in known]:
      self._write_line(self.read(number))

  @property
  def closed(self) -> int:
    """Counts the closed rounds of the run."""
    return len({line["round"] for line in self.lines()})

  @functools.cached_property
  def run(self) -> str:
    """A random name of the run, which survives restarts."""
    path = self._folder / "run"
    if not path.exists():
      with files.replacing(path) as file:
        file.write(secrets.token_hex(8).encode())
    return path.read_text()

  def write(self, entry: Entry) -> None:
    """Puts a round on the disk; returns when the disk has it."""
    parts = [json.dumps(header_of(entry)).encode() + b"\n", *entry.payloads.values()]
    crc32 = 0
    with files.replacing(_path(self._workdir, entry.round)) as file:
      for part in parts:
        crc32 = zlib.crc32(part, crc32)
        file.write(part)
      file.write(crc32.to_bytes(4))
    folder = os.open(self._folder, os.O_RDONLY)
    try:
      os.fsync(folder)  # The disk has the new name, too.
    finally:
      os.close(folder)
    self.rounds.append(entry.round)
    self._write_line(entry)

  def read(self, number: int) -> Entry:
    """Reads a round; see `read`."""
    return read(self._workdir, number)

  def applied(self, number: int, digest: int) -> None:
    """Notes the digest of a fragment's outer state after a round."""
    with self._applied.open("ab") as file:
      file.write(json.dumps({"round": number, "digest": digest}).encode() + b"\n")

  def forget(self, before: int) -> None:
    """Deletes the payloads of the rounds below `before`; their lines stay."""
    for number in [r for r in self.rounds if r < before]:
      self.rounds.remove(number)
      _path(self._workdir, number).unlink(missing_ok=True)

  def lines(self) -> list[dict[str, Any]]:
    """Reads rounds.jsonl: all closed rounds of the run, without data and payloads."""
    return _records(self._lines)

  def _write_line(self, entry: Entry) -> None:
    with self._lines.open("ab") as file:
      file.write(line_of(entry))


def kept(workdir: pathlib.Path) -> list[int]:
  """Lists the rounds whose payloads are on the disk, ascending."""
  return sorted(int(path.stem) for path in (workdir / FOLDER).glob("*.round"))


def read(workdir: pathlib.Path, number: int) -> Entry:
  """Reads a round.

  Raises:
    ConfigError: the file is damaged or gone.
  """
  path = _path(workdir, number)
  try:
    content = path.read_bytes()
    if zlib.crc32(content[:-4]).to_bytes(4) != content[-4:]:
      raise ConfigError(
        f"{path} is damaged (its checksum is wrong); restore it from a copy."
      )
  except OSError as error:
    raise ConfigError(
      f"{path} cannot be read ({error.strerror}); restore it from a copy."
    ) from error
  end = content.index(b"\n")
  return entry_of(json.loads(content[:end]), memoryview(content)[end + 1 : -4])


def entry_of(header: dict[str, Any], body: bytes | memoryview) -> Entry:
  """Makes a round of its header and its payloads, one after the other."""
  file, sizes = io.BytesIO(body), header["payloads"].items()
  payloads = {int(site): file.read(size) for site, size in sizes}
  tokens, per_step = (
    {int(site): n for site, n in header.get(name, {}).items()}
    for name in ("tokens", "per_step")
  )
  measured = {int(k): Measured(*x) for k, x in header.get("measured", {}).items()}
  found: dict[str, Any] = {"payloads": payloads, "tokens": tokens}
  found["late"] = tuple(header["late"])
  lent = {int(k): Block(*x) for k, x in header.get("lent", {}).items()}
  found |= {"measured": measured, "per_step": per_step, "lent": lent}
  return Entry(**header | found)


def digests(workdir: pathlib.Path) -> dict[int, int]:
  """Reads {round: digest of its fragment's outer state after it}."""
  return {record["round"]: record["digest"] for record in _records(workdir / APPLIED)}


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
  """Reads a file of JSON lines, whose last line may be cut short; [] without it."""
  found = list[dict[str, Any]]()
  with contextlib.suppress(FileNotFoundError):
    for line in path.read_bytes().splitlines():
      with contextlib.suppress(ValueError):
        found.append(json.loads(line))
  return found


def _path(workdir: pathlib.Path, number: int) -> pathlib.Path:
  return workdir / FOLDER / f"{number:09d}.round"


def line_of(entry: Entry) -> bytes:
  """Returns the line of a round in rounds.jsonl."""
  line = header_of(entry) | {"refused": entry.refused}
  del line["data"]
  return json.dumps(line).encode() + b"\n"


def header_of(entry: Entry) -> dict[str, Any]:
  """Returns a round without its payloads."""
  sizes = {site: len(data) for site, data in entry.payloads.items()}
  return entry._asdict() | {"payloads": sizes}
