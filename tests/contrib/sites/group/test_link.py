"""Sites that share a folder: rounds, late sites, holders that are killed or wake up."""

import asyncio
import functools
import itertools
import threading
from concurrent import futures

import pytest
from running import wait
from sites import (
  BEATS,
  Brisk,
  Late,
  Player,
  fields_of,
  in_time,
  make_calendar,
  payload,
  play,
)

from diloco.contrib.sites.group import journal, lease
from diloco.contrib.sites.group import link as link_lib
from diloco.contrib.sites.group.holder import Holder
from diloco.contrib.sites.group.journal import Journal
from diloco.contrib.sites.group.records import pack, payload_of, record_of
from diloco.errors import ConfigError
from diloco.wire.transport import ExchangeFailed

ALL = make_calendar(least_grace_s=20.0)
SHORT = make_calendar(grace_s=0.1)  # Rounds wait for that long, because of a kill.


@pytest.fixture(autouse=True)
def often(monkeypatch):
  monkeypatch.setattr(lease, "_BEATS", BEATS)


@pytest.fixture
def start(tmp_path):
  """A function that starts players, who all end with the test."""
  started = []

  def begin(calendar=ALL, sites=(0, 1, 2), storage=Brisk, state=None):
    players = [
      Player(calendar, storage(tmp_path / "group"), site, state) for site in sites
    ]
    started.extend(players)
    players[0].join()  # Alone, so that it gets the lease.
    with futures.ThreadPoolExecutor() as pool:
      [*pool.map(Player.join, players[1:])]
    return players

  (tmp_path / "group").mkdir()
  yield begin
  for player in started:
    if player.link._thread.is_alive():
      player.leave()


def states(players) -> set:
  return {tuple(player.numbers) for player in players}


def all_have_counted(players, rounds: int) -> bool:
  """Returns whether every player has received all payloads of so many rounds."""
  members = dict.fromkeys(range(rounds), (0, 1, 2))
  return len(states(players)) == 1 and all(p.members == members for p in players)


def holder_first(players) -> list[Player]:
  """Returns the players, when all know who closes rounds; this one is the first."""

  def agree():
    names = {p.link._lease.seen.get("name") for p in players}
    return [p for p in players if p.holds and names == {p.link._name}]

  wait(agree)
  return sorted(players, key=lambda player: not player.holds)


def test_listings_and_files_that_come_late_and_in_parts_change_no_bit(start):
  seeds = itertools.count()
  players = start(storage=lambda root: Late(root, seed=next(seeds)))
  play(players, range(8))
  assert all_have_counted(players, 8)
  assert all(player.link._storage.halves for player in players)


def test_a_holder_that_is_killed_is_followed_by_another_site(start):
  players = start(make_calendar(grace_s=0.1, lost_s=1.5))
  [first, *rest] = holder_first(players)
  play(players, range(3))
  first.link.kill()
  play(rest, range(3, 6))
  assert holder_first(rest)[0].holds
  assert len(states(rest)) == 1
  [back] = start(first.calendar, (first.site,))
  assert (back.welcome.round, back.welcome.snapshot) == (0, b"")
  back.receive(6)
  play([*rest, back], range(6, 12))
  assert len(states([*rest, back])) == 1
  assert (0, 1, 2) in [back.members[r] for r in range(6, 12)]


class Frozen(Brisk):
  """Stops its process in the middle of a call."""

  def __init__(self, root):
    super().__init__(root)
    self.goes_on, self.waits = threading.Event(), threading.Event()
    self.goes_on.set()
    self.stops_at = None
    for name in ("get", "put", "create", "delete"):
      setattr(self, name, functools.partial(self._call, getattr(self, name)))

  def _call(self, method, path, *data):
    if self.stops_at and path.startswith(self.stops_at) and len(data):
      self.stops_at = None
      self.goes_on.clear()
      self.waits.set()
    self.goes_on.wait(60)
    return method(path, *data)


@pytest.mark.parametrize("moment", ["journal/", "snapshots/"])
def test_a_former_holder_that_wakes_up_writes_no_round_differently(
  start, moment, tmp_path
):
  players = start(make_calendar(grace_s=0.1, lost_s=3.0), storage=Frozen)
  [first, *rest] = holder_first(players)
  play(players, range(2))
  frozen = first.link._storage
  frozen.stops_at = moment
  for player in players:
    player.send(2)
  if moment == "snapshots/":
    first.offer()
  assert frozen.waits.wait(60)
  play(rest, range(2, 5))
  files = {p: p.read_bytes() for p in (tmp_path / "group/journal").glob("*.round")}
  assert len(files) == 5
  frozen.goes_on.set()
  first.receive(5)
  assert first.members[3] == tuple(p.site for p in rest)
  wait(lambda: not first.holds)
  first.link.ready(5)
  play(players, range(5, 7))
  assert len(states(players)) == 1
  assert all(path.read_bytes() == data for path, data in files.items())


def test_old_rounds_are_deleted_and_a_newcomer_begins_with_a_snapshot(start, tmp_path):
  players = start(SHORT)
  path, away = tmp_path / "group", players[2]
  numbers = lambda folder, kind="*": sorted(
    {int(x.name[:9]) for x in (path / folder).glob(kind)}
  )
  play(players, range(3))
  away.leave()
  stay = players[:2]
  (path / "payloads" / "000000001.site-2").write_bytes(b"of a site that was killed")
  (path / "journal" / "000000001.round.cafe.tmp").write_bytes(b"also")
  for applied in (4, 6, 8):
    play(stay, range(min(p.applied for p in stay), applied))
    for player in stay:  # One of them has the lease.
      player.offer()
    wait(lambda applied=applied: numbers("snapshots")[-1] == applied)
  wait(lambda: numbers("snapshots", "*.state") == [6, 8])
  assert numbers("journal") == [6, 7]
  assert numbers("payloads") == []
  # The rounds that it lacks are gone; but its text goes on where it was.
  [back] = start(away.calendar, (2,))
  assert back.welcome.round == 8
  assert back.welcome.data == back.link._journal.data
  assert back.welcome.data["2"] == fields_of(SHORT, 2, 2)["data"]["2"]
  assert back.welcome.data["0"] == fields_of(SHORT, 0, 7)["data"]["0"]
  assert back.numbers == stay[0].numbers
  play([*stay, back], range(8, 10))
  assert len(states([*stay, back])) == 1
  for player in (*stay, back):
    player.leave("finished")
  assert numbers("journal") == [6, 7, 8, 9]
  assert numbers("snapshots", "*.state") == [6, 8]
  assert sorted(journal.history(back.link._storage)) == list(range(8))


def test_a_site_that_comes_back_with_its_own_state_needs_no_snapshot(start):
  players = start(SHORT)
  play(players, range(3))
  away, stay = players[2], players[:2]
  away.leave()
  play(stay, range(3, 5))
  own = {"applied": 3, "numbers": away.numbers}
  [back] = start(SHORT, (2,), state=own)
  assert (back.welcome.round, back.welcome.snapshot) == (3, b"")
  back.receive(5)
  assert back.numbers == stay[0].numbers
  # Other numbers after as many rounds are not the group's, nor are those after rounds
  # that are lost, because the folder was restored.
  for applied in (3, 9):
    back.leave()
    own = {"applied": applied, "numbers": [x + 1 for x in away.numbers]}
    [back] = start(SHORT, (2,), state=own)
    assert back.welcome.snapshot
    back.receive(5)
    assert back.numbers == stay[0].numbers
  play([*stay, back], range(5, 7))
  assert len(states([*stay, back])) == 1


def test_a_site_that_was_away_for_long_gets_a_snapshot_in_mid_run(start):
  players = start(SHORT, storage=Frozen)
  [away, *stay] = holder_first(players)[::-1]
  first = stay[-1]
  play(players, range(2))
  away.link._storage.goes_on.clear()
  for applied in (4, 6):
    play(stay, range(stay[0].applied, applied))
    first.offer()
    wait(lambda applied=applied: first.link._lease.seen["snapshot"] == applied)
  wait(lambda: first.link._journal.first == 4)
  play(stay, range(6, 7))
  away.link._storage.goes_on.set()
  away.receive(7)
  assert set(away.members) == {0, 1, 6}
  assert away.numbers == first.numbers


def test_a_payload_with_bad_numbers_counts_nowhere(start):
  players = start()
  for player in players:
    player.bad = {(1, 1), (0, 3), (1, 3), (2, 3)}
  play(players, range(5))
  for player in players:
    assert [player.members[r] for r in (0, 1, 3)] == [(0, 1, 2), (0, 2), ()]
    assert [player.refused[r] for r in (0, 1, 3)] == [(), (1,), (0, 1, 2)]
  assert len(states(players)) == 1


def test_garbage_in_the_folder_changes_nothing(start, tmp_path, monkeypatch):
  path = tmp_path / "group"
  record = {"session": "x", "beat": 1, "sent": [], "digests": {}, "reason": ""}
  for name, data in {
    "lease": pack({"name": "x", "term": 9, "beat": 1, "left": True, "snapshot": "no"}),
    "sites/0": pack(record | {"ready": 10**9}),
    "sites/1": pack({"session": 5, "sent": "all"}),
    "sites/2": pack(record | {"ready": 0, "beat": "many"}),
    "sites/7": b"",
    "journal/notes.txt": b"mine",
    "journal/000000009.round": pack({"round": 9}, b"of another version"),
    "snapshots/x": b"",
    "payloads/000000000.site-0": pack(fields_of(ALL, 0, 0), b"short"),
    "payloads/000000001.site-2": b"{}",
  }.items():
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(data)
  players = start()
  play(players, range(5))
  assert all_have_counted(players, 5)
  # A damaged round is named until it is repaired.
  monkeypatch.setattr(link_lib, "_QUIET_S", 0)
  play(players, range(5, 9))
  for player in players:
    player.send(9)
  said = "PATH: journal/000000009.round is missing or damaged"
  wait(lambda: any(said in str(player.said) for player in players))
  (path / "journal/000000009.round").unlink()
  play(players, range(9, 11))
  assert all_have_counted(players, 11)


@pytest.mark.parametrize("fields", [{"tokens": 2**62}, {"data": {"1": [0, "here"]}}])
def test_a_payload_that_cannot_be_one_counts_nowhere(start, fields):
  [first, second] = start(make_calendar(2, grace_s=0.1), (0, 1))
  second.send(0, **fields)
  first.send(0)
  first.receive(1)
  assert first.members == {0: (0,)}
  said = [x for x in first.said + second.said if "site 1: its payload" in x]
  assert len(said) == 1
  assert first.link.absent() == [1]
  second.receive(1)
  second.send(1)
  wait(lambda: (1, 1) in first.link._holder._payloads)
  first.send(1)
  first.receive(2)
  assert first.members[1] == (0, 1)
  assert first.link.absent() == []


def test_a_payload_that_only_the_farewell_of_its_site_names_counts(tmp_path):
  storage, calendar = Brisk(tmp_path), make_calendar(2)
  holder = Holder(storage, calendar, Journal(storage), True, print)
  rounds, _ = holder._start()
  record = {"session": "x", "ready": 0, "digests": {}}
  data = pack(fields_of(calendar, 1, 0), payload(calendar, 1, 0))
  storage.put(payload_of(0, 1), data)
  for beat, (sent, reason) in enumerate([([], ""), ([], ""), ([0], "stopped")]):
    more = {"beat": beat, "sent": sent, "reason": reason}
    storage.put(record_of(1), pack(record | more))
    asyncio.run(holder._look(rounds, 1))
  assert rounds.has(1, 0)
  assert holder._seen[1].session == ""


def test_a_second_process_of_a_site_ends(start):
  [first, second] = start(make_calendar(2), (0, 1))

  def intrude():
    [intruder] = start(make_calendar(2), (1,))
    in_time(lambda: intruder.link.wait_until(5, lambda: False))

  with pytest.raises(ConfigError, match="--site is 1, but another process at PATH is"):
    intrude()
  play([first, second], range(3))
  assert second.members == first.members == dict.fromkeys(range(3), (0, 1))


def test_a_site_with_another_outer_state_ends_and_comes_back(start):
  players = start(SHORT)
  [other, *stay] = holder_first(players)[::-1]
  play(players, range(2))
  other.numbers = [x + 1 for x in other.numbers]  # For instance a bad memory chip.
  play(players, range(2, 2 + ALL.fragments))
  for player in players:
    player.send(6)
  other.receive(7)  # It is further than the snapshot.
  for player in stay:  # One of them has the lease.
    player.offer()
  said = "after 6 rounds is not that of the group at PATH; start the site again"
  with pytest.raises(ExchangeFailed, match=said):
    in_time(lambda: other.link.wait_until(99, lambda: False))
  own = {"applied": other.applied, "numbers": other.numbers}
  [back] = start(SHORT, (other.site,), state=own)
  assert back.welcome.snapshot
  play([*stay, back], range(back.applied, 8))
  assert len(states([*stay, back])) == 1


@pytest.fixture
def trained(start, tmp_path):
  """The folder of a group that has ended, with snapshots after 4 and 8 rounds."""
  players = start()
  newest = lambda: {p.link._lease.seen.get("snapshot") for p in players}
  for rounds in (range(4), range(4, 8)):
    play(players, rounds)
    for player in players:
      player.offer()
    wait(functools.partial(lambda number: newest() == {number}, rounds.stop))
  for player in players:
    player.leave()
  return tmp_path / "group"


def test_a_trained_group_does_not_begin_anew_without_its_lease(start, trained):
  (trained / "lease").write_bytes(b"half")
  with pytest.raises(ConfigError, match="PATH, which has snapshots but no readable"):
    start(sites=(0,))


@pytest.mark.parametrize("name", [journal.head_of(8), journal.state_of(8)])
def test_a_damaged_snapshot_is_named_until_it_is_repaired(
  start, trained, monkeypatch, name
):
  monkeypatch.setattr(link_lib, "_QUIET_S", 0)
  whole = (trained / name).read_bytes()
  (trained / name).write_bytes(whole[:-1])
  new = Player(ALL, Brisk(trained), 0)
  with futures.ThreadPoolExecutor() as pool:
    joined = pool.submit(new.join)
    wait(lambda: f"PATH: {name} is missing or damaged" in str(new.said))
    (trained / name).write_bytes(whole)
    assert joined.result().welcome.round == 8
  new.leave()


def test_a_signal_ends_the_wait_for_a_group_that_has_no_state(tmp_path):
  player = Player(ALL, Late(tmp_path), 0)
  assert in_time(lambda: player.link.join(0, [], lambda: True)) is None
  player.leave()


def test_a_folder_without_the_rounds_of_a_site_is_refused(start):
  said = "PATH, which has no closed round, but this site"
  with pytest.raises(ConfigError, match=said):
    start(ALL, (0,), state={"applied": 3, "numbers": [1] * ALL.fragments})
