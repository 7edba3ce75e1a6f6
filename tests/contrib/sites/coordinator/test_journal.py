"""Closed rounds on disk, also after a kill in every moment and after damage."""

import json

import pytest
import wreck

from diloco.contrib.sites.coordinator import journal as journal_lib
from diloco.contrib.sites.coordinator.journal import Entry, Journal
from diloco.contrib.sites.coordinator.rounds import Measured
from diloco.contrib.sites.link import Block
from diloco.errors import ConfigError
from diloco.util import files


def entry(number: int) -> Entry:
  payloads = {0: bytes([number, 10, 255]) * 50, 2: b"\n" * 7}
  data = {"0": [number, {"position": 3}]}
  measured = {0: Measured(0.5, 0.2), 2: Measured(1.0, -0.0), 3: Measured(None)}
  head = (number, number % 2, 3 + number, {0: 5, 2: 6}, payloads, (1,), data, 0.5)
  lent = {1: Block(0, {"1": [2, {"position": 4}]}, 5, 6, [3, 1])}
  return Entry(*head, measured, {0: 5, 2: 3}, lent, [[1, 1]])


def lines(folder) -> list[dict]:
  return [json.loads(x) for x in (folder / "rounds.jsonl").read_text().splitlines()]


def test_rounds_survive_the_process(tmp_path):
  journal = Journal(tmp_path)
  for number in range(3):
    journal.write(entry(number))
  journal = Journal(tmp_path)
  assert journal.rounds == [0, 1, 2]
  assert [journal.read(number) for number in range(3)] == [entry(n) for n in range(3)]
  assert [x["round"] for x in lines(tmp_path)] == [0, 1, 2]
  assert lines(tmp_path)[1]["tokens"] == {"0": 5, "2": 6}
  assert lines(tmp_path)[1]["payloads"] == {"0": 150, "2": 7}
  assert lines(tmp_path)[1]["refused"] == [3]


class Killed(BaseException):
  pass


@pytest.mark.parametrize(
  "moment", ["in the file", "before the name", "before the line"]
)
def test_a_kill_leaves_a_whole_round_or_none(tmp_path, monkeypatch, moment):
  journal = Journal(tmp_path)
  journal.write(entry(0))

  def killed(*_):
    raise Killed

  with monkeypatch.context() as m:
    if moment == "in the file":
      m.setattr(journal_lib.zlib, "crc32", killed)
    elif moment == "before the name":
      m.setattr(files.pathlib.Path, "rename", killed)
    else:
      m.setattr(Journal, "_write_line", killed)
    with pytest.raises(Killed):
      journal.write(entry(1))
  journal = Journal(tmp_path)
  assert journal.rounds == ([0, 1] if moment == "before the line" else [0])
  assert [x["round"] for x in lines(tmp_path)] == journal.rounds
  if len(journal.rounds) == 1:
    journal.write(entry(1))
  assert [journal.read(number) for number in (0, 1)] == [entry(0), entry(1)]
  assert [x["round"] for x in lines(tmp_path)] == [0, 1]
  assert {p.name for p in (tmp_path / "journal").iterdir()} == {
    "000000000.round",
    "000000001.round",
  }


def test_a_cut_line_is_written_again(tmp_path):
  journal = Journal(tmp_path)
  for number in range(3):
    journal.write(entry(number))
  text = (tmp_path / "rounds.jsonl").read_text()
  for end in range(len(text)):
    (tmp_path / "rounds.jsonl").write_text(text[:end])
    Journal(tmp_path)
    assert (tmp_path / "rounds.jsonl").read_text() == text
  (tmp_path / "rounds.jsonl").unlink()
  Journal(tmp_path)
  assert (tmp_path / "rounds.jsonl").read_text() == text


def test_every_damage_of_a_round_is_one_sentence(tmp_path):
  folder = tmp_path / "journal"
  for name, harm in wreck.all_of(make(tmp_path), flips=40):
    journal = make(tmp_path) and Journal(tmp_path)
    harm(folder)
    print(name)
    with pytest.raises(ConfigError, match=r"000000000.round .* copy\.$"):
      journal.read(0)
    (folder / "000000000.round").unlink(missing_ok=True)


def make(workdir):
  """Writes a journal of one round; returns its folder."""
  Journal(workdir).write(entry(0))
  return workdir / "journal"


def test_forgotten_rounds_keep_their_lines(tmp_path):
  journal = Journal(tmp_path)
  for number in range(4):
    journal.write(entry(number))
  journal.forget(before=2)
  assert journal.rounds == [2, 3]
  with pytest.raises(ConfigError, match="cannot be read"):
    journal.read(1)
  assert Journal(tmp_path).rounds == [2, 3]
  assert [x["round"] for x in lines(tmp_path)] == [0, 1, 2, 3]
