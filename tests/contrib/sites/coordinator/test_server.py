"""A real server and real connections: rounds, late sites, restarts, newcomers."""

import asyncio
import contextlib
import shutil
import socket
import threading
import time
import types
from concurrent import futures

import grpc
import pytest
import sites
from sites import (
  ARRIVAL,
  Coordinator,
  Player,
  in_time,
  make_calendar,
  payload,
  play,
  wait,
)

from diloco.contrib.sites.coordinator.board import Board
from diloco.contrib.sites.coordinator.journal import Journal
from diloco.contrib.sites.coordinator.rounds import Presence
from diloco.contrib.sites.coordinator.server import Server
from diloco.errors import ConfigError

ALL = make_calendar()


@pytest.fixture
def start(tmp_path):
  """A function that starts coordinators and players, which all end with the test."""
  started = []

  def begin(calendar=ALL, sites=(0, 1, 2), **options):
    coordinator = Coordinator(calendar, tmp_path, **options)
    players = [Player(coordinator, site) for site in sites]
    started.extend([*players, coordinator])
    for player in players:
      player.join()
    return coordinator, players

  begin.ends_with = started.append
  yield begin
  for x in started:
    if isinstance(x, Player) and x.link._thread:
      x.link._leaving = True
      x.leave()
  for x in started:
    if isinstance(x, Coordinator) and x._thread.is_alive():
      x.kill()


def test_all_rounds_reach_all_sites(start):
  coordinator, players = start()
  play(players, range(len(ALL.rounds)))
  for player in players:
    assert set(player.members.values()) == {(0, 1, 2)}
    assert player.state == coordinator.state
    player.leave("finished")
  assert coordinator.over.wait(20)
  assert coordinator.lines() == list(range(len(ALL.rounds)))


def test_the_coordinator_tells_how_long_a_site_took_to_arrive(start):
  coordinator, [player, _] = start(make_calendar(2), (0, 1))
  told = []
  coordinator.board.on_arrival.append(lambda *args: told.append(args))
  player.link.ready(0, {"start": "long"})  # Means nothing to this coordinator.
  player.link.ready(0, ARRIVAL)
  wait(lambda: told)
  assert told == [(0, ARRIVAL)]
  [line] = (x for x in coordinator.said if "takes part" in x)
  assert line.startswith("Site 0 takes part after 9.1 s: 5.0 s to start, ")


def test_a_payload_with_bad_numbers_counts_nowhere(start):
  coordinator, players = start()
  coordinator.bad = {(1, 1), (0, 3), (1, 3), (2, 3)}
  play(players, range(5))
  for player in players:
    assert player.members == {
      **dict.fromkeys((0, 2, 4), (0, 1, 2)),
      1: (0, 2),
      3: (),
    }
    assert player.refused == {**dict.fromkeys((0, 2, 4), ()), 1: (1,), 3: (0, 1, 2)}
    assert player.state == coordinator.state
  said = [line for line in coordinator.said if line.startswith("Refuses")]
  assert said[0] == (
    "Refuses the payload of site 1 in round 1: not all values are finite."
  )
  assert len(said) == 4
  assert coordinator.group.data["1"] == [4, {}]


def test_payloads_are_relayed_before_the_round_closes(start):
  _, (first, second, third) = start()
  first.send(3)  # The embedding: several chunks.
  size = ALL.payload_bytes(3)
  for other in (second, third):
    wait(lambda other=other: len(other.link._parts.get((3, 0), b"")) == size)
    assert bytes(other.link._parts[3, 0]) == payload(ALL, 0, 3)
  assert first.link._next == 0


def test_a_late_site_gets_the_rounds_and_loses_its_own_payload(start):
  coordinator, (first, second) = start(make_calendar(2, grace_s=0.3), (0, 1))
  first.send(0)
  first.receive(1)
  assert first.members == {0: (0,)}
  second.receive(1)
  second.send(0)  # Comes too late, and is not sent at all.
  assert not second.link._outgoing
  assert coordinator.call(lambda: coordinator.board.rounds.members[1].late) == 1
  # Nobody waits for it until it is ready again.
  window = coordinator.board.rounds._window
  coordinator.call(lambda: setattr(window, "most_s", 60))
  first.send(1)
  first.receive(2)
  second.receive(2)
  second.link.ready(2)
  rounds = coordinator.board.rounds
  wait(lambda: rounds.members[1].presence is Presence.IN)
  first.send(2)
  assert not first.link.wait_until(2, lambda: True)
  second.send(2)
  first.receive(3)
  assert first.members == {0: (0,), 1: (0,), 2: (0, 1)}


def test_no_round_closes_below_the_quorum(start):
  calendar = make_calendar(3, quorum=2, grace_s=0.0)
  coordinator, (first, second, third) = start(calendar)
  wait(lambda: coordinator.board.started)  # The group begins with all sites only.
  third.leave()
  second.leave()
  wait(lambda: coordinator.board.inside() == 1)
  first.send(0)
  wait(lambda: coordinator.call(lambda: coordinator.board.rounds.has(0, 0)))
  assert coordinator.call(lambda: coordinator.board.rounds.close(1e12)) is None
  back = Player(coordinator, 1)
  start.ends_with(back)
  back.join()
  back.send(0)
  first.receive(1)
  assert first.members == {0: (0, 1)}


def test_nobody_begins_alone(start):
  coordinator, (first,) = start(make_calendar(2), (0,))
  first.send(0)
  wait(lambda: coordinator.call(lambda: coordinator.board.rounds.has(0, 0)))
  assert not coordinator.board.started
  assert not first.link.wait_for_start(lambda: True)
  second = Player(coordinator, 1)
  start.ends_with(second)
  second.join()
  in_time(lambda: first.link.wait_for_start(lambda: False))
  play([second], range(1))
  first.receive(1)
  assert first.members == {0: (0, 1)}


def test_a_coordinator_that_stops_ends_all_connections_without_an_error(start, caplog):
  coordinator, players = start(make_calendar(2), (0, 1))
  play(players, range(1))
  stop = coordinator.server.stop()
  asyncio.run_coroutine_threadsafe(stop, coordinator._loop).result(60)
  wait(lambda: all(player.link.reconnects for player in players))
  assert not caplog.records
  assert not [line for line in coordinator.said if "gone" in line]


def test_a_site_tells_an_error_of_the_coordinator_from_its_absence(start, monkeypatch):
  join, until = Server._join, time.monotonic() + 2

  async def broken(server, iterator, context):
    if time.monotonic() < until:
      raise KeyError("shards")
    return await join(server, iterator, context)

  monkeypatch.setattr(Server, "_join", broken)
  coordinator, (player,) = start(sites=(0,))
  (line,) = player.said
  assert line.startswith(f"The coordinator at {coordinator.address} has an error")
  assert "shards" in line
  assert coordinator.board.inside() == 1

  coordinator.kill()
  other = Player(coordinator, 1)
  threading.Thread(target=other.link._run, daemon=True).start()
  wait(lambda: other.said)
  other.link._leaving = True
  assert other.said[0].startswith(f"No coordinator at {coordinator.address} (")


@pytest.mark.parametrize("kept", [0, 2, 5])
def test_the_run_goes_on_after_the_coordinator_was_killed(start, kept):
  coordinator, players = start()
  play(players, range(kept))
  players[0].send(kept)
  wait(lambda: len(players[1].link._parts.get((kept, 0), b"")) > 0)
  coordinator = coordinator.restart()
  start.ends_with(coordinator)
  for player in players[1:]:
    player.send(kept)
  for player in players:
    player.receive(kept + 1)
    assert player.members[kept] == (0, 1, 2)
  play(players, range(kept + 1, kept + 4))
  coordinator = coordinator.restart()
  start.ends_with(coordinator)
  play(players, range(kept + 4, kept + 6))
  assert {p.state for p in players} == {coordinator.state}
  assert coordinator.lines() == list(range(kept + 6))
  assert all(player.link.reconnects > 0 for player in players)


def test_a_restarted_coordinator_waits_for_all_also_if_a_checkpoint_has_their_round(
  start,
):
  coordinator, players = start()
  play(players, range(2))
  coordinator.kill()
  Journal(coordinator.workdir).forget(before=2)
  board = Board(coordinator.calendar, Journal(coordinator.workdir), print)
  board.rounds.sent(0, 2, now=0.0)
  assert board.rounds.close(now=1.0) is None


def test_rounds_close_while_a_restarted_coordinator_reads_the_outer_state(
  start, monkeypatch
):
  coordinator, players = start()
  play(players, range(2))
  read = threading.Event()

  class Slow(sites.Group):
    def __init__(self, journal):
      assert read.wait(60)
      super().__init__(journal)

  monkeypatch.setattr(sites, "Group", Slow)
  coordinator = coordinator.restart()
  start.ends_with(coordinator)
  play(players, range(2, 5))
  assert coordinator.lines() == list(range(5))
  read.set()
  wait(lambda: hasattr(coordinator, "group"))
  assert coordinator.state == players[0].state


def test_a_newcomer_gets_a_snapshot_and_one_that_comes_back_only_the_log(start):
  coordinator, players = start()
  play(players, range(3))
  old = players[2]
  old.leave()
  wait(lambda: coordinator.board.inside() == 2)
  fresh = Player(coordinator, 2)
  start.ends_with(fresh)
  fresh.join(digests=[99])  # For instance with another first state.
  assert fresh.applied == 3
  assert fresh.welcome.snapshot
  assert fresh.state == coordinator.state
  assert fresh.welcome.data == {"2": [2, {}]}
  play([*players[:2], fresh], range(3, 5))
  fresh.leave()
  wait(lambda: coordinator.board.inside() == 2)
  back = Player(coordinator, 2)
  start.ends_with(back)
  back.join(round=3, digests=[old.state])
  assert back.applied == 3
  assert not back.welcome.snapshot
  back.state = old.state
  back.receive(5)
  assert back.state == coordinator.state
  # Other values after as many rounds are not the group's.
  back.leave()
  wait(lambda: coordinator.board.inside() == 2)
  stranger = Player(coordinator, 2)
  start.ends_with(stranger)
  stranger.join(round=3, digests=[old.state + 1])
  assert stranger.state == coordinator.state


def test_a_site_whose_rounds_are_no_longer_kept_gets_a_snapshot_in_mid_run(start):
  coordinator, (first, second) = start(make_calendar(2), (0, 1))
  play([first, second], range(2))
  # It is cut off: its connection ends, and it cannot come back.
  call, second.link._open = second.link._call, lambda: _Nowhere()
  call.cancel()
  wait(lambda: coordinator.board.inside() == 1)
  play([first], range(2, 8))
  coordinator.call(lambda: coordinator.board._journal.forget(before=6))
  second.link._open = first.link._open
  wait(lambda: second.link._welcome)
  welcome = second.link.welcome()
  assert welcome.round == 8
  assert int.from_bytes(welcome.snapshot[:4]) == first.state
  second.state, second.applied = first.state, 8
  second.link.forget(8)
  second.link.ready(8)
  wait(lambda: coordinator.board.rounds.members[1].presence is Presence.IN)
  second.send(8)
  play([first], range(8, 9))
  second.receive(9)
  assert second.state == first.state
  assert second.members[8] == (0, 1)


class _Nowhere:
  """A channel to nobody."""

  def stream_stream(self, method):
    raise _Gone

  def close(self):
    pass


class _Gone(grpc.RpcError):
  def code(self):
    return grpc.StatusCode.UNAVAILABLE

  def details(self):
    return "nobody is there"


def test_a_site_that_is_ahead_waits_for_the_right_coordinator(start, tmp_path_factory):
  coordinator, players = start(sites=(0, 1, 2))
  play(players, range(3))
  coordinator.kill()
  empty = tmp_path_factory.mktemp("empty")
  wrong = Coordinator(ALL, empty, port=coordinator.port)
  start.ends_with(wrong)
  wait(lambda: all("it coordinates another run" in str(p.said) for p in players))
  assert [p.link._next for p in players] == [3, 3, 3]
  assert wrong.board.inside() == 0
  wrong.kill()
  right = Coordinator(ALL, coordinator.workdir, port=coordinator.port)
  start.ends_with(right)
  play(players, range(3, 5))
  assert right.lines() == list(range(5))


def test_no_process_that_knows_lost_rounds_comes_back_to_a_restored_copy(
  start, tmp_path
):
  calendar = make_calendar(2, grace_s=0.1)
  coordinator, (first, second) = start(calendar, (0, 1))
  play([first, second], range(3))
  wait(lambda: coordinator.group.applied == 3)
  copy = shutil.copytree(coordinator.workdir, tmp_path / "copy")
  play([first, second], range(3, 5))
  coordinator.kill()
  restored = Coordinator(calendar, copy, port=coordinator.port)
  start.ends_with(restored)
  back = Player(restored, 0).join()
  start.ends_with(back)
  back.receive(3)
  play([back], range(3, 6))
  said = "closed round 4 differently than this site knows, .*; start the site again"
  with pytest.raises(ConfigError, match=said):
    in_time(lambda: second.link.wait_until(99, lambda: False))
  assert restored.board.inside() == 1
  # Its checkpoint, too, has the lost rounds.
  again = Player(restored, 1).join(round=5, digests=[second.state])
  start.ends_with(again)
  assert (again.welcome.round, again.state) == (6, restored.state)


@contextlib.contextmanager
def through_a_pipe(port: int):
  """Yields the port of a pipe to another port, and an event that stops the pipe."""
  stopped, sockets = threading.Event(), [socket.create_server(("127.0.0.1", 0))]

  def copy(source, target):
    with contextlib.suppress(OSError):
      while data := source.recv(1 << 16):
        while stopped.is_set():
          time.sleep(0.05)
        target.sendall(data)

  def accept():
    with contextlib.suppress(OSError):
      while True:
        ends = sockets[0].accept()[0], socket.create_connection(("127.0.0.1", port))
        sockets.extend(ends)
        for pair in (ends, ends[::-1]):
          threading.Thread(target=copy, args=pair, daemon=True).start()

  threading.Thread(target=accept, daemon=True).start()
  yield sockets[0].getsockname()[1], stopped
  stopped.clear()
  for x in sockets:
    x.close()


@pytest.mark.integration("waits for gRPC's keep-alives")
def test_each_party_has_its_own_keepalive(start):
  slow, quick = (make_calendar(2, keepalive_s=s) for s in (3600.0, 1.0))
  coordinator, _ = start(slow, ())
  with through_a_pipe(coordinator.port) as (port, stopped):
    place = {"address": f"127.0.0.1:{port}"}
    sites = (types.SimpleNamespace(calendar=c, **place) for c in (quick, slow))
    asking, silent = (Player(at, k).join() for k, at in enumerate(sites))
    time.sleep(5)  # The coordinator allows so many questions.
    assert (asking.link.reconnects, silent.link.reconnects) == (0, 0)
    stopped.set()
    wait(lambda: asking.link.reconnects)
    assert silent.link.reconnects == 0
    for player in (asking, silent):
      player.link._leaving = True


def test_a_slow_site_holds_a_bounded_number_of_rounds(start):
  calendar = make_calendar(2, grace_s=0.0)
  coordinator, (first, second) = start(calendar, (0, 1))
  # A chunk of every round reaches the second site, which takes none.
  play([first], range(len(calendar.rounds)))
  wait(lambda: second.link.newest()[1] > second.link.room)
  assert len(second.link._closed) == second.link.room < len(calendar.rounds)
  second.receive(len(calendar.rounds))
  assert second.state == first.state == coordinator.state


def test_the_board_is_bounded(start):
  coordinator, players = start()
  fragments, sites, rounds = ALL.fragments, 3, len(ALL.rounds)
  for number in range(1 - fragments, rounds):
    for player in players[:2]:  # They send as early as they may.
      if number + fragments <= rounds:
        player.send(number + fragments - 1)
    if number < 0:
      continue
    assert len(coordinator.board.uploads) <= fragments * sites
    assert len(coordinator.board._recent) <= 2
    players[2].send(number)
    for player in players:
      player.receive(number + 1)
      assert len(player.link._closed) <= 1
      assert len(player.link._outgoing) <= fragments
      assert len(player.link._parts) <= fragments * sites
  assert coordinator.call(lambda: len(coordinator.board.uploads)) == 0
  assert coordinator.group.data.keys() == {"0", "1", "2"}


def test_sites_that_come_and_go_end_nothing(start):
  coordinator, players = start(make_calendar(3, grace_s=0.05))
  rounds = len(coordinator.calendar.rounds)
  stay = players[0]

  def come_and_go():
    for turn in range(4):
      for site in (1, 2):
        players[site].leave() if turn % 2 else players[site].link._call.cancel()
        back = Player(coordinator, site)
        start.ends_with(back)
        players[site] = back if turn % 2 else players[site]
        if turn % 2:
          back.join()
          number = min(back.applied, rounds - 1)
          back.send(number)

  with futures.ThreadPoolExecutor(1) as pool:
    coming = pool.submit(come_and_go)
    play([stay], range(rounds))
    coming.result(60)
  assert stay.state == coordinator.state
  assert coordinator.lines() == list(range(rounds))
